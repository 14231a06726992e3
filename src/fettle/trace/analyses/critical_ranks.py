"""The critical path over several ranks: where a collective waited, the path goes to the rank that arrived last."""

from __future__ import annotations

import polars as pl

from fettle.errors import UsageError
from fettle.trace.analyses.arrival import clock_offsets, clock_shifts, match_collectives
from fettle.trace.analyses.critical import CriticalPath, _Walk, window_of
from fettle.trace.model import Trace


def critical_path_of_ranks(traces: list[Trace], step: int | None = None) -> CriticalPath:
    """The critical path of the first rank's window, followed into other ranks through their collectives.

    `pieces` has a further column `rank`; times are on the first rank's clock, clocks aligned by the ends of shared
    collectives. A path only changes ranks where the last arrival is later than this rank's by more than twice the
    clocks' uncertainty.

    Raises:
        UsageError: The ranks share no collectives that can be matched.
    """
    matched = match_collectives(traces)
    if len(traces) < 2 or not matched.height:
        raise UsageError("these ranks share no collectives that can be matched: ask each rank's own critical path")
    clocks = clock_offsets(matched)
    certain = 2 * max(int(clocks["uncertainty_ns"].max()), 0)  # type: ignore[arg-type]
    offsets = dict(zip(clocks["rank"], clocks["offset_ns"], strict=True))
    shift = clock_shifts(traces, clocks)
    low, high = window_of(traces[0], step)
    walks = {t.rank: _Walk(t, low + shift[t.rank], high + shift[t.rank]) for t in traces}
    arrivals = _last_arrivals(matched, walks, offsets, certain)
    _follow(walks, arrivals, traces[0], shift)
    frames = [
        walk.frame().with_columns(
            pl.col("start_ns") - shift[rank], pl.col("end_ns") - shift[rank], rank=pl.lit(rank, dtype=pl.Int64())
        )
        for rank, walk in walks.items()
    ]
    return CriticalPath(low, high, pl.concat(frames).sort("start_ns"))


def _last_arrivals(
    matched: pl.DataFrame, walks: dict[int, _Walk], offset_of: dict[int, int], certain: int
) -> dict[tuple[int, int], tuple[int, int]]:
    """(rank, work) of a collective to (rank, work) of its last arrival, where that is clearly another."""
    offsets = pl.DataFrame({"rank": list(offset_of), "offset": list(offset_of.values())})
    aligned = matched.join(offsets, on="rank").with_columns(start_ns=pl.col("start_ns") - pl.col("offset"))
    position = {rank: {row: i for i, row in enumerate(walk.rows)} for rank, walk in walks.items()}
    arrivals: dict[tuple[int, int], tuple[int, int]] = {}
    for _, group in aligned.group_by("key"):
        rows = group.select("rank", "row", "start_ns").rows()
        last = max(rows, key=lambda r: r[2])
        for rank, row, start in rows:
            if rank != last[0] and last[2] - start > certain:
                arrivals[(rank, position[rank][row])] = (last[0], position[last[0]][last[1]])
    return arrivals


def _follow(
    walks: dict[int, _Walk], arrivals: dict[tuple[int, int], tuple[int, int]], first: Trace, shift: dict[int, int]
) -> None:
    rank = first.rank
    walk = walks[rank]
    place, time = walk.begin(), walk.high
    while time > walk.low:
        index = place[1]
        last = arrivals.get((rank, index)) if place[0] == "device" else None
        if last is not None and last[1] not in walks[last[0]].seen:
            walked = walks[last[0]]
            arrived = walked.start[last[1]] - shift[last[0]] + shift[rank]
            if walk.start[index] < arrived < time:
                walk.seen.add(index)
                walk._add(arrived, time, walk.label[index], walk.rows[index])
                time = max(arrived, walk.low) - shift[rank] + shift[last[0]]
                rank, walk, place = last[0], walked, ("device", last[1])
                continue
        place, time = walk.take(place, time)
