"""What changed between two snapshots, by call stack?

Addresses mean nothing across two processes, so memory is compared by stack: file name (without its folder), function
and line of every frame. Two snapshots with hardly a stack in common are reported as what they are: different programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fettle.memory.invariants import check
from fettle.memory.replay import Allocations, replay
from fettle.memory.snapshot import Frame, Snapshot
from fettle.memory.stacks import StackGroups, group_stacks
from fettle.units import count_text

_FEW_IN_COMMON = 0.2


@dataclass(frozen=True)
class Change:
    """One call stack's requested bytes and blocks, before and after."""

    own_line: str
    phase: str
    before_bytes: int
    after_bytes: int
    before_count: int
    after_count: int
    frames: tuple[Frame, ...]

    @property
    def change_bytes(self) -> int:
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class Difference:
    """Two snapshots side by side: at the end, and at their peaks. Sizes are requested bytes."""

    before: str
    after: str
    device: int
    end_before_bytes: int
    end_after_bytes: int
    peak_before_bytes: int
    peak_after_bytes: int
    at_end: tuple[Change, ...]
    at_peak: tuple[Change, ...]
    shared_stacks: float
    """Share of the bytes with a stack, at the peak of the smaller snapshot, whose stacks occur in both."""
    notes: tuple[str, ...]
    """What is odd about the two side by side, and about the second file."""


def compare(before: Snapshot, after: Snapshot, device: int, *, top: int = 20) -> Difference:
    """The stacks whose memory changed most, at the end and at the peak. `UsageError` if a snapshot lacks the device."""
    sides = []
    for snapshot in (before, after):
        snapshot.check_device(device)
        window, groups = replay(snapshot, device), group_stacks(snapshot)
        end = _by_stack(window.allocations, groups, len(window.trace) - 1)
        peak = _by_stack(window.allocations, groups, window.peak_event)
        sides.append((window, end, peak))
    (window_before, end_before, peak_before), (window_after, end_after, peak_after) = sides
    shared = _shared(peak_before, peak_after)
    notes = [f"{after.name}: {note}" for note in after.notes]
    if violations := check(after):
        places = count_text(len(violations), "place")
        notes.append(f"{after.name} contradicts itself in {places}, for instance {violations[0]}")
    if shared < _FEW_IN_COMMON:
        notes.append(
            f"only {shared:.0%} of the bytes come from stacks that both snapshots have: "
            "these look like different programs, or different phases of one"
        )
    if before.allocator != after.allocator:
        notes.append("one snapshot is of the CPU, the other of a GPU: sizes compare, reserved memory does not")
    return Difference(
        before=before.name,
        after=after.name,
        device=device,
        end_before_bytes=window_before.end_bytes,
        end_after_bytes=window_after.end_bytes,
        peak_before_bytes=window_before.peak_bytes,
        peak_after_bytes=window_after.peak_bytes,
        at_end=_changes(end_before, end_after, top),
        at_peak=_changes(peak_before, peak_after, top),
        shared_stacks=shared,
        notes=tuple(notes),
    )


_Key = tuple[tuple[str, str, int], ...]
_Side = dict[_Key, tuple[int, int, int, StackGroups]]


def _by_stack(table: Allocations, groups: StackGroups, event: int) -> _Side:
    """Stack -> (bytes, blocks, group number, groups) of what is in use after an event."""
    rows = np.flatnonzero(table.alive_at(event))
    group = groups.of_stack[table.stack[rows]]
    total = np.zeros(len(groups.frames), np.int64)
    np.add.at(total, group, table.size_bytes[rows])
    count = np.bincount(group, minlength=len(groups.frames))
    side: _Side = {}
    for number in np.flatnonzero(count).tolist():
        key = tuple((frame.filename.rsplit("/", 1)[-1], frame.name, frame.line) for frame in groups.frames[number])
        size, blocks, _, _ = side.get(key, (0, 0, 0, groups))
        side[key] = (size + int(total[number]), blocks + int(count[number]), number, groups)
    return side


def _shared(before: _Side, after: _Side) -> float:
    # Memory without a stack is alike in all programs: it says nothing.
    named = [{key: row for key, row in side.items() if key} for side in (before, after)]
    smaller, other = sorted(named, key=lambda side: sum(row[0] for row in side.values()))
    total = sum(row[0] for row in smaller.values())
    return sum(row[0] for key, row in smaller.items() if key in other) / total if total else 1.0


def _changes(before: _Side, after: _Side, top: int) -> tuple[Change, ...]:
    changes = []
    for key in before.keys() | after.keys():
        _, _, number, groups = after.get(key) or before[key]
        was, now = (side[key][:2] if key in side else (0, 0) for side in (before, after))
        if was != now:
            change = Change(
                own_line=groups.own_line[number],
                phase=groups.phase[number],
                before_bytes=was[0],
                after_bytes=now[0],
                before_count=was[1],
                after_count=now[1],
                frames=groups.frames[number],
            )
            changes.append((change, key))
    changes.sort(key=lambda pair: (-abs(pair[0].change_bytes), pair[1]))
    return tuple(change for change, _ in changes[:top])
