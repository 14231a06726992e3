"""Memory that a call leaves behind, and memory that it fetches from the system; what weights and inputs hold.

A C library that hands freed memory back to the system fetches it again for the next call, page by page, each zeroed
when it is first written.
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fettle.diagnose.evidence import Kept, Padding, Weights
from fettle.doctor.program import subnormal_share
from fettle.procs.limits import pages_fetched
from fettle.workload import Workload, leaves, stored


def kept_alive(call: Callable[[], Any], calls: int = 3) -> Kept:
    """Tensors a call that outlive it and the next call too; none unless every call left such.

    Told apart one by one, over `calls` calls after one that settles caches: a count of all tensors would miss a leak
    while something else in the process lets go of as many. What the last call left is not judged: a result, a cache
    that the next call replaces.
    """
    known: dict[int, weakref.ref[torch.Tensor]] = {}
    born: list[list[weakref.ref[torch.Tensor]]] = []
    for _ in range(calls + 1):
        call()
        gc.collect()
        # By type: isinstance would make lazy proxies among all objects load.
        alive = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        last, known = known, {id(tensor): weakref.ref(tensor) for tensor in alive}
        # An address may be another tensor's by now.
        born.append([known[id(tensor)] for tensor in alive if last.get(id(tensor), lambda: None)() is not tensor])
        del alive  # it would keep them for the next count
    left = [[tensor for ref in refs if (tensor := ref()) is not None] for refs in born[1:-1]]
    if not all(left):
        return Kept()
    kept = [tensor for tensors in left for tensor in tensors]
    graphs = sum(tensor.grad_fn is not None for tensor in kept)
    size = sum(tensor.numel() * tensor.element_size() for tensor in kept)
    return Kept(len(kept) / len(left), graphs / len(left), size / len(left))


def cost_of_fresh_memory() -> tuple[float, float]:
    """Seconds that a page, and a byte, of memory cost that is fetched, written and given back, over writing it again.

    Pages are of whatever size the system gives here. 0 where 32 MiB do not come from the system.
    """
    costs, counts, size = [], [], 32 << 20
    for _ in range(3):
        before, began = pages_fetched(), time.perf_counter()
        tensor = torch.empty(size, dtype=torch.uint8)  # large enough that it comes from the system each time
        tensor.fill_(1)
        fetched = time.perf_counter() - began
        counts.append(pages_fetched() - before)
        again = []
        for _ in range(2):
            began = time.perf_counter()
            tensor.fill_(1)
            again.append(time.perf_counter() - began)
        began = time.perf_counter()
        del tensor
        costs.append(fetched + time.perf_counter() - began - min(again))
    cost, pages = max(0.0, statistics.median(costs)), statistics.median(counts)
    return (cost / pages if pages else 0.0), cost / size


def allocator_counts(device: str) -> dict[str, int]:
    """How often the device's allocator went to the device, and how often it had to give back its cache first."""
    stats = torch.cuda.memory_stats() if device == "cuda" else {}
    names = ("num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams")
    return {name: int(stats[name]) for name in names if name in stats}


def padding(workload: Workload) -> Padding:
    """Padded positions in the inputs: the zeros of a mask with as many rows as another input, else a last token that is
    repeated there and hardly found elsewhere."""
    padded = positions = 0
    where = ""
    for batch in workload.inputs:
        inputs = {path: leaf for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() >= 2}
        matrices = {path: leaf for path, leaf in inputs.items() if leaf.dim() == 2}
        masks = [matrices.pop(path) for path in list(matrices) if path.endswith("attention_mask")]
        rows = {len(leaf) for path, leaf in inputs.items() if not path.endswith("attention_mask")}
        mask = next((mask for mask in masks if len(mask) in rows or not rows), None)
        if mask is not None:
            padded += int((mask == 0).sum())
            positions += mask.numel()
            where = "attention_mask"
            continue
        tokens = (t for t in matrices.values() if t.dtype in (torch.int32, torch.int64) and not t.is_nested)
        ids = next((t for t in tokens if len(t) and t.shape[1] > 4), None)
        if ids is not None:
            last = ids[:, -1:]
            filler = last.mode(0).values
            run = (ids.flip(1) == last).long().cumprod(1).sum(1)
            alike = int((last == filler).sum())
            elsewhere = int((ids == filler).sum() - run[last[:, 0] == filler].sum())
            # The same token at the end of several rows, and hardly elsewhere, is padding.
            if (alike > 1 or len(ids) == 1) and 10 * elsewhere <= int(run.sum()):
                padded += int(run[run > 1].sum())
            positions += ids.numel()
            where = "a repeated last token"
    return Padding(padded / positions if positions else 0.0, where)


def weights(module: torch.nn.Module | None) -> Weights:
    """The model's parameters; nothing of what is not a module."""
    named = module.named_parameters() if module is not None else ()
    parts = [(name, part) for name, parameter in named for part in stored(parameter.detach())]
    size = sum(part.numel() * part.element_size() for _, part in parts)
    return Weights(size, _duplicates(parts), subnormal_share(part for _, part in parts))


def _duplicates(parts: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Bytes of large parameters that equal another one in memory of their own, but for constants, which many layers
    begin with, and layers of one stack, which begin as copies of each other."""
    groups: dict[Any, list[tuple[list[str], torch.Tensor]]] = defaultdict(list)
    for name, tensor in parts:
        path = [part for part in name.split(".") if not part.isdigit()]
        if tensor.numel() >= 1 << 16 and bool((tensor != tensor.flatten()[0]).any()):
            key = (tuple(tensor.shape), tensor.dtype, float(tensor.flatten()[:64].double().sum()))
            groups[key].append((path, tensor))
    wasted = 0
    for same in groups.values():
        kept: list[tuple[list[str], torch.Tensor]] = []
        for path, tensor in same:
            if any(
                path != there and tensor.data_ptr() != other.data_ptr() and torch.equal(tensor, other)
                for there, other in kept
            ):
                wasted += tensor.numel() * tensor.element_size()
            else:
                kept.append((path, tensor))
    return wasted
