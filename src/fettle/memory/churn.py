"""Does the allocator give memory back only to fetch it again, and who makes it?

In a settled program segments are neither allocated nor freed: every request is served from the cache. Each free of a
segment waits for the device, and so does each allocation. Growth without frees is warm-up, not churn. The cause is
read from the stacks of the frees: a call of ``empty_cache``, the retry of a request that found the device full, or
the garbage-collection threshold. C++ names are needed to tell the last two apart (record with ``stacks="all"``).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from fettle.memory.replay import Replay
from fettle.memory.snapshot import Action, Frame, Ints, Snapshot
from fettle.memory.stacks import own_line
from fettle.memory.steps import Steps
from fettle.units import count_text, size_text

_FEWEST_GROWING_STEPS = 3

WHAT_TO_DO = {
    "empty_cache": "remove the call of empty_cache() from the loop: the memory is fetched again at once",
    "near_full": "the device is nearly full: lower the peak (batch, checkpointing), or expandable_segments:True",
    "gc_threshold": "raise or remove garbage_collection_threshold: what it frees is wanted again",
    "allocator": "the stacks do not tell retry from threshold: record with stacks='all', and see num_alloc_retries",
    "shapes": "new sizes keep coming: pad or bucket the inputs to a few shapes, or expandable_segments:True",
    "unknown": "record with stacks to see who frees the segments",
}


@dataclass(frozen=True)
class Churn:
    """Segments given back and fetched again, by one cause. Bytes are rounded bytes."""

    cause: str
    """A key of `WHAT_TO_DO`."""
    own_line: str
    """The user's line that the frees came from; for `shapes` the line that allocated most."""
    freed_segments: int
    freed_bytes: int
    allocated_segments: int
    allocated_bytes: int
    """Fetched after the first of the frees."""
    share_of_reserved: float
    """min(freed, allocated again) / peak reserved."""
    same_sizes: float
    """Share of the freed segments for which one of the same size was fetched again."""
    duration_ms: float | None
    """From the first free to the last allocation."""
    what_to_do: str

    @property
    def sentence(self) -> str:
        took = f" in {self.duration_ms / 1000:.2f} s" if self.duration_ms is not None else ""
        return (
            f"{count_text(self.freed_segments, 'segment')} ({size_text(self.freed_bytes)}) freed, "
            f"{self.allocated_segments} ({size_text(self.allocated_bytes)}) fetched{took}: {self.cause} at "
            f"{self.own_line}. {self.what_to_do}"
        )


def find_churn(snapshot: Snapshot, replay: Replay, steps: Steps) -> tuple[Churn, ...]:
    """One row for every cause, largest first; empty when segments only grow."""
    trace = replay.trace
    freed = np.flatnonzero((trace.action == Action.SEGMENT_FREE) | (trace.action == Action.SEGMENT_UNMAP))
    gained = np.flatnonzero((trace.action == Action.SEGMENT_ALLOC) | (trace.action == Action.SEGMENT_MAP))
    if len(freed) == 0:
        return _varying_shapes(snapshot, replay, steps, gained)
    causes = np.array([_cause(snapshot.stacks[stack]) for stack in trace.stack[freed].tolist()])
    rows = []
    for cause in np.unique(causes).tolist():
        frees = freed[causes == cause]
        again = gained[gained > frees[0]]
        if len(again):  # otherwise it was given back and never needed again, as it should be
            rows.append(_churn(snapshot, replay, cause, frees, again))
    return tuple(sorted(rows, key=lambda churn: -churn.freed_bytes))


def _churn(snapshot: Snapshot, replay: Replay, cause: str, frees: Ints, again: Ints) -> Churn:
    """The churn of these freed segments, and of those fetched after them; without frees, of what was fetched."""
    trace, blamed = replay.trace, frees if len(frees) else again
    both = Counter(trace.size_bytes[frees].tolist()) & Counter(trace.size_bytes[again].tolist())
    freed_bytes, gained_bytes = int(trace.size_bytes[frees].sum()), int(trace.size_bytes[again].sum())
    moved = min(freed_bytes, gained_bytes) if len(frees) else gained_bytes
    lines = Counter(
        own_line(tuple(frame for frame in snapshot.stacks[stack] if frame.filename.endswith(".py")))
        for stack in trace.stack[blamed].tolist()
    )
    return Churn(
        cause=cause,
        own_line=lines.most_common(1)[0][0],
        freed_segments=len(frees),
        freed_bytes=freed_bytes,
        allocated_segments=len(again),
        allocated_bytes=gained_bytes,
        share_of_reserved=moved / max(replay.peak_reserved_bytes, 1),
        same_sizes=both.total() / max(len(frees), 1),
        duration_ms=replay.milliseconds(int(blamed[0]), int(again[-1])),
        what_to_do=WHAT_TO_DO[cause],
    )


def _cause(stack: tuple[Frame, ...]) -> str:
    names = " ".join(frame.name for frame in stack)
    if "emptyCache" in names or "empty_cache" in names:  # asked first: its stack has release_cached_blocks, too
        return "empty_cache"
    if "garbage_collect_cached_blocks" in names:
        return "gc_threshold"
    if "release_cached_blocks" in names or "release_available_cached_blocks" in names:
        return "near_full"
    return "allocator" if stack else "unknown"


def _varying_shapes(snapshot: Snapshot, replay: Replay, steps: Steps, gained: Ints) -> tuple[Churn, ...]:
    """Segments that are still fetched in steps after the second, for sizes not asked for before."""
    trace = replay.trace
    if len(steps) < 2 + _FEWEST_GROWING_STEPS:
        return ()
    step = steps.of_event(gained)
    late = gained[(step >= 2) & (step < len(steps))]
    if len(np.unique(steps.of_event(late))) < _FEWEST_GROWING_STEPS:
        return ()
    requests = np.flatnonzero(trace.action == Action.ALLOC)
    known = set(trace.size_bytes[requests[steps.of_event(requests) < 2]].tolist())
    fresh = set(trace.size_bytes[requests].tolist()) - known
    if len(fresh) < _FEWEST_GROWING_STEPS:
        return ()
    return (_churn(snapshot, replay, "shapes", np.empty(0, np.int64), late),)
