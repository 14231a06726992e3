"""Fresh memory: what the system takes to give a page, and how many pages a process is given.

A C library that hands freed memory back to the system fetches it again for the next call, page by page, each zeroed
when it is first written.
"""

from __future__ import annotations

import statistics
import time

import torch


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
