"""Programs that wait for their data. One call is one pass over a small loader.

Each case is a factory `name()` and its mended twin `name_fixed()`; CASES gives the cause and what was planted.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Items(Dataset):
    def __init__(self, size: int, cost_s: float = 0.0, python_work: int = 0, kind=torch.float32) -> None:
        self.size, self.cost_s, self.python_work = size, cost_s, python_work
        self.data = torch.randn(size, 64, dtype=kind)

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.cost_s:
            time.sleep(self.cost_s)  # stands for a read from a disk or a network
        if self.python_work:
            sum(value * value for value in range(self.python_work))  # stands for decoding in Python
        return self.data[index].float()


class Epoch:
    """Call it to go through the loader once and train on it."""

    def __init__(self, loader, width: int = 256) -> None:
        torch.manual_seed(0)
        self.loader, self.net = loader, nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def __call__(self):
        with torch.enable_grad():
            for x in self.loader:
                self.optimizer.zero_grad()
                self.net(x).square().mean().backward()
                self.optimizer.step()


def _epoch(dataset, width=256, **options):
    return Epoch(DataLoader(dataset, **{"batch_size": 8, **options}), width), [()]


def slow_read(fixed=False):
    return _epoch(Items(64, cost_s=0.0 if fixed else 0.003))


def slow_decode(fixed=False):
    return _epoch(Items(64, python_work=0 if fixed else 20_000))


def slow_collate(fixed=False):
    def collate(rows):
        return torch.tensor([[float(value) for value in row] for row in rows])

    return _epoch(Items(256), batch_size=32, collate_fn=None if fixed else collate)


def workers_every_epoch(fixed=False):
    return _epoch(Items(64), num_workers=1, persistent_workers=fixed)


def batch_of_one(fixed=False):
    return _epoch(Items(256), batch_size=32 if fixed else 1)


class Numbers(IterableDataset):
    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info and self.sharded else (0, 1)
        for number in range(first, 64, stride):
            yield torch.full((64,), float(number))


def every_item_twice(fixed=False):
    # Wide enough that a step, not the host's work around it, is what comes twice.
    return _epoch(Numbers(sharded=fixed), width=16384, num_workers=2, persistent_workers=True)


CASES = {
    "slow_read": ("data-wait", "3 ms to read an item, no workers"),
    "slow_decode": ("data-wait", "decoding in Python, no workers"),
    "slow_collate": ("data-wait", "collating element by element"),
    "workers_every_epoch": ("data-wait", "workers started anew for every short epoch"),
    "batch_of_one": ("small-batch", "a batch of one"),
    "every_item_twice": ("duplicate-data", "an IterableDataset that does not shard among two workers"),
}


globals().update({f"{name}_fixed": functools.partial(globals()[name], fixed=True) for name in CASES})
