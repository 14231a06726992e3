"""What held a step up, what it would be without that, what makes one step slower than another, and a step itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import polars as pl

from fettle.errors import UsageError
from fettle.trace.analyses.arrival import clock_shifts
from fettle.trace.analyses.compare import Comparison, compare
from fettle.trace.analyses.critical import critical_path, critical_path_of_ranks, path_events, path_shares
from fettle.trace.analyses.kernels import class_names
from fettle.trace.analyses.memory_timeline import memory_peak, memory_timeline
from fettle.trace.analyses.stacks import host_stacks
from fettle.trace.analyses.steps import steps
from fettle.trace.analyses.whatif import what_if
from fettle.trace.frames import frame_of, joined
from fettle.trace.kinds import Kind, short_kernel_name
from fettle.trace.model import Ints, Trace
from fettle.trace.report import charts
from fettle.trace.report.charts.look import MAX_ROWS
from fettle.trace.report.section import Section, ms
from fettle.units import size_text

SHOWN_RANKS = 4
TIMELINE_EVENTS = 1200
TIMELINE_ROWS = 60


def critical(traces: list[Trace]) -> Section:
    section = Section(
        "What held the steps up, and what if not?",
        "The critical path covers the wall clock of all steps without a hole. A what-if replays the "
        "steps with a change: the dot is the estimate, the line its bounds, the mark the time as measured.",
    )
    for trace in section.first(traces, SHOWN_RANKS, "ranks"):
        rank = f", rank {trace.rank}" if len(traces) > 1 else ""
        path = critical_path(trace)
        section.chart(f"Critical path{rank}", charts.bar_chart(path.summary(), "category", "time_ns"))
        if trace.device_keys or "data_loading" in path.summary()["category"]:
            changes = ("no_syncs", "perfect_overlap", "graph", "data_ready") if trace.device_keys else ("data_ready",)
            answers = [what_if(trace, change, path=path) for change in changes]
            frame = pl.DataFrame([{**asdict(a), "answer": a.answer, "saving_share": a.saving_share} for a in answers])
            labels = [f"if {a.question}  ·  {'cannot tell' if a.cannot_tell else ms(a.estimate_ns)}" for a in answers]
            section.chart(f"What if ...{rank}", charts.what_if_chart(frame.with_columns(question=pl.Series(labels))))
            shown = ("wall_ns", "estimate_ns", "low_ns", "high_ns", "saving_share", "replay_error")
            section.table(f"What if{rank}", frame.select("change", "answer", *shown))
        section.table(f"Shares of the path{rank}, and their range where two reasons tie", path_shares(trace, path))
        section.table(f"Events on the path{rank}", path_events(trace, path))
    if len(traces) > 1:
        try:
            joined = critical_path_of_ranks(traces)
        except UsageError as error:
            section.text += f" Across ranks: unknown, {error}."
        else:
            length = (pl.col("end_ns") - pl.col("start_ns")) / 1e6
            pieces = joined.pieces.with_columns(where=pl.format("on rank {}", "rank"), ms=length)
            chart = charts.stacked(charts.main_parts(pieces, "category", "ms").sort("rank"), "where", "category", "ms")
            section.chart("One path through all ranks", chart)
    return section


def against(before: Trace) -> Callable[[list[Trace]], Section]:
    """The section that compares another trace with the first one."""

    def compared(traces: list[Trace]) -> Section:
        return _comparison(f"What changed since {before.path.name}?", compare(before, traces[0]))

    return compared


def slow_steps(traces: list[Trace]) -> Section | None:
    """Why the slowest third of the steps is slower than the fastest third; nothing with fewer than six steps."""
    trace = traces[0]
    frame = steps(trace).sort("wall_ns")
    third = frame.height // 3
    if frame.height < 6:
        return None
    fast, slow = frame["step"][:third].to_list(), frame["step"][-third:].to_list()
    result = compare(trace, trace, steps_before=fast, steps_after=slow)
    text = f"The {third} fastest and the {third} slowest steps of rank {trace.rank}. "
    return _comparison("Why are slow steps slower than fast ones?", result, text)


def _comparison(title: str, result: Comparison, text: str = "") -> Section:
    text += f"The mean step went from {ms(result.before_ns)} to {ms(result.after_ns)}. "
    notes = "; ".join(result.notes)
    section = Section(title, text + notes[:1].upper() + notes[1:])
    leaves = result.parts.filter(~pl.col("sums"))
    section.chart("The change, booked to its causes", charts.change_chart(leaves, result.before_ns, result.after_ns))
    changed = pl.col("change_ns").abs()
    parts, work = (frame.filter(changed >= 0.5) for frame in (result.parts.drop("sums"), result.work))
    section.table("Parts", parts.sort(changed, descending=True))
    columns = ("name", "operator", "class", "count", "count_after", "time_ns", "time_ns_after", "change_ns")
    section.table("Device work", work.select(columns), rows=12)
    if work.height:
        others = result.operators.filter(pl.col("change") != "same")
        section.table("Operators added, removed or called another number of times", others, rows=12)
    else:
        section.table("Operators, by the change of their own time in a step", result.operators, rows=15)
    return section


def timeline(traces: list[Trace]) -> Section | None:
    """One step as it ran: devices and threads of the first rank, and the devices of all ranks in one picture."""
    trace = traces[0]
    table = steps(trace).sort("wall_ns")
    chosen = table.row(table.height // 2, named=True)
    low, high = int(chosen["start_ns"]), int(chosen["end_ns"])
    lanes = Lanes(low, high)
    lanes.devices(trace)
    lanes.threads(trace)
    if not lanes.cells:
        return None
    what = f"Step {chosen['step']}, of median length," if chosen["step"] >= 0 else "The whole trace,"
    section = Section(
        "Timeline of one step",
        f"{what} the {TIMELINE_EVENTS:,} longest events of device and host. Scroll or pinch to zoom, drag to move.",
    )
    rank = f", rank {trace.rank}" if len(traces) > 1 else ""
    caption = f"Device streams, then host threads with their nesting{rank}"
    section.chart(caption, charts.blocks(lanes.frame(), "milliseconds"))
    if len(traces) > 1:
        together = Lanes(low, high)
        most = min(TIMELINE_EVENTS // min(len(traces), 4), MAX_ROWS // min(len(traces), TIMELINE_ROWS // 2))
        for one, shift in zip(traces, clock_shifts(traces).values(), strict=True):
            together.devices(one, shift, f"rank {one.rank} ", most)
        section.chart("Device streams of all ranks at that time", charts.blocks(together.frame(), "milliseconds"))
    return section


class Lanes:
    """Rows of blocks under their titles, between two moments of the first rank's clock, for `charts.blocks`."""

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high, self.at = low, high, 0
        self.cells: list[tuple[int, str, float, float, str]] = []

    def frame(self) -> pl.DataFrame:
        """Columns row, name, start, end (ms), kind."""
        return frame_of(self.cells, row=int, name=str, start=float, end=float, kind=str)

    def devices(self, trace: Trace, shift: int = 0, prefix: str = "", most: int = TIMELINE_EVENTS) -> None:
        """A row for each stream of each device; `shift` is what the trace's clock is ahead."""
        stream, device = trace.column("stream"), trace.column("device")
        inside = (trace.ts < self.high + shift) & (trace.end > self.low + shift)
        work = _longest(trace, np.flatnonzero(trace.is_device & inside), most)
        for one in sorted({(int(device[r]), int(stream[r])) for r in work.tolist()}):
            mine = work[(device[work] == one[0]) & (stream[work] == one[1])]
            kinds = class_names(trace, mine).to_list()
            names = [short_kernel_name(n) for n in trace.name_of(mine)]
            self._lane(f"{prefix}device {one[0]} stream {one[1]}", trace, mine, names, kinds, shift=shift)

    def threads(self, trace: Trace) -> None:
        """Rows for each host thread, as many as its events are deep: Python functions between them are not drawn."""
        kinds = {Kind.OPERATOR: "operator", Kind.RUNTIME: "runtime_call", Kind.ANNOTATION: "annotation"}
        steps_of = trace.named(lambda name: name.startswith("ProfilerStep#"))
        inside = (trace.ts < self.high) & (trace.end > self.low) & np.isin(trace.kind, list(kinds)) & ~steps_of
        host, thread = _longest(trace, np.flatnonzero(inside), TIMELINE_EVENTS), trace.column("thread")
        busy = np.bincount(thread[host], weights=trace.dur[host]) if len(host) else np.zeros(0)
        for one in np.argsort(-busy, kind="stable")[: np.count_nonzero(busy)].tolist():
            mine = host[thread[host] == one]
            of_kind = [kinds[Kind(int(k))] for k in trace.kind[mine]]
            self._lane(trace.thread_label(one), trace, mine, trace.name_of(mine), of_kind, _levels(trace, mine))

    def _lane(
        self,
        title: str,
        trace: Trace,
        rows: Ints,
        names: list[str],
        kinds: list[str],
        levels: Ints | None = None,
        shift: int = 0,
    ) -> None:
        depth = np.zeros(len(rows), dtype=np.int64) if levels is None else levels
        if self.at + 2 + int(depth.max()) > TIMELINE_ROWS:
            return
        self.cells.append((self.at, title, 0.0, 0.0, "title"))
        start = np.maximum(trace.ts[rows] - shift, self.low) - self.low
        end = np.minimum(trace.end[rows] - shift, self.high) - self.low
        cells = zip(depth.tolist(), names, (start / 1e6).tolist(), (end / 1e6).tolist(), kinds, strict=True)
        self.cells += [(self.at + 1 + level, name[:100], a, b, kind) for level, name, a, b, kind in cells]
        self.at += 2 + int(depth.max())


def _longest(trace: Trace, rows: Ints, most: int) -> Ints:
    return np.sort(rows[np.argsort(-trace.dur[rows], kind="stable")][:most])


def _levels(trace: Trace, rows: Ints) -> Ints:
    """How deep each event lies among the given ones of its thread."""
    drawn = {int(r): -1 for r in rows}
    for row in rows[np.argsort(host_stacks(trace).depth[rows], kind="stable")].tolist():
        above = int(host_stacks(trace).parent[row])
        while above >= 0 and above not in drawn:
            above = int(host_stacks(trace).parent[above])
        drawn[row] = drawn[above] + 1 if above >= 0 else 0
    return np.array([drawn[int(r)] for r in rows], dtype=np.int64)


def memory(traces: list[Trace]) -> Section | None:
    section = Section("Memory over time", "What was taken before the trace began has no owner.")
    for trace in section.first(traces, SHOWN_RANKS, "ranks"):
        frame = memory_timeline(trace)
        if frame.height:
            series = frame.with_columns(mib=pl.col("held_bytes") / 2**20)
            since = "" if (frame["allocated_bytes"] >= 0).all() else " since the trace began"
            rank = f", rank {trace.rank}" if len(traces) > 1 else ""
            peak = size_text(int(frame["held_bytes"].max() or 0))  # type: ignore[arg-type]
            section.chart(
                f"Allocated{since}{rank}, at most {peak}",
                charts.step_line(series, "mib", series="device", unit="MiB", area=True),
            )
    peaks = joined(traces, memory_peak)
    section.table("At the peak, by the operator that took it", peaks)
    return section if peaks.height else None
