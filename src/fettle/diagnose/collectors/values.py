"""What the weights and the inputs of a workload hold."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from fettle.diagnose.evidence import Padding, Weights
from fettle.workload import Workload, leaves


def padding(workload: Workload) -> Padding:
    """Padded positions in the inputs: a mask's zeros, else a repeated last token."""
    padded = positions = 0
    where = ""
    for batch in workload.inputs:
        matrices = {path: leaf for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() == 2}
        mask = next((t for path, t in matrices.items() if path.endswith("attention_mask")), None)
        if mask is not None:
            padded += int((mask == 0).sum())
            positions += mask.numel()
            where = "attention_mask"
            continue
        ids = next((t for t in matrices.values() if t.dtype in (torch.int32, torch.int64) and t.shape[1] > 4), None)
        if ids is not None:
            last = ids[:, -1:]
            run = (ids.flip(1) == last).long().cumprod(1).sum(1)
            alike = int((last == last.mode(0).values).sum())
            if alike > 1 or len(ids) == 1:  # one token at the end of several rows: the filler
                padded += int(run[run > 1].sum())
            positions += ids.numel()
            where = "a repeated last token"
    return Padding(padded / positions if positions else 0.0, where)


def weights(module: torch.nn.Module | None) -> Weights:
    """The model's parameters; nothing of what is not a module."""
    size = sum(p.numel() * p.element_size() for p in module.parameters()) if module is not None else 0
    return Weights(size, _duplicates(module), _subnormal(module))


def _subnormal(module: torch.nn.Module | None) -> float:
    """Share of nonzero float32 weights below the smallest normal number."""
    small = total = 0
    for parameter in module.parameters() if module is not None else ():
        if parameter.dtype == torch.float32 and parameter.device.type == "cpu":
            magnitude = parameter.detach().abs()
            small += int(((magnitude > 0) & (magnitude < torch.finfo(torch.float32).tiny)).sum())
            total += int((magnitude > 0).sum())
    return small / total if total else 0.0


def _duplicates(module: torch.nn.Module | None) -> int:
    """Bytes of large parameters that equal another one, value for value, in memory of their own."""
    groups: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in module.parameters() if module is not None else ():
        if parameter.numel() >= 1 << 16:
            key = (tuple(parameter.shape), parameter.dtype, float(parameter.detach().flatten()[:64].double().sum()))
            groups[key].append(parameter.detach())
    wasted = 0
    for same in groups.values():
        kept: list[torch.Tensor] = []
        for tensor in same:
            if any(tensor.data_ptr() != other.data_ptr() and torch.equal(tensor, other) for other in kept):
                wasted += tensor.numel() * tensor.element_size()
            else:
                kept.append(tensor)
    return wasted
