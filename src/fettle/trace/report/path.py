"""What held a step up, what it would be without that, what makes one step slower than another, and a step itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import polars as pl

from fettle.errors import UsageError
from fettle.trace.analyses.compare import Comparison, compare
from fettle.trace.analyses.critical import critical_path, path_events
from fettle.trace.analyses.critical_ranks import critical_path_of_ranks
from fettle.trace.analyses.kernels import class_of_row
from fettle.trace.analyses.memory_timeline import memory_peak, memory_timeline
from fettle.trace.analyses.stacks import host_stacks
from fettle.trace.analyses.steps import steps
from fettle.trace.analyses.whatif import what_if
from fettle.trace.kinds import Kind, short_kernel_name
from fettle.trace.model import Ints, Trace
from fettle.trace.report import charts
from fettle.trace.report.section import Section, ms
from fettle.units import size_text

SHOWN_RANKS = 4
TIMELINE_EVENTS = 1200
TIMELINE_ROWS = 60


def critical(traces: list[Trace]) -> Section:
    """The critical path and what-if."""
    section = Section(
        "What held the steps up, and what if not?",
        "The critical path covers the wall clock of all steps without a hole. A what-if replays the "
        "steps with a change: the dot is the estimate, the line its bounds, the mark the time as measured.",
    )
    for trace in traces[:SHOWN_RANKS]:
        rank = f", rank {trace.rank}" if len(traces) > 1 else ""
        path = critical_path(trace)
        section.chart(f"Critical path{rank}", charts.bar_chart(path.summary(), "category", "time_ns"))
        if trace.device_keys or "data_loading" in path.summary()["category"]:
            changes = ("no_syncs", "perfect_overlap", "graph", "data_ready") if trace.device_keys else ("data_ready",)
            answers = [what_if(trace, change, path=path) for change in changes]
            frame = pl.DataFrame([{**asdict(a), "answer": a.answer, "saving_share": a.saving_share} for a in answers])
            said = [f"if {a.question}  ·  {'cannot tell' if a.cannot_tell else ms(a.estimate_ns)}" for a in answers]
            section.chart(f"What if ...{rank}", charts.what_if_chart(frame.with_columns(question=pl.Series(said))))
            section.table(
                f"What if{rank}",
                frame.select(
                    "change", "answer", "wall_ns", "estimate_ns", "low_ns", "high_ns", "saving_share", "replay_error"
                ),
            )
        section.table(f"Events on the path{rank}", path_events(trace, path))
    if len(traces) > 1:
        try:
            joined = critical_path_of_ranks(traces)
        except UsageError as error:
            section.text += f" Across ranks: unknown, {error}."
        else:
            pieces = joined.pieces.with_columns(
                where=pl.format("on rank {}", "rank"), ms=(pl.col("end_ns") - pl.col("start_ns")) / 1e6
            )
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
    return _comparison(
        "Why are slow steps slower than fast ones?",
        result,
        f"The {third} fastest and the {third} slowest steps of rank {trace.rank}. ",
    )


def _comparison(title: str, result: Comparison, text: str = "") -> Section:
    section = Section(
        title,
        f"{text}The mean step went from {ms(result.before_ns)} to {ms(result.after_ns)}. " + "; ".join(result.notes),
    )
    leaves = result.parts.filter(~pl.col("sums"))
    section.chart("The change, booked to its causes", charts.change_chart(leaves, result.before_ns, result.after_ns))
    section.table(
        "Parts",
        result.parts.filter(pl.col("change_ns").abs() >= 0.5)
        .drop("sums")
        .sort(pl.col("change_ns").abs(), descending=True),
    )
    work = result.work.filter(pl.col("change_ns").abs() >= 0.5)
    section.table(
        "Device work",
        work.select("name", "operator", "class", "count", "count_after", "time_ns", "time_ns_after", "change_ns"),
        rows=12,
    )
    if work.height:
        changed = result.operators.filter(pl.col("change") != "same")
        section.table("Operators added, removed or called another number of times", changed, rows=12)
    else:
        section.table("Operators, by the change of their own time in a step", result.operators, rows=15)
    return section


def timeline(traces: list[Trace]) -> Section | None:
    """One step as it ran."""
    trace = traces[0]
    frame, text = timeline_frame(trace)
    if not frame.height:
        return None
    section = Section("Timeline of one step", text + " Scroll or pinch to zoom, drag to move.")
    section.chart("Device streams, then host threads with their nesting", charts.blocks(frame, "milliseconds"))
    return section


def timeline_frame(trace: Trace) -> tuple[pl.DataFrame, str]:
    """The step of median length: columns row, name, start, end, length (ms), kind; and what it shows, in words."""
    table = steps(trace).sort("wall_ns")
    chosen = table.row(table.height // 2, named=True)
    low, high = int(chosen["start_ns"]), int(chosen["end_ns"])
    inside = (trace.ts < high) & (trace.end > low)
    rows: list[tuple[int, str, int, int, str]] = []
    titles: list[tuple[int, str]] = []
    stream, device, thread = trace.column("stream"), trace.column("device"), trace.column("thread")
    work = _longest(trace, np.flatnonzero(trace.is_device & inside))
    lanes = sorted({(int(device[r]), int(stream[r])) for r in work.tolist()})
    at = 0
    for lane in lanes:
        mine = work[(device[work] == lane[0]) & (stream[work] == lane[1])]
        if at + 2 > TIMELINE_ROWS:
            break
        titles.append((at, f"device {lane[0]} stream {lane[1]}"))
        kinds = [("compute", "communication", "copy")[c] for c in class_of_row(trace, mine).tolist()]
        rows += [
            (at + 1, short_kernel_name(n), int(trace.ts[r]), int(trace.end[r]), k)
            for r, n, k in zip(mine, trace.name_of(mine), kinds, strict=True)
        ]
        at += 2
    host = np.flatnonzero(
        inside & ((trace.kind == Kind.OPERATOR) | (trace.kind == Kind.RUNTIME) | (trace.kind == Kind.ANNOTATION))
    )
    host = (
        host[[not trace.names[c].startswith("ProfilerStep#") for c in trace.column("name")[host].tolist()]]
        if len(host)
        else host
    )
    host = _longest(trace, host)
    for one in sorted(np.unique(thread[host]).tolist(), key=lambda t: -int(trace.dur[host[thread[host] == t]].sum())):
        mine = host[thread[host] == one]
        # Python functions between operators are not drawn: rows are the depths that are.
        levels = _levels(trace, mine)
        if at + 2 + int(levels.max()) > TIMELINE_ROWS:
            break
        titles.append((at, trace.thread_label(one)))
        kinds = [
            {Kind.OPERATOR: "operator", Kind.RUNTIME: "runtime_call"}.get(Kind(int(k)), "annotation")
            for k in trace.kind[mine]
        ]
        rows += [
            (at + 1 + level, n, int(trace.ts[r]), int(trace.end[r]), k)
            for r, n, k, level in zip(mine.tolist(), trace.name_of(mine), kinds, levels.tolist(), strict=True)
        ]
        at += 2 + int(levels.max())
    cells = [
        (row, name[:100], (max(a, low) - low) / 1e6, (min(b, high) - low) / 1e6, kind) for row, name, a, b, kind in rows
    ]
    cells += [(row, name, 0.0, 0.0, "title") for row, name in titles]
    schema = {"row": pl.Int64(), "name": pl.String(), "start": pl.Float64(), "end": pl.Float64(), "kind": pl.String()}
    frame = pl.DataFrame(cells, schema=schema, orient="row").with_columns(length=pl.col("end") - pl.col("start"))
    what = f"step {chosen['step']}, of median length," if chosen["step"] >= 0 else "the whole trace"
    return (
        frame if rows else frame.clear()
    ), f"Rank {trace.rank}, {what} the {TIMELINE_EVENTS} longest events of device and host."


def _longest(trace: Trace, rows: Ints) -> Ints:
    return np.sort(rows[np.argsort(-trace.dur[rows], kind="stable")][:TIMELINE_EVENTS])


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
    """Allocated memory over time, and who held it at the peak."""
    section = Section("Memory over time", "What was taken before the trace began has no owner.")
    for trace in traces[:SHOWN_RANKS]:
        frame = memory_timeline(trace)
        told = frame.filter(pl.col("allocated_bytes") >= 0)
        if told.height:
            series = told.with_columns(mib=pl.col("allocated_bytes") / 2**20)
            rank = f", rank {trace.rank}" if len(traces) > 1 else ""
            peak = size_text(int(told["allocated_bytes"].max() or 0))  # type: ignore[arg-type]
            section.chart(
                f"Allocated{rank}, at most {peak}",
                charts.step_line(series, "mib", series="device", unit="MiB", area=True),
            )
    peaks = pl.concat([memory_peak(t) for t in traces])
    section.table("At the peak, by the operator that took it", peaks)
    return section if peaks.height else None
