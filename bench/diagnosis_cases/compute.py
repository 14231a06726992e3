"""Programs whose work is done in the wrong way: host, kernels, precision, layout, attention.

Each case is a factory `name()` and its mended twin `name_fixed()`; CASES gives the cause and what was planted.
"""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F


def _net(width=256, depth=4):
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU()))).eval()


class Call(nn.Module):
    """A net and how it is called."""

    def __init__(self, net, how) -> None:
        super().__init__()
        self.net, self.how = net, how

    def forward(self, *args):
        return self.how(self.net, *args)


def row_by_row(fixed=False):
    def how(net, x):
        return net(x) if fixed else torch.stack([net(row[None])[0] for row in x])

    return Call(_net(64), how), [torch.randn(64, 64)]


def time_loop(fixed=False):
    def how(net, x):
        if fixed:
            return x.cumsum(0)
        total, out = torch.zeros_like(x[0]), []
        for row in x:
            total = total + row
            out.append(total)
        return torch.stack(out)

    return Call(nn.Identity(), how), [torch.randn(512, 32)]


def tiny_operators(fixed=False):
    def how(net, x):
        return (
            F.gelu(x, approximate="tanh") if fixed else 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))
        )

    return Call(nn.Identity(), how), [torch.randn(512, 1024)]


def cat_in_a_loop(fixed=False):
    def how(net, x):
        if fixed:
            return torch.cat(list(x))
        out = x[0]
        for part in x[1:]:
            out = torch.cat([out, part])
        return out

    return Call(nn.Identity(), how), [torch.randn(64, 32, 256)]


def double_weights(fixed=False):
    kind = torch.float32 if fixed else torch.float64
    return _net(512).to(kind), [torch.randn(64, 512, dtype=kind)]


def double_constant(fixed=False):
    scale = torch.ones(1024, dtype=torch.float32 if fixed else torch.float64)

    def how(net, x):
        return ((x * scale).softmax(-1) * scale).exp().tanh()

    return Call(nn.Identity(), how), [torch.randn(256, 1024)]


def casts_back_and_forth(fixed=False):
    def how(net, x):
        for layer in net:
            x = layer(x) if fixed else layer(x).half().float()
        return x

    return Call(_net(256, 6), how), [torch.randn(512, 256)]


def layout_back_and_forth(fixed=False):
    torch.manual_seed(0)
    net = nn.ModuleList(nn.Conv2d(16, 16, 1) for _ in range(6)).eval()

    def how(net, x):
        for layer in net:
            if not fixed:
                x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2).contiguous()
            x = layer(x)
        return x

    return Call(net, how), [torch.randn(8, 16, 64, 64)]


def clone_everywhere(fixed=False):
    def how(net, x):
        for _ in range(10):
            x = (x if fixed else x.clone()).mul(1.01)
        return x

    return Call(nn.Identity(), how), [torch.randn(1024, 1024)]


def repeat_for_expand(fixed=False):
    def how(net, x):
        mask = torch.ones(1, 1, x.shape[-1])
        return x + (mask.expand_as(x) if fixed else mask.repeat(x.shape[0], x.shape[1], 1))

    return Call(nn.Identity(), how), [torch.randn(64, 256, 256)]


def written_out_attention(fixed=False):
    def how(net, q, k, v):
        if fixed:
            return F.scaled_dot_product_attention(q, k, v)
        return ((q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5).softmax(-1) @ v

    return Call(nn.Identity(), how), [tuple(torch.randn(1, 8, 1024, 32) for _ in range(3))]


def no_key_value_cache(fixed=False):
    def how(net, x):
        with torch.no_grad():
            keys: list[torch.Tensor] = []
            out = []
            for end in range(1, x.shape[0] + 1):
                if fixed:
                    keys.append(net(x[end - 1 : end]))
                    k = torch.cat(keys)
                else:
                    k = net(x[:end])
                out.append(F.scaled_dot_product_attention(x[end - 1 : end], k, k))
        return torch.cat(out)

    return Call(_net(128, 3), how), [torch.randn(96, 128)]


def padding(fixed=False):
    """One long row among short ones; mended, the short ones are in a batch of their own length."""
    torch.manual_seed(0)
    table = nn.Embedding(100, 128, padding_idx=0)

    def how(net, ids):
        if fixed:
            return net(table(ids[1:, :16])), net(table(ids[:1]))
        return net(table(ids))

    ids = torch.randint(1, 100, (32, 256))
    ids[1:, 16:] = 0
    return Call(_net(128), how), [ids]


def broadcast_distances(fixed=False):
    def how(net, x):
        return torch.cdist(x, x) if fixed else (x[:, None] - x[None]).square().sum(-1).sqrt()

    return Call(nn.Identity(), how), [torch.randn(512, 64)]


CASES = {
    "row_by_row": ("launch-bound", "a network called once for each row"),
    "time_loop": ("launch-bound", "a running sum in a Python loop"),
    "tiny_operators": ("unfused-elementwise", "GELU written out"),
    "cat_in_a_loop": ("copies", "torch.cat onto a growing tensor"),
    "double_weights": ("float64", "weights and inputs in float64"),
    "double_constant": ("float64", "a float64 constant that lifts all to float64"),
    "casts_back_and_forth": ("casts", "half and float in turn"),
    "layout_back_and_forth": ("layout", "NHWC and NCHW in turn"),
    "clone_everywhere": ("copies", "clone before every operator"),
    "repeat_for_expand": ("copies", "repeat where expand would do"),
    "written_out_attention": ("attention", "the attention matrix is materialised"),
    "no_key_value_cache": ("recomputation", "all keys computed again for every token"),
    "padding": ("padding", "31 of 32 rows are 94% padding"),
    "broadcast_distances": ("memory-spike", "pairwise distances through a three-dimensional difference"),
}


globals().update({f"{name}_fixed": functools.partial(globals()[name], fixed=True) for name in CASES})
