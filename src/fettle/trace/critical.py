"""The critical path: the chain of waiting that made a step as long as it was. It covers the wall clock without a hole.

The path is walked backwards from the end of the window. At every moment one place holds the step up: a host thread,
or a piece of device work. From there the question is what that place itself had been waiting for:

- device work starts when its stream is free and its launch has arrived, whichever is later; where it starts later
  than both, the work on another stream that ended last before it is taken for an event it waited on (with or without
  sync events); a wait longer than gaps and latencies usually are is `queued_unknown`, as it is among the idle causes;
- a host thread is never free, so its time counts as it is, until a call that blocks: there the path goes to the
  device work that ended last inside the call;
- a thread that shows nothing while autograd's thread works (or the other way round) was waiting for that thread.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np
import polars as pl

from fettle.errors import UsageError
from fettle.trace.idle import BETWEEN_KERNELS_NS, LATENCY_NS, autograd_threads, main_thread
from fettle.trace.kernels import CLASSES, class_of_row
from fettle.trace.kinds import Kind, is_graph_launch, without_address
from fettle.trace.model import Ints, Trace
from fettle.trace.stacks import CAUSES_OF_HOST
from fettle.trace.steps import steps

EVENT_WAIT_NS = 2_000
WAITS = ("kernel_gap", "launch_latency", "stream_event", "queued_unknown", "sync_return")
CATEGORIES = (*CLASSES, *WAITS, *CAUSES_OF_HOST)


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
        return (
            self.pieces.group_by("category")
            .agg(time_ns=(pl.col("end_ns") - pl.col("start_ns")).sum())
            .with_columns(share=pl.col("time_ns") / max(self.wall_ns, 1))
            .sort("time_ns", descending=True)
        )


def window_of(trace: Trace, step: int | None = None, annotation: str | None = None) -> tuple[int, int]:
    """The window of one step, or of all steps; the trace's whole span where there are none.

    Raises:
        UsageError: There is no such step.
    """
    frame = steps(trace, annotation)
    if step is not None:
        frame = frame.filter(pl.col("step") == step)
        if not frame.height:
            known = steps(trace, annotation)["step"].to_list()
            there = f"it has {known[0]} to {known[-1]}" if known[-1] >= 0 else "no steps are marked in it"
            raise UsageError(f"no step {step} in {trace.path.name}: {there}")
    return int(frame["start_ns"].min()), int(frame["end_ns"].max())  # type: ignore[arg-type]


def critical_path(trace: Trace, step: int | None = None, annotation: str | None = None) -> CriticalPath:
    """The critical path of one step, or of all steps together."""
    low, high = window_of(trace, step, annotation)
    walk = _Walk(trace, low, high)
    walk.run()
    return CriticalPath(low, high, walk.frame())


class _Walk:
    """State of one backward walk."""

    def __init__(self, trace: Trace, low: int, high: int) -> None:
        self.trace, self.low, self.high = trace, low, high
        self.stretches: list[tuple[int, int, int]] = []  # host time: thread, start, end
        self.pieces: list[tuple[int, int, str, int]] = []  # device time and waits: start, end, category, row
        self._device_tables()
        self._thread_tables()

    def _device_tables(self) -> None:
        trace = self.trace
        rows = trace.device_rows
        self.rows = rows.tolist()
        self.start, self.end = trace.ts[rows].tolist(), trace.end[rows].tolist()
        launch = trace.launches.launch_rows
        has = launch >= 0
        self.launch = launch.tolist()
        self.call_start = np.where(has, trace.ts[np.maximum(launch, 0)], 0).tolist()
        self.call_end = np.where(has, trace.end[np.maximum(launch, 0)], 0).tolist()
        self.call_thread = np.where(has, trace.column("thread")[np.maximum(launch, 0)], -1).tolist()
        graphs = np.array([is_graph_launch(n) for n in trace.names], dtype=bool)
        self.graph = (has & graphs[trace.column("name")[np.maximum(launch, 0)]]).tolist() if len(rows) else []
        self.label = [CLASSES[c] for c in class_of_row(trace, rows).tolist()]
        stream = trace.column("stream")[rows]
        device = trace.column("device")[rows].astype(np.int64)
        order = np.lexsort((np.arange(len(rows)), stream, device))
        same = (stream[order[1:]] == stream[order[:-1]]) & (device[order[1:]] == device[order[:-1]])
        previous = np.full(len(rows), -1, dtype=np.int64)
        previous[order[1:][same]] = order[:-1][same]
        self.previous = previous.tolist()
        by_end = np.argsort(trace.end[rows], kind="stable")
        self.by_end, self.ends = by_end.tolist(), trace.end[rows][by_end].tolist()
        self.position = {row: i for i, row in enumerate(self.rows)}
        self.streams = stream.tolist()
        self.seen: set[int] = set()

    def _thread_tables(self) -> None:
        """Where each thread may have waited: (end, start, target), by end; target -1 - t means thread t, -10**9 means
        device.
        """
        trace = self.trace
        stacks = trace.stacks
        blocking = CAUSES_OF_HOST.index("blocking_call")
        self.stops: dict[int, list[tuple[int, int, int]]] = {}
        segments: Ints = np.flatnonzero(stacks.cause[stacks.segment_row] == blocking)
        for i in segments.tolist():
            entry = (int(stacks.segment_end[i]), int(stacks.segment_start[i]), _DEVICE)
            self.stops.setdefault(int(stacks.segment_thread[i]), []).append(entry)
        # A copy "to be done later" from pageable memory returns only when it is done: its own work ends inside the
        # call.
        links = trace.launches
        has = np.flatnonzero(links.launch_rows >= 0)
        calls = links.launch_rows[has]
        work = links.device_rows[has]
        within = (
            (trace.end[work] <= trace.end[calls])
            & (trace.kind[work] == Kind.MEMCPY)
            & (stacks.cause[calls] != blocking)
        )
        for i in np.flatnonzero(within).tolist():
            call = int(calls[i])
            entry = (int(trace.end[call]), int(trace.ts[call]), int(has[i]))
            self.stops.setdefault(int(trace.column("thread")[call]), []).append(entry)
        self._hand_overs()
        self.stop_ends: dict[int, list[int]] = {}
        for thread, entries in self.stops.items():
            entries.sort()
            self.stop_ends[thread] = [e for e, _, _ in entries]
        self.stopped: set[tuple[int, int, int, int]] = set()

    def _hand_overs(self) -> None:
        """Silence on one of the threads that share the step's work, while another of them is inside an operator."""
        trace, stacks = self.trace, self.trace.stacks
        workers = autograd_threads(trace)
        main = main_thread(trace)
        group = sorted({*workers, main} - {-1})
        if len(group) < 2:
            return
        silent_python = np.array(["run_backward" in n or "_engine_run" in n for n in trace.names], dtype=bool)
        roots = np.flatnonzero((trace.kind == Kind.OPERATOR) & np.isin(trace.column("thread"), group))
        names = trace.column("name")
        for thread in group:
            others = roots[trace.column("thread")[roots] != thread]
            if not len(others):
                continue
            others = others[np.argsort(trace.end[others], kind="stable")]
            ends = trace.end[others]
            start, end, row, _ = stacks.over(thread, np.array([self.low]), np.array([self.high]))
            python = (row >= 0) & (trace.kind[row] == Kind.PYTHON) & silent_python[names[row]] if len(row) else row >= 0
            silent = (row < 0) | python | (np.where(row >= 0, trace.kind[row], 0) == Kind.ANNOTATION)
            start, end = start[silent], end[silent]
            at = np.searchsorted(ends, end, side="right") - 1
            for i in np.flatnonzero((at >= 0) & (ends[np.maximum(at, 0)] > start)).tolist():
                other = others[at[i]]
                entry = (int(end[i]), int(start[i]), -1 - int(trace.column("thread")[other]) - 2 * 10**9)
                self.stops.setdefault(thread, []).append(entry)
        self.root_ends = {t: np.sort(trace.end[roots[trace.column("thread")[roots] == t]]).tolist() for t in group}

    # --- the walk ---

    def run(self) -> None:
        """Loop, not recursion: device work and host stretches follow each other until the window's start."""
        place, time = self.begin(main_thread(self.trace))
        while time > self.low:
            place, time = self.take(place, time)

    def begin(self, thread: int) -> tuple[tuple[str, int], int]:
        """Where the walk starts: on the work that ends the window, else on the given host thread."""
        at = bisect_right(self.ends, self.high) - 1
        if at >= 0 and self.ends[at] == self.high:
            return ("device", self.by_end[at]), self.high
        return ("host", thread), self.high

    def take(self, place: tuple[str, int], time: int) -> tuple[tuple[str, int], int]:
        """One stretch back: what held up `place` until `time`."""
        return self._device_step(place[1], time) if place[0] == "device" else self._host_step(place[1], time)

    def _device_step(self, index: int, time: int) -> tuple[tuple[str, int], int]:
        self.seen.add(index)
        start = min(self.start[index], time)
        self._add(start, time, self.label[index], self.rows[index])
        if start <= self.low:
            return ("device", index), self.low
        before = self.previous[index]
        free = min(self.end[before], start) if before >= 0 else -1
        launched = self.launch[index] >= 0
        called = min(self.call_start[index], start) if launched else -1
        arrived = min(self.call_end[index], start) if launched else -1
        if start - max(free, arrived) > EVENT_WAIT_NS:
            at = bisect_right(self.ends, start) - 1
            if at >= 0 and self.ends[at] > max(free, arrived) and self.by_end[at] not in self.seen:
                self._add(self.ends[at], start, "stream_event", self.rows[index])
                return ("device", self.by_end[at]), self.ends[at]
        if before >= 0 and before not in self.seen and (free >= called or not launched):
            usual = start - free <= BETWEEN_KERNELS_NS or self.graph[index]
            self._add(free, start, "kernel_gap" if usual else "queued_unknown", self.rows[index])
            return ("device", before), free
        if launched:
            usual = start - arrived <= LATENCY_NS or self.graph[index]
            self._add(arrived, start, "launch_latency" if usual else "queued_unknown", self.rows[index])
            return ("host", self.call_thread[index]), arrived
        return ("host", main_thread(self.trace)), start

    def _host_step(self, thread: int, time: int) -> tuple[tuple[str, int], int]:
        """Host time back to the last place where this thread waited for someone else."""
        entries = self.stops.get(thread, [])
        at = bisect_left(self.stop_ends.get(thread, []), time)
        # A call that is still running at `time` comes first, then those that ended before.
        candidates = [*range(at, min(at + 2, len(entries))), *range(at - 1, -1, -1)]
        for i in candidates:
            end, start, target = entries[i]
            if start >= time:
                continue
            if end <= self.low:
                break
            key = (thread, end, start, target)
            stop = min(end, time)
            if key in self.stopped:
                continue
            found = self._waited_for(thread, start, stop, target)
            if found is None:
                continue
            self.stopped.add(key)
            place, when = found
            self._stretch(thread, stop, time)
            if place[0] == "device":
                call = int(self.trace.stacks.innermost(np.array([thread]), np.array([max(start, when)]))[0])
                self._add(when, stop, "sync_return", call)
            else:
                self._stretch(thread, when, stop)
            return place, when
        self._stretch(thread, self.low, time)
        return ("host", thread), self.low

    def _waited_for(self, thread: int, start: int, stop: int, target: int) -> tuple[tuple[str, int], int] | None:
        if target >= 0:
            return (
                (("device", target), self.end[target]) if self.end[target] <= stop and target not in self.seen else None
            )
        if target == _DEVICE:
            at = bisect_right(self.ends, stop) - 1
            while at >= 0 and self.ends[at] > start:
                index = self.by_end[at]
                if index not in self.seen and (self.launch[index] < 0 or self.call_start[index] <= start):
                    return ("device", index), self.ends[at]
                at -= 1
            return None
        other = -1 - (target + 2 * 10**9)
        ends = self.root_ends.get(other, [])
        at = bisect_right(ends, stop) - 1
        return (("host", other), ends[at]) if at >= 0 and ends[at] > start else None

    def _add(self, start: int, end: int, category: str, row: int) -> None:
        start, end = max(start, self.low), min(end, self.high)
        if end > start:
            self.pieces.append((start, end, category, row))

    def _stretch(self, thread: int, start: int, end: int) -> None:
        start = max(start, self.low)
        if end > start:
            self.stretches.append((thread, start, end))

    def frame(self) -> pl.DataFrame:
        """All pieces in order of time."""
        stacks, device = self.trace.stacks, self.trace.column("device")
        starts, ends, categories, rows, places = [], [], [], [], []
        for start, end, category, row in self.pieces:
            starts.append(start)
            ends.append(end)
            categories.append(category)
            rows.append(row)
            places.append(f"device {device[row]}" if row >= 0 and category != "sync_return" else "host")
        for thread in {t for t, _, _ in self.stretches}:
            mine = sorted((s, e) for t, s, e in self.stretches if t == thread)
            low, high = np.array([s for s, _ in mine]), np.array([e for _, e in mine])
            if thread >= 0:
                begins, stops, owner, _ = stacks.over(thread, low, high)
            else:
                begins, stops, owner = low, high, np.full(len(low), -1)
            cause = (
                np.where(owner >= 0, stacks.cause[owner], 0) if len(stacks.cause) else np.zeros(len(owner), np.int64)
            )
            starts += begins.tolist()
            ends += stops.tolist()
            categories += [CAUSES_OF_HOST[c] for c in cause.tolist()]
            rows += owner.tolist()
            places += [f"thread {thread}"] * len(begins)
        schema = {
            "start_ns": pl.Int64(),
            "end_ns": pl.Int64(),
            "category": pl.String(),
            "row": pl.Int64(),
            "place": pl.String(),
        }
        return pl.DataFrame(
            {"start_ns": starts, "end_ns": ends, "category": categories, "row": rows, "place": places}, schema=schema
        ).sort("start_ns")


_DEVICE = -(10**9)


def path_events(trace: Trace, path: CriticalPath) -> pl.DataFrame:
    """What the critical path consists of, by category and event name.

    Columns: category, name, count, time_ns, share.
    """
    row = path.pieces["row"].to_numpy()
    codes = (
        np.where(row >= 0, trace.column("name")[np.maximum(row, 0)].astype(np.int64), -1)
        if trace.events.height
        else row
    )
    frame = path.pieces.with_columns(code=pl.Series(codes))
    grouped = frame.group_by("category", "code").agg(
        count=pl.len(), time_ns=(pl.col("end_ns") - pl.col("start_ns")).sum()
    )
    names = ["" if c < 0 else without_address(trace.names[c]) for c in grouped["code"]]
    by_name = grouped.with_columns(name=pl.Series(names, dtype=pl.String())).group_by("category", "name")
    return (
        by_name.agg(pl.col("count", "time_ns").sum())
        .with_columns(share=pl.col("time_ns") / max(path.wall_ns, 1))
        .sort("time_ns", "category", "name", descending=[True, False, False])
    )
