"""Who holds the memory at a moment (by default the peak), by call stack, and for how long? And what stands out?

The holders of a moment add up to the memory in use at it, to the byte, in every snapshot whose trace and blocks agree.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from fettle.memory.replay import Replay
from fettle.memory.snapshot import Flags, Frame, Snapshot
from fettle.memory.stacks import StackGroups


@dataclass(frozen=True)
class Holder:
    """Allocations alive at one moment that came from one call stack. Sizes are requested bytes."""

    own_line: str
    phase: str
    category: str
    """What the profiler took it for (parameter, gradient, activation ...); empty where it is not known."""
    bytes: int
    share: float
    """Share of the memory in use at the moment."""
    count: int
    largest_bytes: int
    from_before: int
    """How many of them were allocated before the window."""
    until_end: int
    """How many are still alive at the end of the window."""
    median_lifetime_ms: float | None
    """Median of those whose birth and death both lie in the window; None without such, or without times."""
    freed_after_ms: float | None
    """How long after the moment the last of those that were freed at all went."""
    frames: tuple[Frame, ...]


def holders(
    snapshot: Snapshot,
    replay: Replay,
    groups: StackGroups,
    *,
    event: int | None = None,
    among: Flags | None = None,
    top: int = 10,
) -> tuple[Holder, ...]:
    """The `top` call stacks by bytes in use after an event (the peak if None), of the allocations chosen by `among`."""
    moment = replay.peak_event if event is None else event
    table = replay.allocations
    alive = table.alive_at(moment)
    rows = np.flatnonzero(alive if among is None else alive & among)
    if len(rows) == 0:
        return ()
    group = groups.of_stack[table.stack[rows]]
    # Blocks without a stack are told apart by whether they are from before the recording.
    stackless = np.array([not frames for frames in groups.frames], np.bool_)[group]
    group = np.where(stackless & (table.birth[rows] < 0), len(groups.frames) + table.tag[rows], group)
    present, where = np.unique(group, return_inverse=True)
    total = np.zeros(len(present), np.int64)
    np.add.at(total, where, table.size_bytes[rows])
    in_use = max(replay.at(moment), 1)
    n = len(replay.trace)
    holders = []
    for index in np.argsort(-total, kind="stable")[:top].tolist():
        mine = rows[where == index]
        birth, death = table.birth[mine], table.death[mine]
        whole = (birth >= 0) & (death < n)
        lifetime = freed = None
        if replay.trace.has_times:
            time_us = replay.trace.time_us
            if whole.any():
                lifetime = float(np.median(time_us[death[whole]] - time_us[birth[whole]])) / 1000
            gone = death[death < n]
            if len(gone):
                freed = replay.milliseconds(max(moment, 0), int(gone.max()))
        tags = np.bincount(table.tag[mine], weights=table.size_bytes[mine])
        number = int(present[index])
        own_line, phase = "(allocated before recording began)", "unknown"
        frames: tuple[Frame, ...] = ()
        if number < len(groups.frames):
            own_line, phase, frames = groups.own_line[number], groups.phase[number], groups.frames[number]
        holders.append(
            Holder(
                own_line=own_line,
                phase=phase,
                category=snapshot.tags[int(tags.argmax())],
                bytes=int(total[index]),
                share=float(total[index]) / in_use,
                count=len(mine),
                largest_bytes=int(table.size_bytes[mine].max()),
                from_before=int((birth < 0).sum()),
                until_end=int((death >= n).sum()),
                median_lifetime_ms=lifetime,
                freed_after_ms=freed,
                frames=frames,
            )
        )
    return tuple(holders)


_MIB = 1 << 20
_FEWEST_EVENTS = 20
_MOST_LOOKED_AT = 10_000
_FEW_BLOCKS = 4
"""A spike is a stretch of whose height no more blocks than this hold half."""


@dataclass(frozen=True)
class Spike:
    """One stretch above the plateau. Events are indices into the trace, sizes requested bytes."""

    first_event: int
    top_event: int
    last_event: int
    count: int
    """How many stretches like this one: mostly from the same line, and not higher."""
    height_bytes: int
    """The top, above the plateau."""
    plateau_bytes: int
    top_bytes: int
    duration_ms: float | None
    contributors: tuple[Holder, ...]
    """What was alive at the top and had been allocated since the stretch began."""


def spikes(snapshot: Snapshot, replay: Replay, groups: StackGroups, *, top: int = 5) -> tuple[Spike, ...]:
    """Where memory use stands out from where it usually is, the highest spikes first; none in a window of fewer than 20
    events.

    A spike is a stretch in which use exceeds the plateau by more than five median absolute deviations (and by at least
    1 MiB and 1% of the plateau, so that a flat line has no spikes in its noise) because of a few blocks. What rises
    block by block, as the activations of a training step do, is not a spike. The plateau is the median over events.
    """
    used = replay.used_bytes
    if len(used) < _FEWEST_EVENTS:
        return ()
    plateau = float(np.median(used))
    spread = float(np.median(np.abs(used - plateau)))
    above = used > plateau + max(5 * spread, _MIB, 0.01 * plateau)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2] - 1
    if len(starts) == 0:
        return ()
    heights = np.maximum.reduceat(np.append(used, 0), np.column_stack([starts, ends + 1]).ravel())[::2]
    spikes: dict[str, Spike] = {}
    table = replay.allocations
    born = table.birth[table.birth >= 0]  # these come first, in order
    for index in np.argsort(-heights, kind="stable")[:_MOST_LOOKED_AT].tolist():
        first, last = int(starts[index]), int(ends[index])
        peak = first + int(used[first : last + 1].argmax())
        rows = np.arange(*np.searchsorted(born, [first, peak + 1]))
        rows = rows[table.death[rows] > peak]
        sizes = table.size_bytes[rows]
        if np.sort(sizes)[::-1][:_FEW_BLOCKS].sum() < (used[peak] - plateau) / 2:
            continue
        owners, owner = np.unique(groups.of_stack[table.stack[rows]], return_inverse=True)
        key = groups.own_line[int(owners[np.bincount(owner, weights=sizes).argmax()])]
        if key in spikes:
            spikes[key] = dataclasses.replace(spikes[key], count=spikes[key].count + 1)
            continue
        if len(spikes) == top:
            continue
        who = holders(snapshot, replay, groups, event=peak, among=table.birth >= first, top=5)
        spikes[key] = Spike(
            first_event=first,
            top_event=peak,
            last_event=last,
            count=1,
            height_bytes=int(used[peak] - plateau),
            plateau_bytes=int(plateau),
            top_bytes=int(used[peak]),
            duration_ms=replay.milliseconds(first, last),
            contributors=who,
        )
    return tuple(spikes.values())
