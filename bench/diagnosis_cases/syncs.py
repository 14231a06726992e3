"""Programs that make the host wait for the device.

Each case is a factory `name()` and its mended twin `name_fixed()`; CASES gives the cause and what was planted.
"""

from __future__ import annotations

import functools

import torch
from torch import nn


class Stack(nn.Module):
    """Eight layers; `between` sees what goes from one to the next."""

    def __init__(self, between, fixed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))
        self.between, self.fixed = between, fixed

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
            if not self.fixed:
                x = self.between(x)
        return x


def _stack(between, fixed):
    torch.manual_seed(0)
    return Stack(between, fixed).eval().requires_grad_(False), [torch.randn(32, 64) for _ in range(3)]


def nan_check(fixed=False):
    def check(x):
        if torch.isnan(x).any():
            raise ValueError("NaN")
        return x

    return _stack(check, fixed)


def item_log(fixed=False):
    seen = []

    def log(x):
        seen.append(x.mean().item())
        return x

    return _stack(log, fixed)


def round_trip_numpy(fixed=False):
    def trip(x):
        return torch.from_numpy(x.detach().cpu().numpy()).to(x.device)

    return _stack(trip, fixed)


def tolist_statistics(fixed=False):
    def look(x):
        max(x[0].tolist())
        return x

    return _stack(look, fixed)


class Masked(nn.Module):
    def __init__(self, way: str, fixed: bool) -> None:
        super().__init__()
        self.way, self.fixed = way, fixed

    def forward(self, x):
        for _ in range(10):
            keep = x > 0
            if self.fixed:
                x = torch.where(keep, x, 0.1 * x)
            elif self.way == "index":
                x = x.clone()
                x[~keep] = 0.1 * x[~keep]
            elif self.way == "nonzero":
                rows, columns = torch.where(~keep)
                x = x.index_put((rows, columns), 0.1 * x[rows, columns])
            else:
                x = x.masked_scatter(~keep, 0.1 * torch.masked_select(x, ~keep))
        return x


def mask_index(fixed=False):
    return Masked("index", fixed), [torch.randn(128, 256)]


def where_indices(fixed=False):
    return Masked("nonzero", fixed), [torch.randn(128, 256)]


def masked_select(fixed=False):
    return Masked("select", fixed), [torch.randn(128, 256)]


def python_sum(fixed=False):
    def model(x):
        if fixed:
            return x.sum()
        return torch.tensor(sum(float(value) for value in x), device=x.device)

    return model, [torch.randn(2000)]


CASES = {
    "nan_check": ("sync", "isnan().any() in an if after every layer"),
    "item_log": ("sync", "a statistic read with .item() after every layer"),
    "round_trip_numpy": ("sync", "through NumPy on the host after every layer"),
    "tolist_statistics": ("sync", ".tolist() after every layer"),
    "mask_index": ("sync", "boolean mask indexing where torch.where would do"),
    "where_indices": ("sync", "torch.where(mask) for indices where a mask would do"),
    "masked_select": ("sync", "masked_select and masked_scatter where torch.where would do"),
    "python_sum": ("sync", "a Python sum over the elements of a tensor"),
}


globals().update({f"{name}_fixed": functools.partial(globals()[name], fixed=True) for name in CASES})
