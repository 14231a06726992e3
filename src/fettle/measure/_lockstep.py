"""Decisions that all ranks of a trial must take alike, or one would wait for ever for another. Alone, nothing to do."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

PATIENCE_S = 10.0
"""How far apart ranks may be that do the same."""


def agreed(go: bool) -> bool:
    """What rank 0 says."""
    group = _group()
    if group is None:
        return go
    word = _number(group, int(go))
    group.broadcast(word, 0)
    return bool(word.item())


def slowest(ns: int) -> int:
    """The longest time of any rank."""
    group = _group()
    if group is None:
        return ns
    longest = _number(group, ns)
    group.all_reduce(longest, group.ReduceOp.MAX)
    return int(longest.item())


def everywhere(what: str) -> bool:
    """Whether all ranks come to say this within `PATIENCE_S`: no collective, in which some of them may wait instead."""
    group = _group()
    if group is None:
        return True
    store, until = group.distributed_c10d._get_default_store(), time.monotonic() + PATIENCE_S
    come = store.add(what, 1)
    while come < group.get_world_size() and time.monotonic() < until:
        time.sleep(0.05)
        come = store.add(what, 0)
    return bool(come >= group.get_world_size())


def mean(value: Any) -> Any:
    """The mean of a tensor of one number over the ranks."""
    group = _group()
    if group is None:
        return value
    total = value.detach().clone()
    group.all_reduce(total)
    return total / group.get_world_size()


def _group() -> Any:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed if distributed.get_world_size() > 1 else None


def _number(group: Any, value: int) -> Any:
    return torch.tensor(value, dtype=torch.int64, device="cuda" if group.get_backend() == "nccl" else "cpu")
