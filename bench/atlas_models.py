"""Small models of the families that people have: each a factory of a model in eval mode and four batches.

They have random weights and take some milliseconds to tens of them on two cores, so that an atlas of many recipes is
affordable. `FAMILY` says what each is.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

BATCHES = 4


def _seeded(make, batch):
    torch.manual_seed(0)
    model = make().eval()
    return model, [batch() for _ in range(BATCHES)]


class Block(nn.Module):
    """A transformer block with scaled_dot_product_attention."""

    def __init__(self, dim: int, heads: int, causal: bool = False, ffn: nn.Module | None = None) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = ffn or nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.ffn(self.norm2(x))


class ManualBlock(Block):
    """The same with attention written out."""

    def attend(self, q, k, v):
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.causal:
            t = q.shape[-2]
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
        return scores.softmax(-1) @ v


class Tokens(nn.Module):
    def __init__(self, vocabulary: int, dim: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, dim), nn.Parameter(torch.randn(length, dim) * 0.02)

    def forward(self, x):
        return self.token(x) + self.place[: x.shape[1]]


def encoder():
    def make():
        return nn.Sequential(Tokens(2000, 192, 64), *(Block(192, 4) for _ in range(4)), nn.Linear(192, 64))

    return _seeded(make, lambda: torch.randint(2000, (8, 48)))


def encoder_wide():
    def make():
        return nn.Sequential(Tokens(1000, 512, 32), *(Block(512, 8) for _ in range(2)), nn.Linear(512, 16))

    return _seeded(make, lambda: torch.randint(1000, (4, 32)))


class Patches(nn.Module):
    def __init__(self, dim: int, size: int, length: int) -> None:
        super().__init__()
        self.cut, self.place = nn.Conv2d(3, dim, size, size), nn.Parameter(torch.randn(length, dim) * 0.02)

    def forward(self, x):
        return self.cut(x).flatten(2).transpose(1, 2) + self.place


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def vision_transformer():
    def make():
        return nn.Sequential(Patches(192, 8, 64), *(Block(192, 3) for _ in range(4)), Mean(), nn.Linear(192, 100))

    return _seeded(make, lambda: torch.randn(8, 3, 64, 64))


def decoder():
    def make():
        return nn.Sequential(Tokens(2000, 256, 64), *(Block(256, 4, True) for _ in range(3)), nn.Linear(256, 2000))

    return _seeded(make, lambda: torch.randint(2000, (4, 64)))


def decoder_manual():
    def make():
        return nn.Sequential(
            Tokens(1000, 192, 96), *(ManualBlock(192, 6, True) for _ in range(4)), nn.Linear(192, 1000)
        )

    return _seeded(make, lambda: torch.randint(1000, (4, 96)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return F.relu(x + self.body(x))


def resnet():
    def make():
        return nn.Sequential(
            nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), Residual(32),
            nn.Conv2d(32, 64, 3, 2, 1), Residual(64),
            nn.Conv2d(64, 128, 3, 2, 1), Residual(128), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100),
        )  # fmt: skip

    return _seeded(make, lambda: torch.randn(8, 3, 64, 64))


class Inverted(nn.Module):
    """MobileNet's block: depthwise convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        wide = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(),
            nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return x + self.body(x)


def mobilenet():
    def make():
        return nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1), *(Inverted(24) for _ in range(2)), nn.Conv2d(24, 48, 3, 2, 1),
            *(Inverted(48) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 100),
        )  # fmt: skip

    return _seeded(make, lambda: torch.randn(8, 3, 64, 64))


class ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(self.spread(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


def convnext():
    def make():
        return nn.Sequential(
            nn.Conv2d(3, 64, 4, 4), *(ConvNext(64) for _ in range(3)), nn.Conv2d(64, 128, 2, 2),
            *(ConvNext(128) for _ in range(3)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100),
        )  # fmt: skip

    return _seeded(make, lambda: torch.randn(4, 3, 96, 96))


class UNet(nn.Module):
    """Segmentation: down, up, and a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.middle = nn.Conv2d(3, 24, 3, padding=1), nn.Conv2d(24, 48, 3, 2, 1), Residual(48)
        self.up, self.last = nn.ConvTranspose2d(48, 24, 2, 2), nn.Conv2d(48, 8, 3, padding=1)

    def forward(self, x):
        skip = F.relu(self.first(x))
        return self.last(torch.cat([skip, self.up(self.middle(F.relu(self.down(skip))))], 1))


def segmentation():
    return _seeded(UNet, lambda: torch.randn(2, 3, 96, 96))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], layers: int, both: bool) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(1000, 128), kind(128, 256, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(512 if both else 256, 32)

    def forward(self, x):
        return self.head(self.body(self.embed(x))[0])


def lstm():
    return _seeded(lambda: Recurrent(nn.LSTM, 2, False), lambda: torch.randint(1000, (8, 32)))


def gru_both_ways():
    return _seeded(lambda: Recurrent(nn.GRU, 1, True), lambda: torch.randint(1000, (8, 40)))


class Denoiser(nn.Module):
    """A diffusion U-Net in small: convolutions with group norm, a timestep, attention in the middle."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, width), nn.SiLU(), nn.Linear(width, width))
        self.first, self.down = nn.Conv2d(4, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.attention, self.last = Block(width, 4), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x, step):
        angles = step[:, None] * torch.exp(-torch.arange(32, device=x.device) / 4)
        told = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))[:, :, None, None]
        x = self.down(self.first(x)) + told
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(F.silu(norm(x)))
        b, c, h, w = x.shape
        x = self.attention(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(b, c, h, w)
        return self.last(F.interpolate(x, scale_factor=2.0))


def diffusion_unet():
    return _seeded(Denoiser, lambda: (torch.randn(2, 4, 32, 32), torch.rand(2) * 100))


class DiffusionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = Patches(192, 4, 64), nn.Linear(1, 192)
        self.blocks, self.out = nn.Sequential(*(Block(192, 4) for _ in range(4))), nn.Linear(192, 48)

    def forward(self, x, step):
        return self.out(self.blocks(self.patches(x) + self.time(step[:, None])[:, None]))


def diffusion_transformer():
    return _seeded(DiffusionTransformer, lambda: (torch.randn(4, 3, 32, 32), torch.rand(4)))


class Speech(nn.Module):
    """Whisper's encoder in small: two convolutions over a spectrogram, then blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(40, 160, 3, padding=1), nn.Conv1d(160, 160, 3, 2, 1)
        self.blocks = nn.Sequential(*(Block(160, 4) for _ in range(3)))

    def forward(self, x):
        return self.blocks(F.gelu(self.two(F.gelu(self.one(x)))).transpose(1, 2))


def speech_encoder():
    return _seeded(Speech, lambda: torch.randn(4, 40, 200))


def speech_convolutions():
    """Raw sound through strided convolutions, as wav2vec's feature extractor has them."""
    layers = [nn.Conv1d(1, 96, 10, 5), nn.GELU()]
    for size in (8, 4, 4):
        layers += [nn.Conv1d(96, 96, size, 2), nn.GELU()]
    return _seeded(lambda: nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(96, 35)),
                   lambda: torch.randn(4, 1, 8000))  # fmt: skip


def ranker():
    def make():
        return nn.Sequential(
            nn.EmbeddingBag(5000, 256),
            nn.Linear(256, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 16),
        )

    return _seeded(make, lambda: torch.randint(5000, (256, 20)))


def tabular():
    layers = [part for _ in range(6) for part in (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU())]
    return _seeded(lambda: nn.Sequential(nn.Linear(64, 256), *layers, nn.Linear(256, 2)), lambda: torch.randn(512, 64))


class Mixture(nn.Module):
    """Each token goes to one of four experts."""

    def __init__(self, dim: int = 192, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(experts)
        )

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        best, chosen = weights.max(-1, keepdim=True)
        return sum(expert(x) * (chosen == place) for place, expert in enumerate(self.experts)) * best


def mixture():
    def make():
        return nn.Sequential(Tokens(1000, 192, 32), *(Block(192, 4, ffn=Mixture()) for _ in range(2)))

    return _seeded(make, lambda: torch.randint(1000, (4, 32)))


class GraphConvolution(nn.Module):
    """Messages along edges, summed where they arrive."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.own, self.message = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, source, target):
        arrived = torch.zeros_like(x).index_add(0, target, self.message(x)[source])
        return F.relu(self.own(x) + arrived / 8)


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 128), nn.Linear(128, 16)
        self.layers = nn.ModuleList(GraphConvolution(128) for _ in range(3))

    def forward(self, x, source, target):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, source, target)
        return self.last(x)


def graph():
    def edges():
        return torch.randint(1500, (12_000,))

    return _seeded(Graph, lambda: (torch.randn(1500, 64), edges(), edges()))


FAMILY = {
    "encoder": "transformer encoder", "encoder_wide": "transformer encoder",
    "vision_transformer": "transformer encoder",
    "decoder": "transformer decoder", "decoder_manual": "transformer decoder", "resnet": "convolutional",
    "mobilenet": "convolutional", "convnext": "convolutional", "segmentation": "convolutional", "lstm": "recurrent",
    "gru_both_ways": "recurrent", "diffusion_unet": "diffusion", "diffusion_transformer": "diffusion",
    "speech_encoder": "speech", "speech_convolutions": "speech", "ranker": "MLP", "tabular": "MLP",
    "mixture": "mixture", "graph": "graph",
}  # fmt: skip
"""By factory."""
