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

Moment = tuple[int, int]
"""Nanoseconds and bytes handed out since the counting began."""


@contextmanager
def allocations() -> Iterator[Callable[[], list[Any]]]:
    """Count from here; afterwards the function that is yielded gives the profiler's events for `peak_of`."""
    from torch.profiler import ProfilerActivity, profile

    _count_every_thread()
    events: list[Any] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as running:
        yield lambda: events
    assert running.profiler is not None
    assert running.profiler.kineto_results is not None
    events += running.profiler.kineto_results.experimental_event_tree()


def peak_of(events: list[Any], within: str = "") -> int:
    """Most bytes handed out at once, within the range recorded under the name `within` where one is given."""
    moments, begin, end = _moments(events, within)
    before = [held for time_ns, held in moments if time_ns < begin]
    inside = [held for time_ns, held in moments if begin <= time_ns <= end]
    return max([*before[-1:], *inside], default=0)


def taken_by(events: list[Any]) -> int:
    """How much more was handed out at the peak than when the recording began."""
    moments, _, _ = _moments(events, "")
    return max((held for _, held in moments), default=0) - _start(events)


def _start(events: list[Any]) -> int:
    first: Any = None
    left = list(events)
    while left:
        event = left.pop()
        left.extend(event.children)
        is_move = str(event.tag).rsplit(".", 1)[-1] == "Allocation" and event.extra_fields.device.type == "cpu"
        if is_move and (first is None or event.start_time_ns < first.start_time_ns):
            first = event
    return 0 if first is None else int(first.extra_fields.total_allocated) - int(first.extra_fields.alloc_size)


def _moments(events: list[Any], within: str) -> tuple[list[Moment], int, int]:
    moments: list[tuple[int, int, int]] = []
    begin, end = 0, 1 << 62
    left = list(reversed(events))
    while left:
        event = left.pop()
        kind = str(event.tag).rsplit(".", 1)[-1]
        left.extend(reversed(event.children))
        if kind == "Allocation" and event.extra_fields.device.type == "cpu":
            moments.append((event.start_time_ns, len(moments), int(event.extra_fields.total_allocated)))
        elif within and kind == "TorchOp" and event.name == within:
            begin, end = event.start_time_ns, event.end_time_ns
    return [(time_ns, held) for time_ns, _, held in sorted(moments)], begin, end


def _count_every_thread() -> None:
    """Set the flag, where this build of torch has it under its own name; without it the count is too high at times."""
    import torch

    for library in sorted((Path(torch.__file__).parent / "lib").glob("*c10.*")):
        try:
            ctypes.c_bool.in_dll(ctypes.CDLL(str(library)), "FLAGS_caffe2_report_cpu_memory_usage").value = True
            return
        except (OSError, ValueError):
            continue
