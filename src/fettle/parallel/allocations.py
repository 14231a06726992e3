"""How many bytes torch's CPU allocator has handed out, over time, in all threads.

The profiler reports each allocation and free of the threads it watches, and with each the allocator's count of what
it has handed out in all. By itself the allocator counts only what those threads do, and gloo frees the buffers of a
collective in threads of its own: they would look alive for ever. With c10's flag ``caffe2_report_cpu_memory_usage`` it
counts for every thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fettle.memory.cpu import events_in_time


@contextmanager
def allocations() -> Iterator[Callable[[], list[Any]]]:
    """Count from here; afterwards the function that is yielded gives the tree of the profiler's events."""
    from torch.profiler import ProfilerActivity, profile

    _count_every_thread()
    events: list[Any] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
        yield lambda: events
    assert running.profiler is not None
    assert running.profiler.kineto_results is not None
    events += running.profiler.kineto_results.experimental_event_tree()


def taken_by(events: list[Any]) -> int:
    """How many bytes more were handed out at the peak than when the counting began."""
    timed = (event.extra_fields for kind, event in events_in_time(events) if kind == "Allocation")
    moves = [fields for fields in timed if fields.device.type == "cpu"]
    if not moves:
        return 0
    before = int(moves[0].total_allocated) - int(moves[0].alloc_size)
    return max(int(move.total_allocated) for move in moves) - before


def _count_every_thread() -> None:
    """Set the flag, where this build of torch has it under its own name; without it the count is too high at times."""
    import torch

    for library in sorted((Path(torch.__file__).parent / "lib").glob("*c10.*")):
        try:
            ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage").value = True
            return
        except (OSError, ValueError):
            continue
