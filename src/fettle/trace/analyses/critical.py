"""The critical path: the chain of waiting that made a step as long as it was. It covers the wall clock without a hole.

The path is walked backwards from what ends last in the window. At every moment one place holds the step up: a host
thread, or a piece of device work. From there the question is what that place itself had been waiting for:

- device work had waited for its launch, for its stream, or for an event (`waits`); what passes before it
  begins has the same causes as idle time;
- a host thread is never free, so its time counts as it is, until it waits (`stops`): in a call that
  blocks, for the work that ended last inside it; in a launch call while the queue is full, for the work whose begin
  freed a slot; where it shows nothing while autograd's thread works (or the other way round), for that thread.

Over several ranks, where a collective waited, the path goes to the rank that arrived last.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product

import numpy as np
import polars as pl

from fettle.errors import UsageError
from fettle.trace.analyses.arrival import clock_offsets, clock_shifts, match_collectives
from fettle.trace.analyses.kernels import CLASSES, class_of_row
from fettle.trace.analyses.launches import launched_work
from fettle.trace.analyses.slots import doubtful_waits
from fettle.trace.analyses.stacks import CAUSES_OF_HOST, host_stacks
from fettle.trace.analyses.steps import step_thread, step_windows
from fettle.trace.analyses.stops import autograd_threads, host_stops, main_thread
from fettle.trace.analyses.waits import CAUSES, Held, Waits, blocking_calls, device_waits
from fettle.trace.frames import names_of_rows
from fettle.trace.kinds import ADDRESS
from fettle.trace.model import Trace
from fettle.trace.ordering import in_groups

CATEGORIES = (*CLASSES, *CAUSES)
_NUMBER = {category: i for i, category in enumerate(CATEGORIES)}
_OF_HOST = np.array([_NUMBER[cause] for cause in CAUSES_OF_HOST])


@dataclass(frozen=True)
class CriticalPath:
    """Pieces that cover [start_ns, end_ns) exactly, in order.

    `pieces` columns: start_ns, end_ns, category (one of `CATEGORIES`), row (the event; -1 for none), place (`device
    0` or a thread's number).
    """

    start_ns: int
    end_ns: int
    pieces: pl.DataFrame

    def __post_init__(self) -> None:
        covered = int((self.pieces["end_ns"] - self.pieces["start_ns"]).sum())
        if covered != self.wall_ns:
            raise AssertionError(f"the critical path covers {covered} of {self.wall_ns} ns")

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.start_ns

    def summary(self) -> pl.DataFrame:
        """Columns: category, time_ns, share; adds up to the wall time."""
        return self.summed(self.pieces, "category").drop("count")

    def summed(self, pieces: pl.DataFrame, *by: str) -> pl.DataFrame:
        """The path's pieces by these columns, longest first: those, count, time_ns, share of the wall time."""
        sums = pieces.group_by(by).agg(count=pl.len(), time_ns=(pl.col("end_ns") - pl.col("start_ns")).sum())
        shares = sums.with_columns(share=pl.col("time_ns") / max(self.wall_ns, 1))
        return shares.sort("time_ns", *by, descending=[True, *[False for _ in by]])


def window_of(trace: Trace, step: int | None = None) -> tuple[int, int]:
    """The window of one step, or of all steps: until the device is through with what they launched, where the host
    does not wait for it. The trace's whole span where there are none.

    Raises:
        UsageError: There is no such step.
    """
    starts, ends = step_windows(trace, step)
    low, high = int(starts[0]), int(ends[-1])
    marks = step_thread(trace)
    if step is None and marks >= 0:
        work, calls = launched_work(trace)
        late = trace.end[work] > high
        work, calls = work[late], calls[late]
        mine = np.isin(trace.column("thread")[calls], [marks, *autograd_threads(trace)])
        mine &= (trace.ts[calls] >= low) & (trace.ts[calls] < high)
        high = max(high, int(trace.end[work[mine]].max(initial=high)))
    return low, high


def critical_path(trace: Trace, step: int | None = None) -> CriticalPath:
    """The critical path of one step, or of all steps together."""
    return _Walk(trace, *window_of(trace, step)).run()


def path_shares(trace: Trace, path: CriticalPath) -> pl.DataFrame:
    """What the path is made of, and how sure that is.

    Where two reasons let go of some work at about the same time, either may have been the one that held it, and
    shortening one alone gains nothing. Columns: category, time_ns, share, and low_share and high_share over the paths
    that follow such rivals: all of them of a launch, of a stream, or of an event; and over those on which, besides,
    long launch calls that returned when some work began had waited for a slot, where too few did for a depth to show.
    """
    waits, summary = device_waits(trace), path.summary()
    on_path = np.isin(trace.device_rows, path.pieces["row"].to_numpy())
    shares = [summary.select("category", "share")]
    rivals = [s for s in (Held.LAUNCH, Held.STREAM, Held.EVENT) if (on_path & (waits.rival == s)).any()]
    doubts = [False, *([True] if np.isin(doubtful_waits(trace)[0], path.pieces["row"].to_numpy()).any() else [])]
    others = [waits, *(waits.preferring(sort) for sort in rivals)]
    for one, doubtful in list(product(others, doubts))[1:]:  # the first is the path itself
        other = _Walk(trace, path.start_ns, path.end_ns, one, doubtful).run()
        shares.append(other.summary().select("category", "share"))
    number = len(shares)
    spread = (
        pl.concat(shares)
        .group_by("category")
        .agg(
            low_share=pl.when(pl.len() == number).then(pl.col("share").min()).otherwise(0.0),
            high_share=pl.col("share").max(),
        )
    )
    both = spread.join(summary, on="category", how="left").with_columns(pl.col("time_ns", "share").fill_null(0))
    columns = ("category", "time_ns", "share", "low_share", "high_share")
    return both.select(columns).sort("time_ns", "category", descending=[True, False])


class _Walk:
    def __init__(self, trace: Trace, low: int, high: int, waits: Waits | None = None, doubtful: bool = False) -> None:
        self.trace, self.low, self.high = trace, low, high
        self.stretches: list[tuple[int, int, int]] = []  # host time: thread, start, end
        self.pieces: list[tuple[int, int, int, int]] = []  # device time and waits: start, end, category, row
        self.seen: set[int] = set()
        self.stopped: set[int] = set()
        rows, waits = trace.device_rows, waits or device_waits(trace)
        self.rows = rows.tolist()
        self.start, self.end = trace.ts[rows].tolist(), trace.end[rows].tolist()
        self.label = class_of_row(trace, rows).tolist()
        self.since, self.cause = waits.since.tolist(), (waits.cause.astype(int) + len(CLASSES)).tolist()
        self.source, self.previous = waits.source().tolist(), waits.previous.tolist()
        linked = waits.launch >= 0
        self.call_thread = np.where(linked, trace.column("thread")[np.maximum(waits.launch, 0)], -1).tolist()
        calls_start, calls_end, _ = blocking_calls(trace)
        self.blocked = calls_start.tolist(), calls_end.tolist()
        self._stops(doubtful)

    def _stops(self, doubtful: bool) -> None:
        """By thread and end: what a thread waited for, as (end, start, number)."""
        stops = host_stops(self.trace, doubtful)
        self.stop_of: dict[int, list[tuple[int, int, int]]] = {}
        for i in np.lexsort((stops.start, stops.end)).tolist():
            if stops.met[i]:
                entry = (int(stops.end[i]), int(stops.start[i]), i)
                self.stop_of.setdefault(int(stops.thread[i]), []).append(entry)
        self.stop_ends = {thread: [e for e, _, _ in entries] for thread, entries in self.stop_of.items()}
        self.stop_work, self.stop_other = stops.work.tolist(), stops.other.tolist()
        self.stop_when, self.stop_row = stops.when.tolist(), stops.row.tolist()

    @cached_property
    def position(self) -> dict[int, int]:
        """Which piece of device work an event's row is."""
        return {row: i for i, row in enumerate(self.rows)}

    def run(self) -> CriticalPath:
        """Loop, not recursion: device work and host stretches follow each other until the window's start."""
        place, time = self.begin(), self.high
        while time > self.low:
            place, time = self.take(place, time)
        return CriticalPath(self.low, self.high, self.frame())

    def begin(self) -> tuple[str, int]:
        """Where the walk starts: on what ends last in the window, device work before host calls. A step ends with the
        thread that marks it, unless work ends at that very moment."""
        trace, rows, marks = self.trace, self.trace.device_rows, step_thread(self.trace)
        ends, inside = np.minimum(trace.end, self.high), trace.ts < self.high
        work, host = np.flatnonzero(inside[rows]), np.flatnonzero(inside & trace.is_host)
        last_work = int(work[np.argmin(np.abs(trace.end[rows[work]] - self.high))]) if len(work) else -1
        last_host = ends[host].max() if len(host) else -1
        if last_work >= 0 and trace.end[rows[last_work]] == self.high:
            return "device", last_work
        if marks >= 0:
            return "host", marks
        if last_work >= 0 and ends[rows[last_work]] >= last_host:
            return "device", last_work
        if not len(host):
            return "host", main_thread(trace)
        host = host[ends[host] == last_host]
        waiting = host_stacks(trace).cause[host] == CAUSES_OF_HOST.index("blocking_call")
        return "host", int(trace.column("thread")[host[np.lexsort((trace.ts[host], waiting))[-1]]])

    def take(self, place: tuple[str, int], time: int) -> tuple[tuple[str, int], int]:
        """One stretch back: what held up `place` until `time`."""
        return self._device_step(place[1], time) if place[0] == "device" else self._host_step(place[1], time)

    def _device_step(self, index: int, time: int) -> tuple[tuple[str, int], int]:
        self.seen.add(index)
        start = min(self.start[index], time)
        self._add(start, time, self.label[index], self.rows[index])
        if start <= self.low:
            return ("device", index), self.low
        since, source = min(self.since[index], start), self.source[index]
        if source in self.seen:  # clocks that contradict each other: no work is gone through twice
            source = -1
        self._waited(since, start, self.cause[index], self.rows[index])
        if source >= 0:
            return ("device", source), since
        if self.call_thread[index] >= 0:
            return ("host", self.call_thread[index]), since
        before = self.previous[index]
        if before >= 0 and before not in self.seen:
            return ("device", before), since
        return ("host", main_thread(self.trace)), since

    def _host_step(self, thread: int, time: int) -> tuple[tuple[str, int], int]:
        """Host time back to the last place where this thread waited for someone else."""
        entries = self.stop_of.get(thread, [])
        at = bisect_left(self.stop_ends.get(thread, []), time)
        # A call that is still running at `time` comes first, then those that ended before.
        for i in chain(range(at, min(at + 2, len(entries))), range(at - 1, -1, -1)):
            end, start, number = entries[i]
            if end <= self.low:
                break
            work, when = self.stop_work[number], self.stop_when[number]
            if start >= time or when > time or number in self.stopped or work in self.seen:
                continue
            self.stopped.add(number)
            stop = min(end, time)
            self._stretch(thread, stop, time)
            if work >= 0:
                row = self.stop_row[number]
                self._add(when, stop, int(_OF_HOST[host_stacks(self.trace).cause[row]]), row)
                return ("device", work), when
            self._stretch(thread, when, stop)
            return ("host", self.stop_other[number]), when
        self._stretch(thread, self.low, time)
        return ("host", thread), self.low

    def _waited(self, start: int, end: int, cause: int, row: int) -> None:
        """A wait of device work. What nothing explains is put down to a call that blocks meanwhile, as in idle gaps."""
        if cause == _NUMBER["queued_unknown"]:
            starts, stops = self.blocked
            for i in range(bisect_right(stops, start), bisect_left(starts, end)):
                self._add(start, max(starts[i], start), cause, row)
                self._add(max(starts[i], start), min(stops[i], end), _NUMBER["blocking_call"], row)
                start = max(start, min(stops[i], end))
        self._add(start, end, cause, row)

    def _add(self, start: int, end: int, category: int, row: int) -> None:
        start, end = max(start, self.low), min(end, self.high)
        if end > start:
            self.pieces.append((start, end, category, row))

    def _stretch(self, thread: int, start: int, end: int) -> None:
        start = max(start, self.low)
        if end > start:
            self.stretches.append((thread, start, end))

    def frame(self) -> pl.DataFrame:
        """All pieces in order of time."""
        stacks, trace = host_stacks(self.trace), self.trace
        start, end, category, row = np.array(self.pieces, dtype=np.int64).reshape(-1, 4).T
        on_device = (row >= 0) & trace.is_device[row]
        places = trace.column("thread")[row].astype(np.int64)
        parts = [(start, end, category, row, np.where(on_device, -2 - trace.column("device")[row], places))]
        stretches = np.array(sorted(self.stretches), dtype=np.int64).reshape(-1, 3)
        for thread, mine in in_groups(stretches[:, 0]):
            _, begins, stops = stretches[mine].T
            owner = np.full(len(begins), -1)
            if thread >= 0:
                begins, stops, owner, _ = stacks.over(thread, begins, stops)
            causes = _OF_HOST[np.where(owner >= 0, stacks.cause[owner], 0)]
            parts.append((begins, stops, causes, owner, np.full(len(owner), thread)))
        start, end, category, row, place = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.argsort(start, kind="stable")
        known, number = np.unique(place[order], return_inverse=True)
        names = [f"device {-2 - one}" if one < -1 else f"thread {one}" for one in known.tolist()]
        return pl.DataFrame(
            {
                "start_ns": start[order],
                "end_ns": end[order],
                "category": pl.Series(CATEGORIES).gather(category[order]),
                "row": row[order],
                "place": pl.Series(names, dtype=pl.String()).gather(number),
            }
        )


def path_events(trace: Trace, path: CriticalPath) -> pl.DataFrame:
    """What the critical path consists of, by category and event name.

    Columns: category, name, count, time_ns, share.
    """
    names = names_of_rows(trace, path.pieces["row"].to_numpy()).fill_null("").str.replace_all(ADDRESS, "")
    return path.summed(path.pieces.with_columns(name=names), "category", "name")


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
    shift = clock_shifts(traces, clocks)
    low, high = window_of(traces[0], step)
    by_rank, walks = {trace.rank: trace for trace in traces}, dict[int, _Walk]()

    def walk_of(rank: int) -> _Walk:
        if rank not in walks:  # the path has not been there yet
            walks[rank] = _Walk(by_rank[rank], low + shift[rank], high + shift[rank])
        return walks[rank]

    _follow(walk_of, _last_arrivals(matched, clocks, certain), traces[0].rank, shift)
    frames = [
        walk.frame().with_columns(
            pl.col("start_ns") - shift[rank], pl.col("end_ns") - shift[rank], rank=pl.lit(rank, dtype=pl.Int64())
        )
        for rank, walk in walks.items()
    ]
    return CriticalPath(low, high, pl.concat(frames).sort("start_ns"))


def _last_arrivals(matched: pl.DataFrame, clocks: pl.DataFrame, certain: int) -> dict[tuple[int, int], tuple[int, int]]:
    """(rank, row) of a collective to (rank, row) of its last arrival, where that is clearly another."""
    start = pl.col("start_ns") - pl.col("offset_ns")
    arrived = matched.join(clocks, on="rank").select("key", "rank", "row", start=start).sort("start", "rank")
    both = arrived.join(arrived.group_by("key").agg(pl.all().last()), on="key", suffix="_last")
    late = both.filter(pl.col("rank") != pl.col("rank_last"), pl.col("start_last") - pl.col("start") > certain)
    found = late.select("rank", "row", "rank_last", "row_last").iter_rows()
    return {(rank, row): (last, last_row) for rank, row, last, last_row in found}


def _follow(
    walk_of: Callable[[int], _Walk], arrivals: dict[tuple[int, int], tuple[int, int]], rank: int, shift: dict[int, int]
) -> None:
    walk = walk_of(rank)
    place, time = walk.begin(), walk.high
    while time > walk.low:
        index = place[1]
        last = arrivals.get((rank, walk.rows[index])) if place[0] == "device" else None
        if last is not None:
            other = walk_of(last[0])
            there = other.position[last[1]]
            arrived = other.start[there] - shift[last[0]] + shift[rank]
            if there not in other.seen and walk.start[index] < arrived < time:
                walk.seen.add(index)
                walk._add(arrived, time, walk.label[index], walk.rows[index])
                time = max(arrived, walk.low) - shift[rank] + shift[last[0]]
                rank, walk, place = last[0], other, ("device", there)
                continue
        place, time = walk.take(place, time)
