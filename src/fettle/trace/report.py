"""One self-contained HTML page about a trace or a folder of ranks: evidence first, no network, nothing executed from
the trace.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fettle.trace import charts
from fettle.trace.account import account_total, time_account
from fettle.trace.communication import arrival, collective_table, overlap, stragglers
from fettle.trace.critical import critical_path, path_events
from fettle.trace.health import trace_health
from fettle.trace.host import host_summary, threads
from fettle.trace.idle import idle_summary
from fettle.trace.kernels import class_of_row, kernel_classes, kernel_table, kernels_across_ranks
from fettle.trace.kinds import Kind
from fettle.trace.memory_timeline import memory_peak, memory_timeline
from fettle.trace.model import Trace
from fettle.trace.operators import operator_table
from fettle.trace.queue import bandwidth_summary, queue_length, queue_summary
from fettle.trace.steps import step_summary, steps

TIMELINE_EVENTS = 1500


@dataclass
class Section:
    """One part of the page."""

    title: str
    text: str = ""
    charts: list[dict[str, Any]] = field(default_factory=list)
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)

    def chart(self, chart: Any) -> None:
        self.charts.append(chart.to_dict())

    def table(self, caption: str, frame: pl.DataFrame, rows: int = 25) -> None:
        if frame.height:
            columns = [heading(c) for c in frame.columns]
            cells = [
                [cell(v, c) for v, c in zip(row, frame.columns, strict=True)] for row in frame.head(rows).iter_rows()
            ]
            self.tables.append((caption, columns, cells))


def heading(column: str) -> str:
    """A column's title: times are shown in milliseconds."""
    return column.removesuffix("_ns").replace("_", " ") + (" (ms)" if column.endswith("_ns") else "")


def cell(value: Any, column: str) -> str:
    """One cell for people."""
    if value is None:
        return "-"
    if column.endswith("_ns"):
        return f"{value / 1e6:,.3f}"
    if column.endswith("share"):
        return f"{value:.1%}"
    if isinstance(value, float):
        return f"{value:,.3f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if "bytes" in column or "count" in column else str(value)
    text = str(value)
    return text if len(text) <= 160 else text[:157] + "..."


def write_report(traces: list[Trace], target: Path) -> list[str]:
    """Write the page. Returns what could not be computed, one line each (also on the page)."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    sections: list[Section] = []
    failed: list[str] = []
    builders: list[Callable[[list[Trace]], Section | None]] = [
        _health,
        _account,
        _idle,
        _kernels,
        _communication,
        _critical,
        _timeline,
        _host,
        _queue,
        _memory,
    ]
    for build in builders:
        # A part that cannot be made must not cost the others; what failed is said on the page.
        try:
            section = build(traces)
        except (ArithmeticError, ValueError, KeyError, IndexError, pl.exceptions.PolarsError) as error:
            failed.append(f"{build.__name__.strip('_')}: {type(error).__name__}: {error}")
            continue
        if section is not None:
            sections.append(section)
    environment = Environment(loader=PackageLoader("fettle.trace", "."), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("report.html.j2").render(
        title=", ".join(sorted({t.path.name for t in traces})[:4]),
        sections=sections,
        failed=failed,
        bundle=_bundle(),
        specs=_specs(sections),
    )
    target.write_text(page, encoding="utf-8")
    return failed


def _bundle() -> str:
    """Vega's scripts as one text, from the library that is installed: the page needs no network."""
    import vl_convert
    from altair.utils._importers import vl_version_for_vl_convert

    bundle: Any = vl_convert.javascript_bundle  # its stub forgets that the snippet has a default
    return str(bundle(vl_version=vl_version_for_vl_convert())).replace("</script", "<\\/script")


def _specs(sections: list[Section]) -> str:
    """All chart specifications as JSON that cannot end the script element around it."""
    specs = {f"c{i}-{j}": spec for i, s in enumerate(sections) for j, spec in enumerate(s.charts)}
    return (
        json.dumps(specs, default=str).replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    )


def _health(traces: list[Trace]) -> Section:
    section = Section("Can the trace be trusted?")
    rows = []
    for trace in traces:
        health = trace_health(trace)
        summary = step_summary(steps(trace))
        section.text += (
            f"Rank {trace.rank}: {health.kept:,} of {health.events:,} events kept, "
            f"{health.span_ns / 1e6:,.3f} ms, "
            f"{len(health.devices)} device(s), {summary['steps']} step(s), "
            f"median {float(summary['median_ns']) / 1e6:,.3f} ms. "  # type: ignore[arg-type]
        )
        if health.uncertain:
            section.text += f"Uncertain: {', '.join(health.uncertain)}. "
        rows += [(trace.rank, f.severity, f.what, f.count, f.means) for f in health.findings]
    section.table("Findings", pl.DataFrame(rows, schema=["rank", "severity", "what", "count", "means"], orient="row"))
    return section


def _account(traces: list[Trace]) -> Section:
    account = pl.concat([time_account(t) for t in traces])
    section = Section(
        "Where did the time go?", "Every nanosecond of each step is booked once; the parts add up to the wall time."
    )
    section.chart(charts.account_chart(account))
    whole = account_total(account)
    section.table("All steps", whole.select(["rank", "device", *[c for c in whole.columns[2:] if whole[c].sum() > 0]]))
    return section


def _idle(traces: list[Trace]) -> Section | None:
    frames = [idle_summary(t, d) for t in traces for d in t.device_keys]
    if not frames:
        return None
    frame = pl.concat(frames)
    section = Section("Why was the device idle?", "Each gap is cut into the pieces that different causes held.")
    section.chart(charts.bar_chart(frame, "cause", "idle_ns", "Idle time by cause"))
    section.table("By cause", frame)
    return section


def _kernels(traces: list[Trace]) -> Section | None:
    frame = pl.concat([kernel_table(t) for t in traces])
    if not frame.height:
        return None
    section = Section("Which kernels took the time?")
    section.chart(charts.bar_chart(frame, "name", "sum_ns", "Longest kernels", color="class"))
    section.table("Longest kernels", frame)
    section.table("What ran together", pl.concat([kernel_classes(t) for t in traces]))
    if len(traces) > 1:
        section.table("Across ranks", kernels_across_ranks(traces))
    return section


def _communication(traces: list[Trace]) -> Section | None:
    hidden = pl.concat([overlap(t) for t in traces])
    if not hidden.height or hidden["communication_ns"].sum() == 0:
        return None
    section = Section("Communication", "Bandwidths of one rank include its waiting for the others: lower bounds.")
    section.table("Hidden behind compute", hidden)
    section.table("Collectives", pl.concat([collective_table(t) for t in traces]))
    if len(traces) > 1:
        section.table("Who was waited for", stragglers(traces))
        skews = arrival(traces)
        section.table("Largest arrival skews", skews.sort("skew_ns", descending=True).drop("key", "first_ns"))
    return section


def _critical(traces: list[Trace]) -> Section:
    section = Section("What held the steps up?", "The critical path covers the wall clock of all steps.")
    for trace in traces[:4]:
        path = critical_path(trace)
        summary = path.summary()
        section.chart(charts.bar_chart(summary, "category", "time_ns", f"Critical path of rank {trace.rank}"))
        section.table(f"Rank {trace.rank}: events on the path", path_events(trace, path), rows=15)
    return section


def _timeline(traces: list[Trace]) -> Section | None:
    trace = traces[0]
    frame = timeline_frame(trace)
    if not frame.height:
        return None
    section = Section(
        "A step",
        f"Rank {trace.rank}, the step of median length; the longest {TIMELINE_EVENTS} events a side. Scroll to zoom.",
    )
    section.chart(charts.timeline_chart(frame, "Timeline of one step"))
    return section


def timeline_frame(trace: Trace) -> pl.DataFrame:
    """The longest events of the median step. Columns: lane, name, start_ms, end_ms, kind."""
    table = steps(trace).sort("wall_ns")
    chosen = table.row(table.height // 2, named=True)
    low, high = chosen["start_ns"], chosen["end_ns"]
    inside = (trace.ts < high) & (trace.end > low)
    names, lanes, starts, ends, kinds = [], [], [], [], []
    thread, stream, device = trace.column("thread"), trace.column("stream"), trace.column("device")
    for flags, is_device in ((trace.is_device, True), (trace.kind == Kind.OPERATOR, False)):
        rows = np.flatnonzero(flags & inside)
        rows = rows[np.argsort(-trace.dur[rows], kind="stable")][:TIMELINE_EVENTS]
        classes = class_of_row(trace, rows) if is_device else np.zeros(len(rows), np.int64)
        for row, one in zip(rows.tolist(), classes.tolist(), strict=True):
            names.append(trace.names[int(trace.events["name"][row])][:100])
            depth = int(trace.stacks.depth[row])
            lanes.append(
                f"device {device[row]} stream {stream[row]}"
                if is_device
                else f"{trace.thread_label(int(thread[row]))[:30]} / {min(depth, 9)}"
            )
            starts.append((max(int(trace.ts[row]), low) - low) / 1e6)
            ends.append((min(int(trace.end[row]), high) - low) / 1e6)
            kinds.append(("compute", "communication", "copy")[one] if is_device else "operator")
    return pl.DataFrame({"lane": lanes, "name": names, "start_ms": starts, "end_ms": ends, "kind": kinds}).sort(
        "lane", "start_ms"
    )


def _host(traces: list[Trace]) -> Section:
    section = Section("The host")
    section.table("Questions of a slow host", pl.concat([host_summary(t) for t in traces]))
    section.table("Threads", pl.concat([threads(t) for t in traces], how="diagonal_relaxed"), rows=12)
    section.table("Operators", pl.concat([operator_table(t) for t in traces]))
    return section


def _queue(traces: list[Trace]) -> Section | None:
    frame = pl.concat([queue_summary(t) for t in traces])
    if not frame.height:
        return None
    section = Section("Queues and copies", "A device whose queue is often empty waits for the host.")
    series = queue_length(traces[0]).with_columns(stream_name=pl.format("device {} stream {}", "device", "stream"))
    section.chart(
        charts.step_line(
            series, "length", f"Queue length, rank {traces[0].rank}", series="stream_name", unit="launched, not started"
        )
    )
    section.table("Queue length, weighted by time", frame)
    section.table("Copies", pl.concat([bandwidth_summary(t) for t in traces]))
    return section


def _memory(traces: list[Trace]) -> Section | None:
    frame = memory_timeline(traces[0])
    if not frame.height:
        return None
    told = frame.filter(pl.col("allocated_bytes") >= 0)
    section = Section("Memory")
    if told.height:
        series = told.with_columns(mib=pl.col("allocated_bytes") / 2**20)
        section.chart(charts.step_line(series, "mib", f"Allocated, rank {traces[0].rank}", series="device", unit="MiB"))
    section.table("At the peak, by the operator that took it", pl.concat([memory_peak(t) for t in traces]))
    return section
