"""Does memory use stand out anywhere from where it usually is?

A spike is a stretch in which use exceeds the plateau by more than five median absolute deviations (and by at least
1 MiB and 1% of the plateau, so that a flat line has no spikes in its noise) because of a few blocks. What rises block
by block, as the activations of a training step do, is not a spike. The plateau is the median over events.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from fettle.memory.holders import Holder, holders
from fettle.memory.replay import Replay
from fettle.memory.snapshot import Snapshot
from fettle.memory.stacks import StackGroups

_MIB = 1 << 20
_FEWEST_EVENTS = 20
_MOST_LOOKED_AT = 40
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
    """The highest spikes first; none in a window of fewer than 20 events."""
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
    found: dict[str, Spike] = {}
    for index in np.argsort(-heights, kind="stable")[:_MOST_LOOKED_AT].tolist():
        first, last = int(starts[index]), int(ends[index])
        peak = first + int(used[first : last + 1].argmax())
        among = replay.allocations.birth >= first
        sizes = np.sort(replay.allocations.size_bytes[replay.allocations.alive_at(peak) & among])[::-1]
        if sizes[:_FEW_BLOCKS].sum() < (used[peak] - plateau) / 2:
            continue
        who = holders(snapshot, replay, groups, event=peak, among=among, top=5)
        key = who[0].own_line if who else ""
        if key in found:
            found[key] = dataclasses.replace(found[key], count=found[key].count + 1)
            continue
        found[key] = Spike(
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
    return tuple(found.values())[:top]
