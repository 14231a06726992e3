"""Memory that a call leaves behind, and memory that it fetches from the system.

A C library that hands freed memory back to the system fetches it again for the next call, page by page, each zeroed
when it is first written.
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fettle.diagnose.evidence import Kept


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
        # By type, not isinstance: lazy proxies among all objects would be woken.
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


def pages_fetched() -> int:
    """Pages that this process has been given so far, by the system's own count."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def cost_of_fresh_memory(size: int = 32 << 20) -> tuple[float, float]:
    """Seconds that a page, and a byte, of memory cost that is fetched, written and given back, over writing it again.

    Pages are of whatever size the system gives here. 0 where memory of `size` bytes does not come from the system.
    """
    costs, counts = [], []
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
