"""How much memory was in use after every event, exactly?

The ring of events may have lost its beginning, but the blocks at the end are all there. So the replay is anchored at
the end and run backwards to the start of the window: with `used(end)` the requested bytes of all blocks in use,

    used(start) = used(end) - sum(allocated in the window) + sum(freed in the window)

and every value between is exact, however much of the ring was overwritten. Frees of blocks from before the window
count like all others; leaving them out understates the peak (by 27% on a published training snapshot). Reserved
memory is replayed alike from segment events. Everything is in requested bytes: events carry no other size, and
mixing them with rounded block sizes gives a start that is not zero in a process that started empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fettle.memory.snapshot import Action, Flags, Ints, Snapshot, State, Trace


@dataclass(frozen=True)
class Allocations:
    """Every block that was in use at some moment of the window, one row each.

    A block lives in ``birth <= event < death``; -1 is before the window, the number of events is "still alive".
    """

    birth: Ints
    death: Ints
    address: Ints
    size_bytes: Ints
    stack: Ints
    """Where it was allocated; 0 where that was before the window and it was freed since."""
    stream: Ints
    tag: Ints

    def alive_at(self, event: int) -> Flags:
        """Which rows are in use after an event; -1 is the start of the window."""
        return (self.birth <= event) & (self.death > event)


@dataclass(frozen=True)
class Replay:
    """One device's window, replayed. Index i is the moment after event i."""

    device: int
    trace: Trace
    start_bytes: int
    used_bytes: Ints
    start_reserved_bytes: int
    reserved_bytes: Ints
    peak_event: int
    """-1 if memory use was highest at the start of the window."""
    frees_from_before: int
    """Frees of blocks that were allocated before the window."""
    allocations: Allocations

    @property
    def has_events(self) -> bool:
        """Without events nothing is known but one moment: no peak, no growth."""
        return len(self.trace) > 0

    @property
    def end_bytes(self) -> int:
        return int(self.used_bytes[-1]) if len(self.used_bytes) else self.start_bytes

    @property
    def peak_bytes(self) -> int:
        return self.at(self.peak_event)

    @property
    def peak_reserved_bytes(self) -> int:
        return max(self.start_reserved_bytes, int(self.reserved_bytes.max(initial=0)))

    def at(self, event: int) -> int:
        """Requested bytes in use after an event; -1 is the start of the window."""
        return int(self.used_bytes[event]) if event >= 0 else self.start_bytes

    def milliseconds(self, first: int, last: int) -> float | None:
        """Time between two events; None where the file has no times."""
        if not self.trace.has_times or first < 0 or last >= len(self.trace):
            return None
        return (int(self.trace.time_us[last]) - int(self.trace.time_us[first])) / 1000


def replay(snapshot: Snapshot, device: int) -> Replay:
    """Replay one device's trace; a device without a trace gives a window of no events."""
    trace = snapshot.traces.get(device, _NO_EVENTS)
    rows = snapshot.block_rows(device)
    rows = rows[snapshot.blocks.state[rows] != State.INACTIVE]
    free = _free_action(trace, snapshot.blocks.address[rows])
    used_end = int(snapshot.blocks.requested_bytes[rows].sum())
    change = np.where(trace.action == Action.ALLOC, trace.size_bytes, 0)
    change -= np.where(trace.action == free, trace.size_bytes, 0)
    start, used = _anchored_at_the_end(used_end, change)

    grows = (trace.action == Action.SEGMENT_ALLOC) | (trace.action == Action.SEGMENT_MAP)
    shrinks = (trace.action == Action.SEGMENT_FREE) | (trace.action == Action.SEGMENT_UNMAP)
    reserved_end = int(snapshot.segments.total_bytes[snapshot.segments.device == device].sum())
    change = np.where(grows, trace.size_bytes, 0) - np.where(shrinks, trace.size_bytes, 0)
    if snapshot.allocator == "cpu":
        start_reserved, reserved = start, used
    else:
        start_reserved, reserved = _anchored_at_the_end(reserved_end, change)

    allocations, frees_from_before = _allocations(snapshot, trace, rows, free)
    peak_event = int(used.argmax()) if len(used) and int(used.max()) > start else -1
    return Replay(
        device=device,
        trace=trace,
        start_bytes=start,
        used_bytes=used,
        start_reserved_bytes=start_reserved,
        reserved_bytes=reserved,
        peak_event=peak_event,
        frees_from_before=frees_from_before,
        allocations=allocations,
    )


def _anchored_at_the_end(end: int, change: Ints) -> tuple[int, Ints]:
    # One element, not a scalar: arrays wrap around silently where a hostile file's numbers overflow 64 bits.
    start = np.array([end], np.int64) - change.sum()
    return int(start[0]), start + np.cumsum(change)


def _free_action(trace: Trace, in_use: Ints) -> int:
    """Which event ends a block's life. Recording can skip kinds of events: if no free was ever completed, though
    blocks that were allocated are in use no more, the requested frees have to do."""
    if (trace.action == Action.FREE_COMPLETED).any() or not (trace.action == Action.FREE_REQUESTED).any():
        return int(Action.FREE_COMPLETED)
    allocated = trace.address[trace.action == Action.ALLOC]
    return int(Action.FREE_COMPLETED if np.isin(allocated, in_use).all() else Action.FREE_REQUESTED)


def _pairs(trace: Trace, free: int) -> tuple[Ints, Ints, Ints]:
    """Allocations and frees in order of address, then time; for each allocation the free that ends it (or -1);
    and the frees that end no allocation of the window."""
    events = np.flatnonzero((trace.action == Action.ALLOC) | (trace.action == free))
    events = events[np.argsort(trace.address[events], kind="stable")]
    is_alloc, address = trace.action[events] == Action.ALLOC, trace.address[events]
    freed_next = np.flatnonzero((address[1:] == address[:-1]) & is_alloc[:-1] & ~is_alloc[1:])
    follower, orphan = np.full(len(events), -1, np.int64), ~is_alloc
    follower[freed_next] = events[freed_next + 1]
    orphan[freed_next + 1] = False
    return events, follower, events[orphan]


def _allocations(snapshot: Snapshot, trace: Trace, live_rows: Ints, free: int) -> tuple[Allocations, int]:
    """Blocks born in the window, then those from before that were freed in it, then those from before still alive."""
    blocks, n = snapshot.blocks, len(trace)
    events, follower, orphan_frees = _pairs(trace, free)
    is_alloc = trace.action[events] == Action.ALLOC
    born, death = events[is_alloc], follower[is_alloc]
    order = np.argsort(born)
    born, death = born[order], death[order]
    old = live_rows[~np.isin(blocks.address[live_rows], trace.address[born[death < 0]])]
    seen, before = np.concatenate([born, orphan_frees]), np.full(len(orphan_frees) + len(old), -1)

    def column(of_event: Ints, of_block: Ints) -> Ints:
        return np.concatenate([of_event[seen], of_block[old]])

    allocated = trace.action == Action.ALLOC  # a free does not say where that was
    table = Allocations(
        birth=np.concatenate([born, before]),
        death=np.concatenate([np.where(death < 0, n, death), orphan_frees, np.full(len(old), n)]),
        address=column(trace.address, blocks.address),
        size_bytes=column(trace.size_bytes, blocks.requested_bytes),
        stack=column(np.where(allocated, trace.stack, 0), blocks.stack),
        stream=column(trace.stream, snapshot.segments.stream[blocks.segment]),
        tag=column(np.where(allocated, trace.tag, 0), blocks.tag),
    )
    return table, len(orphan_frees)


_NOTHING = np.empty(0, np.int64)
_NO_EVENTS = Trace(np.empty(0, np.int8), *(_NOTHING for _ in range(6)))
