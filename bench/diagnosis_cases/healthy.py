"""Programs in which nothing is planted: a finding here is a false one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def _eval(net):
    torch.manual_seed(0)
    net = net.eval()

    def model(*args):
        with torch.inference_mode():
            return net(*args)

    return model


def mlp():
    net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    return _eval(net), [torch.randn(128, 512) for _ in range(3)]


def matmul():
    a = torch.randn(768, 768)
    return lambda x: x @ a, [torch.randn(768, 768)]


def convolutions():
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU()).to(
        memory_format=torch.channels_last
    )
    return _eval(net), [torch.randn(8, 3, 64, 64).to(memory_format=torch.channels_last)]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, 32)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def attention():
    return _eval(Attention()), [torch.randn(4, 256, 256)]


def recurrent():
    return _eval(nn.LSTM(128, 256, batch_first=True)), [torch.randn(16, 64, 128)]


def embedding_bag():
    return _eval(nn.EmbeddingBag(10_000, 256)), [torch.randint(0, 10_000, (512, 64))]


def compiled():
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).eval()
    return _eval(torch.compile(net, backend="aot_eager")), [torch.randn(256, 256) for _ in range(3)]


def training_step():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def step(x):
        with torch.enable_grad():
            optimizer.zero_grad()
            F.mse_loss(net(x), x).backward()
            optimizer.step()

    return step, [torch.randn(256, 512)]


def layer_norm():
    return _eval(nn.LayerNorm(2048)), [torch.randn(1024, 2048)]


def decoder_layer():
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, dropout=0.0)
    return _eval(layer), [torch.randn(8, 128, 256)]


CASES = dict.fromkeys(
    (
        "mlp",
        "matmul",
        "convolutions",
        "attention",
        "recurrent",
        "embedding_bag",
        "compiled",
        "training_step",
        "layer_norm",
        "decoder_layer",
    ),
    ("", "nothing planted"),
)
