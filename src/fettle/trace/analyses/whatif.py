"""How long would the step be if ...? The trace replayed with a change, as far as the replay can be trusted.

The bounds are the estimate, give and take what the replay of the unchanged trace is off by, step by step, when every
wait takes as long as is usual and no longer. Where that is more than 5% something held the steps up that the trace does
not show, and the answer is: cannot tell. So it is where the main thread makes the data itself: what it would cost to
have it from other processes (their cores, the hand-over) is not in the trace, and the estimate is the best case.
Without the change's part in it, the critical path bounds the estimate too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fettle.errors import UsageError
from fettle.trace.analyses.critical import CriticalPath, critical_path
from fettle.trace.analyses.kernels import class_of_row
from fettle.trace.analyses.replay import Change, Run, data_loading, replay_of
from fettle.trace.analyses.slots import doubtful_waits, shallow_queues
from fettle.trace.analyses.stacks import CAUSES_OF_HOST, host_stacks
from fettle.trace.analyses.steps import step_thread, steps
from fettle.trace.analyses.stops import autograd_threads, main_thread
from fettle.trace.intervals import clip, merge, total
from fettle.trace.kinds import Kind
from fettle.trace.model import Trace, per_trace

QUESTIONS = {
    "kernels": "these kernels took another time",
    "no_syncs": "no call blocked the host",
    "perfect_overlap": "communication and copies held nothing up",
    "graph": "one graph launched the whole step",
    "data_ready": "the data had been ready",
}
TRUSTED_ERROR = 0.05


@dataclass(frozen=True)
class WhatIf:
    """The answer to one question, ns: measured wall time, estimate, and bounds; `replay_error` is the unchanged
    replay's, as a share of the wall time; `unknown` what else the trace does not say, if anything."""

    change: str
    wall_ns: int
    estimate_ns: int
    low_ns: int
    high_ns: int
    replay_error: float
    unknown: str = ""

    @property
    def saving_share(self) -> float:
        return 1 - self.estimate_ns / max(self.wall_ns, 1)

    @property
    def cannot_tell(self) -> bool:
        """Whether the replay is too far from the trace for an answer, or something else is missing."""
        return abs(self.replay_error) > TRUSTED_ERROR or bool(self.unknown)

    @property
    def question(self) -> str:
        return QUESTIONS[self.change]

    @property
    def answer(self) -> str:
        if self.unknown:
            wall = max(self.wall_ns, 1)
            return f"cannot tell, saves {1 - self.high_ns / wall:.1%} to {1 - self.low_ns / wall:.1%}: {self.unknown}"
        if self.cannot_tell:
            return f"cannot tell: the unchanged replay is off by {abs(self.replay_error):.0%}"
        return (
            f"saves {self.saving_share:.1%}" if self.estimate_ns <= self.wall_ns else f"costs {-self.saving_share:.1%}"
        )


def what_if(
    trace: Trace,
    change: str,
    *,
    kernels: str = "",
    factor: float = 0.0,
    step: int | None = None,
    path: CriticalPath | None = None,
) -> WhatIf:
    """Answer one question about a step (or all steps together), were the whole trace changed like that.

    Args:
        change: `kernels` (those whose name matches the expression `kernels` take `factor` of their time), `no_syncs`
            (no call blocks), `perfect_overlap` (communication and copies hold nothing up), `graph` (the step's launches
            as one: no host time between kernels, save for data loading and the time right before a copy to the device,
            which may make its data), `data_ready` (the main thread never loads or waits for data). Without device work
            only `data_ready` changes anything.
        path: The step's critical path where it is known already.
    """
    if change not in QUESTIONS:
        raise UsageError(f"unknown change '{change}': one of {', '.join(QUESTIONS)}")
    if not 0 <= factor <= 1000:
        raise UsageError("the factor must be between 0 and 1000")
    path = path or critical_path(trace, step)
    wall = path.wall_ns
    if not trace.device_keys and change != "data_ready":  # nothing is launched, overlapped or waited for
        return WhatIf(change, wall, wall, wall, wall, 0.0)
    scale = _scale(trace, change, kernels, factor)
    changed = Change(scale, change != "no_syncs", change != "graph", change != "data_ready")
    run = replay_of(trace).run(changed)
    estimate = _length(trace, run, path.start_ns, path.end_ns)
    floor, ceiling = 0.0, float(wall)
    if scale is not None:
        matched = scale != 1
        if change == "kernels" and stays_with_steps(trace, path):  # the path with its work changed remains a path
            floor = wall + _on_path(trace, path, np.minimum(scale - 1, 0))
        if (scale > 1).any():
            length = trace.dur[trace.device_rows]
            floor, ceiling = float(wall), wall + float((length * np.maximum(scale - 1, 0))[matched].sum())
    error = replay_error(trace, path.start_ns, path.end_ns)
    estimate = min(max(estimate, floor), ceiling)
    off = abs(error) * wall
    low, high = max(estimate - off, floor), min(estimate + off, ceiling)
    unknown = ""
    if change == "data_ready" and wall - estimate > TRUSTED_ERROR * wall and _makes_data(trace):
        unknown, high = "the main thread makes the data itself, and what others would take for it is not known", wall
    if changed.launching and _queue_unknown(trace, run, scale, wall):
        # No floor: with such waits the path is another one.
        other = min(_length(trace, replay_of(trace, True).run(changed), path.start_ns, path.end_ns), ceiling)
        low, high = min(low, other), max(high, other)
        if abs(other - estimate) > TRUSTED_ERROR * wall:
            unknown = unknown or "how many slots a queue has, and so which launch calls wait, does not show"
    if change == "graph":  # whether the host time before uploads made their data is a guess
        low = min(low, _busy(trace, path))
    return WhatIf(change, wall, round(estimate), round(low), round(high), error, unknown)


def _queue_unknown(trace: Trace, run: Run, scale: np.ndarray | None, wall: int) -> bool:
    """Whether launch calls may have waited for a slot and no depth shows it, or a run queues more than ever was."""
    calls, _ = doubtful_waits(trace)
    if trace.dur[calls].sum() > TRUSTED_ERROR * wall:
        return True
    return any(run.replay.overfills(run, queue, scale) for queue in shallow_queues(trace))


def stays_with_steps(trace: Trace, path: CriticalPath) -> bool:
    """Whether the path stays with the main thread and its backward: a synchronise need not wait for what another thread
    launches later than it begins."""
    mine = {f"thread {thread}" for thread in (-1, main_thread(trace), *autograd_threads(trace))}
    places = path.pieces["place"].unique().to_list()
    return all(place in mine or place.startswith("device") for place in places)


def _makes_data(trace: Trace) -> bool:
    """Whether the main thread does more than wait for its data: a loader without workers, operators inside loading."""
    stacks = host_stacks(trace)
    loads = (stacks.cause == CAUSES_OF_HOST.index("data_loading")) & (trace.column("thread") == main_thread(trace))
    if any("SingleProcessDataLoader" in trace.names[code] for code in np.unique(trace.column("name")[loads])):
        return True
    loaded_ns = int(stacks.self_ns[loads & (trace.kind == Kind.OPERATOR)].sum())
    return loaded_ns > 0.1 * int(stacks.self_ns[loads].sum())


def kernels_named(trace: Trace, expression: str) -> np.ndarray:
    """Which pieces of device work, in the order of `Trace.device_rows`, have a name that matches."""
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise UsageError(f"not a regular expression: {expression} ({error})") from error
    return trace.named(pattern.search, trace.device_rows)


def _scale(trace: Trace, change: str, kernels: str, factor: float) -> np.ndarray | None:
    """What factor each piece of device work takes; None where all take their time."""
    if change == "kernels":
        return np.where(kernels_named(trace, kernels), factor, 1.0)
    if change == "perfect_overlap":
        return np.where(class_of_row(trace, trace.device_rows) == 0, 1.0, 0.0)
    return None


def _busy(trace: Trace, path: CriticalPath) -> float:
    """What the devices, and data loading, have to do in any case, ns."""
    rows = trace.device_rows
    busy = merge(trace.ts[rows], trace.end[rows])
    loading = data_loading(trace, main_thread(trace))
    return float(max(total(clip(some, path.start_ns, path.end_ns)) for some in (busy, loading)))


def _on_path(trace: Trace, path: CriticalPath, change: np.ndarray) -> float:
    """Sum of the changes of device work along a path, ns; `change` is of each piece's length, 1 being all of it."""
    by_row = np.zeros(trace.events.height)
    by_row[trace.device_rows] = change
    rows = path.pieces["row"].to_numpy()
    works = np.isin(path.pieces["category"].to_numpy(), ["compute", "communication", "copy"]) & (rows >= 0)
    length = (path.pieces["end_ns"] - path.pieces["start_ns"]).to_numpy()
    return float((length[works] * by_row[rows[works]]).sum())


def replayed_ns(trace: Trace, change: Change, low: int, high: int) -> float:
    """Length of a window of the trace after a change, as the replay has it and within no bounds."""
    return _length(trace, replay_of(trace).run(change), low, high)


def _length(trace: Trace, run: Run, low: int, high: int) -> float:
    """Length of a window of the trace in a run, ns."""
    thread = step_thread(trace)
    return run.settled(high, thread) - (run.settled(low, thread) if low > trace.span[0] else 0.0)


@per_trace
def _usual_run(trace: Trace) -> Run:
    return replay_of(trace).run(usual=True)


def replay_error(trace: Trace, low: int, high: int) -> float:
    """How far off the replay with usual waits is, as a share of a window, or of the median step where that is more."""
    run = _usual_run(trace)
    whole = _length(trace, run, low, high) / max(high - low, 1) - 1
    frame = steps(trace)
    inside = frame.filter((frame["start_ns"] >= low) & (frame["end_ns"] <= high)).select("start_ns", "end_ns").rows()
    each = [_length(trace, run, a, b) / max(b - a, 1) - 1 for a, b in inside]
    median = float(np.median(np.abs(each))) if each else 0.0
    return whole if abs(whole) >= median else float(np.copysign(median, whole))
