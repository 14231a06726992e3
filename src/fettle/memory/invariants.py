"""Do the file's numbers agree with each other? What must hold in every snapshot that an allocator wrote.

A file that breaks these rules was edited, generated or damaged. It is analysed all the same, and the result
says so, because a replay is only as true as the baseline it is anchored to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fettle.memory.replay import replay
from fettle.memory.snapshot import Flags, Ints, Snapshot, State


@dataclass(frozen=True)
class Violation:
    """One rule that does not hold at one place; sizes in bytes where the rule is about sizes."""

    rule: str
    where: str
    found: int
    expected: int

    def __str__(self) -> str:
        return f"{self.where}: {self.rule} (found {self.found}, expected {self.expected})"


def check(snapshot: Snapshot) -> list[Violation]:
    """Every broken rule: sums of blocks against their segment, traced blocks against the blocks, order of time."""
    return [*_segment_sums(snapshot), *_layout(snapshot), *_traces(snapshot)]


def _segment_sums(snapshot: Snapshot) -> list[Violation]:
    segments, blocks = snapshot.segments, snapshot.blocks
    allocated = blocks.state == State.ALLOCATED
    active = blocks.state != State.INACTIVE

    every = np.ones(len(blocks), np.bool_)
    rules: list[tuple[str, Ints, Flags, Ints]] = [
        ("its blocks do not add up to total_size", blocks.size_bytes, every, segments.total_bytes),
        ("allocated_size is not that of its blocks", blocks.size_bytes, allocated, segments.allocated_bytes),
        ("active_size is not that of its blocks", blocks.size_bytes, active, segments.active_bytes),
        ("requested_size is not that of its blocks", blocks.requested_bytes, active, segments.requested_bytes),
    ]
    broken = []
    for rule, sizes, chosen, expected in rules:
        found = np.zeros(len(segments), np.int64)
        np.add.at(found, blocks.segment[chosen], sizes[chosen])
        for row in np.flatnonzero((found != expected) & (expected >= 0)).tolist():
            broken.append(Violation(rule, f"segment {row}", int(found[row]), int(expected[row])))
    return broken


def _layout(snapshot: Snapshot) -> list[Violation]:
    """No size is negative, and blocks neither overlap each other nor leave their segment."""
    segments, blocks = snapshot.segments, snapshot.blocks
    sizes = [segments.total_bytes, blocks.size_bytes, blocks.requested_bytes]
    sizes += [trace.size_bytes for trace in snapshot.traces.values()]
    negative = sum(int((column < 0).sum()) for column in sizes)
    broken = [Violation("negative sizes", "the whole file", negative, 0)] if negative else []
    if len(blocks) == 0:
        return broken
    start = segments.address[blocks.segment]
    outside = (blocks.address < start) | (
        blocks.address + blocks.size_bytes > start + segments.total_bytes[blocks.segment]
    )
    overlap = (blocks.segment[1:] == blocks.segment[:-1]) & (
        blocks.address[1:] < blocks.address[:-1] + blocks.size_bytes[:-1]
    )
    for rule, count in (("blocks outside their segment", int(outside.sum())), ("blocks overlap", int(overlap.sum()))):
        if count:
            broken.append(Violation(rule, "all segments", count, 0))
    return broken


def _traces(snapshot: Snapshot) -> list[Violation]:
    """What the trace leaves alive is a block, at no moment was less than nothing in use, and time goes on."""
    broken = []
    for device, trace in snapshot.traces.items():
        window = replay(snapshot, device)
        table = window.allocations
        left = table.address[(table.birth >= 0) & (table.death >= len(trace))]
        rows = snapshot.block_rows(device)
        rows = rows[snapshot.blocks.state[rows] != State.INACTIVE]
        missing = int((~np.isin(left, snapshot.blocks.address[rows])).sum())
        rules = {
            "allocations that the trace leaves alive but no block holds": missing,
            "less than nothing in use at some moment": min(0, window.start_bytes, int(window.used_bytes.min())),
            "events that go back in time": int((np.diff(trace.time_us) < 0).sum()),
        }
        broken += [Violation(rule, f"device {device}", found, 0) for rule, found in rules.items() if found]
    return broken
