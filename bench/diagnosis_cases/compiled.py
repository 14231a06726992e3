"""Compiled programs that do not stay compiled.

Each case is a factory `name()` and its mended twin `name_fixed()`; CASES gives the cause and what was planted.
"""

from __future__ import annotations

import functools

import torch
from torch import nn


class Breaks(nn.Module):
    """Six layers; the planted line sits between them."""

    def __init__(self, way: str, fixed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.way, self.fixed, self.calls, self.seen = way, fixed, 0, []

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
            if not self.fixed:
                if self.way == "print":
                    print("layer done")
                elif self.way == "numpy":
                    self.seen.append(x.detach().numpy().tobytes()[:1])
                elif self.way == "item":
                    x = x * (2.0 if x.sum().item() > 0 else 1.0)
                elif self.way == "branch":
                    x = x + 1 if x.mean() > 0 else x - 1
        if self.way == "counter" and not self.fixed:
            self.calls += 1
            x = x * self.calls
        return x


def _module(way, fixed, inputs=None):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = torch.compile(Breaks(way, fixed).eval().requires_grad_(False), backend="aot_eager", dynamic=False)
    return model, inputs or [torch.randn(16, 64) for _ in range(3)]


def graph_break_print(fixed=False):
    return _module("print", fixed)


def graph_break_numpy(fixed=False):
    return _module("numpy", fixed)


def graph_break_item(fixed=False):
    return _module("item", fixed)


def graph_break_branch(fixed=False):
    return _module("branch", fixed)


def recompile_shapes(fixed=False):
    """Every length is a program of its own; mended, all are padded to one."""
    sizes = [16] * 7 if fixed else range(10, 17)
    return _module("none", True, [torch.randn(size, 64) for size in sizes])


def recompile_limit(fixed=False):
    """More lengths than the limit: the last ones run eagerly."""
    sizes = [16] * 12 if fixed else range(5, 17)
    return _module("none", True, [torch.randn(size, 64) for size in sizes])


def recompile_counter(fixed=False):
    return _module("counter", fixed)


def recompile_type(fixed=False):
    """Batches of two types in turn."""
    kinds = [torch.float32] * 2 if fixed else [torch.float32, torch.float64]
    torch._dynamo.reset()

    def model(x):
        return (x * 2).relu().sum(-1)

    return torch.compile(model, backend="aot_eager"), [torch.randn(16, 64, dtype=kind) for kind in kinds]


CASES = {
    "graph_break_print": ("graph-break", "print between layers"),
    "graph_break_numpy": ("graph-break", "bytes of a NumPy array kept between layers"),
    "graph_break_item": ("graph-break", ".item() and a branch on it"),
    "graph_break_branch": ("graph-break", "a branch on a tensor's value"),
    "recompile_shapes": ("recompile", "seven lengths with dynamic=False"),
    "recompile_limit": ("recompile-limit", "twelve lengths with dynamic=False, limit 8"),
    "recompile_counter": ("recompile", "a counter on the module that is part of the result"),
    "recompile_type": ("recompile", "float32 and float64 batches in turn"),
}


globals().update({f"{name}_fixed": functools.partial(globals()[name], fixed=True) for name in CASES})
