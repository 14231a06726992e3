"""Where the time of a training step goes: data, forward, backward, optimizer, communication, idle.

Every moment belongs to exactly one of them, so they add up to the wall time. A moment is communication where a
collective is on its way and no operator runs (communication behind computing costs nothing and is not shown); idle
where neither does: the interpreter between operators on a CPU, a device that waits on a GPU. Else it belongs to its
phase. Waiting for data is the phase data, whatever runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

PARTS = ("data", "forward", "backward", "optimizer", "communication", "idle")
Interval = tuple[int, int]
_SENT = ("gloo:", "nccl:", "ncclkernel", "nccldevkernel", "c10d::", "_c10d_functional::", "fsdp::all_gather",
         "record_param_comms")  # fmt: skip
_WRAPPERS = ("profilerstep", "autograd::engine", "torch::autograd", "distributeddataparallel", "optimizer.", "fsdp::",
             "enumerate(", "## ")  # fmt: skip
"""Ranges that hold operators and are none."""


def step_parts(ranges: Iterable[tuple[str, int, int]], found: tuple[list[Interval], list[Interval]]) -> dict[str, int]:
    """Nanoseconds of each of `PARTS`, from phases and the intervals of (operators, collectives)."""
    busy, sent = (_union(intervals) for intervals in found)
    parts = dict.fromkeys(PARTS, 0)
    for name, begin, end in ranges:
        if name == "data":
            parts[name] += end - begin
            continue
        working = _within(busy, begin, end)
        either = _within(_union([*busy, *sent]), begin, end)
        parts[name] += working
        parts["communication"] += either - working
        parts["idle"] += end - begin - either
    return parts


def intervals_of(events: Sequence[Any]) -> tuple[list[Interval], list[Interval]]:
    """(operators, collectives) among the profiler's events; on a GPU the kernels, not the calls that start them."""
    on_gpu = any(str(event.device_type()).endswith("CUDA") for event in events)
    busy: list[Interval] = []
    sent: list[Interval] = []
    for event in events:
        name = event.name().lower()
        interval = (event.start_ns(), event.start_ns() + event.duration_ns())
        if name.startswith(_SENT):
            sent.append(interval)
        elif on_gpu != str(event.device_type()).endswith("CUDA") or name.startswith(_WRAPPERS):
            continue
        else:
            busy.append(interval)
    return busy, sent


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _within(intervals: Iterable[Interval], begin: int, end: int) -> int:
    return sum(max(0, min(stop, end) - max(start, begin)) for start, stop in intervals)
