"""What did the segments look like at an earlier moment, for instance when a request failed?

A snapshot written after an out-of-memory error was caught shows the state after the stack unwound: all is free again.
The trace shows what was in use at the moment itself. Blocks that were freed since are known by their requested size
only; they are taken as that size rounded to 512 bytes, plus what the allocator does not split off (up to 1 MiB behind a
large block), so free space in large segments may come out up to 1 MiB too large for each block that is followed by
free space. Expandable segments change their extent by mapping pages and cannot be put together again this way.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from fettle.memory.fragmentation import SMALL_SEGMENT_BYTES, round_size
from fettle.memory.replay import Replay
from fettle.memory.snapshot import Action, Blocks, Ints, Segments, Snapshot, State

_UNSPLIT_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class SegmentLives:
    """Every segment that existed in the window: those of the end in their order, then those that were freed.

    A segment exists in ``birth <= event < death``; -1 is before the window, the number of events is "still there".
    """

    address: Ints
    total_bytes: Ints
    stream: Ints
    birth: Ints
    death: Ints
    row: Ints
    """Row in the snapshot's segments; -1 for a segment that is gone."""


def segment_lives(snapshot: Snapshot, replay: Replay) -> SegmentLives:
    """Match segment allocations and frees by address. Mapped pages of expandable segments are left out."""
    trace, segments = replay.trace, snapshot.segments
    rows = np.flatnonzero(segments.device == replay.device)
    born_at: dict[int, int] = {}
    gone: list[tuple[int, int, int, int, int]] = []
    moved = np.flatnonzero((trace.action == Action.SEGMENT_ALLOC) | (trace.action == Action.SEGMENT_FREE))
    for event in moved.tolist():
        address = int(trace.address[event])
        if trace.action[event] == Action.SEGMENT_ALLOC:
            born_at[address] = event
        else:
            birth = born_at.pop(address, -1)
            gone.append((address, int(trace.size_bytes[event]), int(trace.stream[event]), birth, event))
    freed = np.array(gone, np.int64).reshape(-1, 5)
    births = np.array([born_at.get(address, -1) for address in segments.address[rows].tolist()], np.int64)
    return SegmentLives(
        address=np.concatenate([segments.address[rows], freed[:, 0]]),
        total_bytes=np.concatenate([segments.total_bytes[rows], freed[:, 1]]),
        stream=np.concatenate([segments.stream[rows], freed[:, 2]]),
        birth=np.concatenate([births, freed[:, 3]]),
        death=np.concatenate([np.full(len(rows), len(trace)), freed[:, 4]]),
        row=np.concatenate([rows, np.full(len(freed), -1)]),
    )


def state_at(snapshot: Snapshot, replay: Replay, event: int) -> Snapshot | None:
    """One device as a snapshot taken after `event` would have shown it; None where segments are expandable."""
    if snapshot.segments.expandable.any() or (replay.trace.action == Action.SEGMENT_MAP).any():
        return None
    lives = segment_lives(snapshot, replay)
    there = np.flatnonzero((lives.birth <= event) & (lives.death > event))
    there = there[np.argsort(lives.address[there], kind="stable")]
    known, count = lives.row[there] >= 0, len(there)
    rows, total = lives.row[there][known], lives.total_bytes[there]
    pool, small = np.zeros((count, 2), np.int64), total == SMALL_SEGMENT_BYTES
    pool[known], small[known] = snapshot.segments.pool[rows], snapshot.segments.small[rows]
    unknown = np.full(count, -1, np.int64)
    segments = Segments(
        device=np.full(count, replay.device, np.int64),
        address=lives.address[there],
        total_bytes=total,
        allocated_bytes=unknown,
        active_bytes=unknown,
        requested_bytes=unknown,
        stream=lives.stream[there],
        small=small,
        pool=pool,
        expandable=np.zeros(count, np.bool_),
    )
    blocks = _blocks(snapshot, replay, segments, event)
    return dataclasses.replace(snapshot, segments=segments, blocks=blocks, traces={})


def _blocks(snapshot: Snapshot, replay: Replay, segments: Segments, event: int) -> Blocks:
    """The blocks in use after the event, and the free space between them."""
    table = replay.allocations
    alive = np.flatnonzero(table.alive_at(event))
    alive = alive[np.argsort(table.address[alive], kind="stable")]
    sizes = _rounded_sizes(snapshot, replay, alive)
    owner = np.searchsorted(segments.address, table.address[alive], side="right") - 1
    made: list[tuple[int, int, int, int, int, int]] = []  # segment, address, size, requested, state, stack
    position = 0
    for segment, (start, total, small) in enumerate(
        zip(segments.address.tolist(), segments.total_bytes.tolist(), segments.small.tolist(), strict=True)
    ):
        at, end = start, start + total
        unsplit = 0 if small else _UNSPLIT_BYTES
        while position < len(alive) and owner[position] <= segment:
            row = int(alive[position])
            address, size = int(table.address[row]), int(sizes[position])
            if owner[position] == segment and address < end:
                if address - at > unsplit:
                    made.append((segment, at, address - at, 0, int(State.INACTIVE), 0))
                elif address > at and made and made[-1][0] == segment:
                    made[-1] = (*made[-1][:2], address - made[-1][1], *made[-1][3:])
                made.append(
                    (segment, address, size, int(table.size_bytes[row]), int(State.ALLOCATED), int(table.stack[row]))
                )
                at = address + size
            position += 1
        if end - at > unsplit or at == start:
            made.append((segment, at, end - at, 0, int(State.INACTIVE), 0))
        elif end > at:
            made[-1] = (*made[-1][:2], end - made[-1][1], *made[-1][3:])
    columns = _wrapped(made).reshape(-1, 6)
    return Blocks(
        segment=columns[:, 0],
        address=columns[:, 1],
        size_bytes=columns[:, 2],
        requested_bytes=columns[:, 3],
        state=columns[:, 4].astype(np.int8),
        stack=columns[:, 5],
        tag=np.zeros(len(columns), np.int64),
    )


def _rounded_sizes(snapshot: Snapshot, replay: Replay, rows: Ints) -> Ints:
    """The true size of allocations that are still there, the requested size of others as the allocator rounds it."""
    table = replay.allocations
    distinct, where = np.unique(table.size_bytes[rows], return_inverse=True)
    rounded = _wrapped([round_size(size, snapshot.settings) for size in distinct.tolist()])[where]
    blocks = snapshot.blocks
    in_use = blocks.state != State.INACTIVE
    true_size = dict(zip(blocks.address[in_use].tolist(), blocks.size_bytes[in_use].tolist(), strict=True))
    for index in np.flatnonzero(table.death[rows] >= len(replay.trace)).tolist():
        rounded[index] = true_size.get(int(table.address[rows[index]]), int(rounded[index]))
    return rounded


def _wrapped(numbers: list[Any]) -> Ints:
    """As a column holds them: where a hostile file's numbers overflow 64 bits they wrap around, as in the replay."""
    return (np.array(numbers, object) & (1 << 64) - 1).astype(np.uint64).astype(np.int64)
