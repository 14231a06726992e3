"""Does memory grow from step to step, and what kind of growth is it?

Bytes in use at the end of each step, from the third step on (optimizers allocate their state lazily), grow when the
Theil-Sen slope, the median of the slopes of all pairs of steps, exceeds 1 MiB and 0.1% of the level per step and at
least 80% of the steps ended higher than the one before. Theil-Sen because a single odd step cannot move it (Sen 1968,
"Estimates of the regression coefficient based on Kendall's tau"). Growth is attributed to the call stacks whose
allocations of at least three consecutive steps were still alive at the end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fettle.memory.replay import Replay
from fettle.memory.snapshot import Action, Frame, Ints, Snapshot
from fettle.memory.stacks import StackGroups
from fettle.memory.steps import Steps
from fettle.units import count_text, size_text

_MIB = 1 << 20
_WARM_UP_STEPS = 2
_FEWEST_POINTS = 5
_MOST_POINTS = 400
_GROWING_SHARE = 0.8
_CONSECUTIVE_STEPS = 3
_RECORDER_BYTES_PER_EVENT = 8 << 10
"""PyTorch documents "several KB" of host memory for an event with its stack, until the ring is full."""

WHAT_TO_DO = {
    "graph": "a result that is kept keeps its whole autograd graph: keep loss.item() or x.detach() instead",
    "tensor": "the program keeps one more tensor every step: find the list, cache or attribute that grows",
    "cycle": "tensors in reference cycles wait for the garbage collector: break the cycle, or use a weak reference",
    "fragmentation": "tensors do not grow, the cache does: sizes vary; pad them to a few, or use expandable segments",
    "host": "device memory is flat, the process grows: look at lists on the host and at DataLoader workers",
}


@dataclass(frozen=True)
class Survivor:
    """Allocations of one stack and size, one or more from each of several consecutive steps, alive at the end."""

    own_line: str
    phase: str
    size_bytes: int
    count: int
    steps: int
    """The longest run of consecutive steps with a survivor."""
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Leak:
    """Growth that was found. `kind` is a key of `WHAT_TO_DO`."""

    kind: str
    bytes_per_step: float
    growing_share: float
    """Share of steps that ended higher than the one before."""
    survivors: tuple[Survivor, ...]
    what_to_do: str


@dataclass(frozen=True)
class LeakReport:
    """What was found, or why nothing could be judged (`judged` False, the reason in `reason`)."""

    judged: bool
    reason: str
    steps: int
    step_source: str
    slope_bytes_per_step: float
    leaks: tuple[Leak, ...]

    def sentence(self, leak: Leak) -> str:
        grew = f"{leak.growing_share:.0%} of {self.steps} steps ended higher"
        return f"{size_text(leak.bytes_per_step)} a step ({leak.kind}); {grew}: {leak.what_to_do}"


def find_leaks(snapshot: Snapshot, replay: Replay, groups: StackGroups, steps: Steps) -> LeakReport:
    """Look for growth in tensors, in reserved memory and in the process, in this order; the first found is named."""
    if not replay.has_events:
        return LeakReport(False, "the snapshot has no events, and one moment does not grow", 0, steps.source, 0.0, ())
    if not len(steps):
        return _without_steps(replay, steps)
    used, reserved = _levels(replay, steps)
    if len(used) < _FEWEST_POINTS:
        needed = _FEWEST_POINTS + _WARM_UP_STEPS
        reason = f"{count_text(len(steps), 'step')} in the window ({steps.source}), {needed} are needed"
        return LeakReport(False, reason, len(steps), steps.source, 0.0, ())
    slope = theil_sen(used)
    leak = _cycles(replay, groups, steps, used) or _growing_tensors(replay, groups, steps, used)
    if leak is None and snapshot.allocator != "cpu" and _grows(reserved):
        leak = Leak("fragmentation", theil_sen(reserved), _rising(reserved), (), WHAT_TO_DO["fragmentation"])
    if leak is None:
        leak = _host(snapshot, replay, steps)
    reason = ""
    if leak is None and slope > 0 and _rising(used) >= _GROWING_SHARE:
        least = size_text(_least_slope(used))
        reason = f"{steps.source}; memory rises by {size_text(slope)} a step, of which a leak has {least} or more"
    return LeakReport(True, reason, len(steps), steps.source, slope, (leak,) if leak else ())


def theil_sen(values: npt.ArrayLike) -> float:
    """Median of the slopes between all pairs of equally spaced values, per step; 0 for fewer than two values."""
    y = np.asarray(values, np.float64)
    stride = max(1, -(-len(y) // _MOST_POINTS))
    y = y[::stride]
    if len(y) < 2:
        return 0.0
    first, second = np.triu_indices(len(y), 1)
    return float(np.median((y[second] - y[first]) / (second - first))) / stride


def _levels(replay: Replay, steps: Steps) -> tuple[Ints, Ints]:
    """Used and reserved bytes at the end of each step, without the warm-up."""
    ends = steps.ends[_WARM_UP_STEPS:]
    return replay.used_bytes[ends], replay.reserved_bytes[ends]


def _without_steps(replay: Replay, steps: Steps) -> LeakReport:
    """A window that ends where it began did not leak; one that ends higher may have, or may be one forward pass."""
    grown = replay.end_bytes - replay.start_bytes
    if grown <= max(_MIB, 0.001 * replay.start_bytes):
        return LeakReport(True, "the window ends where it began", 0, steps.source, 0.0, ())
    reason = (
        f"the window ends {size_text(grown)} higher than it began, but without marks of its steps this may be warm-up; "
        "record with fettle.memory.record and call step() at the end of each"
    )
    return LeakReport(False, reason, 0, steps.source, 0.0, ())


def _least_slope(levels: Ints) -> float:
    return max(_MIB, 0.001 * float(np.median(levels)))


def _rising(levels: Ints) -> float:
    return float((np.diff(levels) > 0).mean())


def _grows(levels: Ints) -> bool:
    return theil_sen(levels) > _least_slope(levels) and _rising(levels) >= _GROWING_SHARE


def _cycles(replay: Replay, groups: StackGroups, steps: Steps, used: Ints) -> Leak | None:
    """A sawtooth: most steps rise, and now and then one row of frees lets go of what many earlier steps left."""
    rise = float(np.median(np.diff(used)))
    if rise <= _least_slope(used) or not _has_collapse(replay, steps, rise):
        return None
    return Leak("cycle", rise, _rising(used), _survivors(replay, groups, steps), WHAT_TO_DO["cycle"])


def _has_collapse(replay: Replay, steps: Steps, rise: float) -> bool:
    table, trace = replay.allocations, replay.trace
    # What is freed after the last step is the program's end, not a collection.
    rows = np.flatnonzero((table.birth >= 0) & (table.death <= steps.ends[-1]))
    born, died = steps.of_event(table.birth[rows]), steps.of_event(table.death[rows])
    rows, born = rows[born < died], born[born < died]
    if len(rows) == 0:
        return False
    allocs_so_far = np.cumsum(trace.action == Action.ALLOC)
    run = allocs_so_far[table.death[rows]]
    pairs = np.unique(np.column_stack([run, born]), axis=0)
    generations = np.unique(pairs[:, 0], return_counts=True)[1]
    freed = np.bincount(np.unique(run, return_inverse=True)[1], weights=table.size_bytes[rows])
    return bool(((generations >= _CONSECUTIVE_STEPS) & (freed >= _CONSECUTIVE_STEPS * rise * 0.5)).any())


def _growing_tensors(replay: Replay, groups: StackGroups, steps: Steps, used: Ints) -> Leak | None:
    if not _grows(used):
        return None
    survivors = _survivors(replay, groups, steps)
    in_graph = [survivor for survivor in survivors if survivor.phase in ("forward", "backward")]
    # One tensor a step is a list of results; the activations of several layers a step are a graph.
    each_step = sum(survivor.count / survivor.steps for survivor in in_graph)
    weight = sum(survivor.size_bytes * survivor.count for survivor in survivors)
    graph_weight = sum(survivor.size_bytes * survivor.count for survivor in in_graph)
    kind = "graph" if each_step >= 2 and graph_weight > weight / 2 else "tensor"
    return Leak(kind, theil_sen(used), _rising(used), survivors, WHAT_TO_DO[kind])


def _survivors(replay: Replay, groups: StackGroups, steps: Steps) -> tuple[Survivor, ...]:
    table = replay.allocations
    rows = np.flatnonzero((table.death >= len(replay.trace)) & (table.birth >= 0))
    born, of_group = steps.of_event(table.birth[rows]), groups.of_stack[table.stack[rows]]
    steps_of: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for number, size, step in zip(of_group.tolist(), table.size_bytes[rows].tolist(), born.tolist(), strict=True):
        steps_of[number, size].append(step)
    survivors = []
    for (number, size), made in steps_of.items():
        run = _longest_run(np.unique(made))
        if run >= _CONSECUTIVE_STEPS:
            line, phase, frames = groups.own_line[number], groups.phase[number], groups.frames[number]
            survivors.append(Survivor(line, phase, size, len(made), run, frames))
    survivors.sort(key=lambda survivor: -survivor.size_bytes * survivor.count)
    return tuple(survivors[:8])


def _longest_run(steps: Ints) -> int:
    breaks = np.flatnonzero(np.diff(steps) != 1)
    edges = np.concatenate([[-1], breaks, [len(steps) - 1]])
    return int(np.diff(edges).max())


def _host(snapshot: Snapshot, replay: Replay, steps: Steps) -> Leak | None:
    """The process grows by more than the recorder itself may take. A CPU profile is not judged: its buffers grow."""
    resident = np.array([size for _, size in snapshot.host_memory], np.int64)[_WARM_UP_STEPS:]
    if snapshot.allocator == "cpu" or len(resident) < _FEWEST_POINTS or not _grows(resident):
        return None
    recorder = _RECORDER_BYTES_PER_EVENT * len(replay.trace) / max(len(steps), 1)
    if theil_sen(resident) <= recorder:
        return None
    return Leak("host", theil_sen(resident), _rising(resident), (), WHAT_TO_DO["host"])
