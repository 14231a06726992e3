"""A profiler trace and an allocator history of a few calls, recorded inside a worker process.

Each collector runs the workload a few times, writes one file that `fettle trace` or `fettle memory` opens, and says how
much longer a call took while it recorded. What would not fit is refused before it is recorded: a call is counted first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fettle.diagnose.collectors.mode import OperatorMode
from fettle.diagnose.collectors.training import as_workload, device_type
from fettle.diagnose.collectors.variants import timed
from fettle.errors import UsageError
from fettle.memory import record as record_memory
from fettle.trace.io.record import record as record_trace  # mypy takes the room's `record` for the module
from fettle.train import TrainingWorkload
from fettle.workload import Workload, again

_TRACED_CALLS = 5
_MEMORY_CALLS = 8
"""As many as it takes to tell a leak from warm-up."""
_MOST_EVENTS = 100_000
"""In all recorded calls; about as many as are read in a second or two."""
Recorder = AbstractContextManager[Any]
"""Its `step` is called at the end of each call."""


@dataclass(frozen=True)
class Recorded:
    """What was recorded, and what recording cost. Times are those of the fastest call, in seconds."""

    calls: int
    plain_s: float
    """Just before, nothing recording."""
    recorded_s: float

    @property
    def slowdown(self) -> float:
        """How many times as long a call took while it was recorded; 1 where that is lost in noise."""
        return max(1.0, self.recorded_s / self.plain_s) if self.plain_s > 0 else 1.0


def trace(measured: Workload | TrainingWorkload, path: str, seconds: float) -> Recorded:
    """Write a profiler trace of at most five calls to `path`, in about `seconds` of plain calls; at least one.

    Raises `UsageError` for a call of more than 100,000 operators, or where a profiler runs already.
    """
    return _record(
        measured, seconds, _TRACED_CALLS, (_operators, "operators"),
        lambda calls, _: record_trace(path, warmup=1, active=calls), warmup=1,
    )  # fmt: skip


def memory(measured: Workload | TrainingWorkload, path: str, seconds: float) -> Recorded:
    """Write the allocator's history of at most eight calls to `path`, in about `seconds` of plain calls; at least one.

    On a CPU it is taken from the profiler with Python's stacks, which slows small operators severalfold. Raises
    `UsageError` for a call of more than 100,000 Python functions, or where a profiler runs already.
    """
    return _record(
        measured, seconds, _MEMORY_CALLS, (_functions, "Python functions"),
        lambda _, device: record_memory(Path(path), device="cuda" if device == "cuda" else "cpu"),
    )  # fmt: skip


def _record(
    measured: Workload | TrainingWorkload,
    seconds: float,
    most_calls: int,
    events: tuple[Callable[[Callable[[], Any]], int], str],
    recorder: Callable[[int, str], Recorder],
    warmup: int = 0,
) -> Recorded:
    """Record calls on the first batch, as many as time and room allow; nothing is kept of them.

    `events` counts what one call would leave in the file, and names it.
    """
    if torch.autograd.profiler._is_profiler_enabled:  # of two, the one that began first would lose what it has
        raise UsageError("a profiler is running in the workload already")
    workload = as_workload(measured)
    answers: list[Any] = []

    def call() -> Any:
        return workload.run(workload.model, again(workload.inputs[0]))

    count, what = events[0](lambda: answers.append(call())), events[1]
    device = device_type(workload, answers.pop())
    if count > _MOST_EVENTS:
        raise UsageError(f"a call runs {count:,} {what}, more than {_MOST_EVENTS:,} are not recorded")
    plain_s = min(timed(call, device, seconds / 4, least=1))
    room = min(seconds / max(plain_s, 1e-9), _MOST_EVENTS / max(count, 1))
    calls = max(1, min(most_calls, int(room)))
    recorded: list[float] = []
    with recorder(calls, device) as recording:
        for _ in range(calls + warmup):
            recorded += timed(call, device, 0.0, least=1)
            recording.step()
    return Recorded(calls, plain_s, min(recorded[warmup:]))


def _operators(call: Callable[[], Any]) -> int:
    """Operators below the dispatcher in one call."""
    events = 0

    class Count(OperatorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal events
            events += 1
            return func(*args, **(kwargs or {}))

    with Count():
        call()
    return events


def _functions(call: Callable[[], Any]) -> int:
    """Functions that Python calls in one call, built-in ones too."""
    calls = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return calls
