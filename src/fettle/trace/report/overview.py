"""What the reader sees first: the verdict, the account of the time, why devices idled; and at the end what to trust."""

from __future__ import annotations

import polars as pl

from fettle.trace.analyses.account import account_parts, account_total, time_account
from fettle.trace.analyses.health import trace_health
from fettle.trace.analyses.idle import idle_streams, idle_summary, missing_information
from fettle.trace.analyses.memory_timeline import memory_timeline
from fettle.trace.analyses.steps import step_summary, steps
from fettle.trace.analyses.waits import CAUSES
from fettle.trace.frames import frame_of, joined
from fettle.trace.model import Trace
from fettle.trace.report import charts
from fettle.trace.report.section import Section, ms
from fettle.units import count_text, size_text

SHOWN_PLACES = 6
MOST_STREAMS = 16


def _shares(trace: Trace) -> dict[str, float]:
    """Parts of the first device's account (else the host's) with their share of the wall time, longest first."""
    parts = account_parts(account_total(time_account(trace))).filter(pl.col("part") != "wall time")
    if not parts.height:  # a trace without any times
        return {}
    first = parts.filter(pl.col("device") == parts["device"][0]).sort("time_ns", descending=True)
    return dict(first.select("part", "share").iter_rows())


def verdict(traces: list[Trace]) -> str:
    """Two or three sentences: where most of the time went, and why the rest was lost."""
    trace = traces[0]
    shares = _shares(trace)
    who = ("The device" if trace.device_keys else "The main thread") + (
        f" of rank {trace.rank}" if len(traces) > 1 else ""
    )
    busy = "compute" if trace.device_keys else "operators"
    lost = [(part.removeprefix("idle "), share) for part, share in shares.items() if part != busy and share >= 0.01][:3]
    did = "computed" if trace.device_keys else "was inside operators"
    sentence = f"{who} {did} for {shares.get(busy, 0.0):.0%} of the time."
    if lost:
        sentence += " The rest: " + ", ".join(f"{part} {share:.0%}" for part, share in lost) + "."
        meaning = CAUSES.get(lost[0][0].replace(" ", "_"))
        if meaning:
            sentence += f" The longest is {lost[0][0]}: {meaning}."
    return sentence


def tiles(traces: list[Trace]) -> list[tuple[str, str, str]]:
    """Name, value and note of the page's few headline figures."""
    trace = traces[0]
    summary = step_summary(steps(trace))
    count = int(summary["steps"])  # type: ignore[arg-type]
    low, high = trace.span
    shares = _shares(trace)
    idle = sum(share for part, share in shares.items() if part.startswith("idle "))
    figures = [
        ("median step", ms(float(summary["median_ns"])), count_text(count, "step"))  # type: ignore[arg-type]
        if steps(trace)["step"][0] >= 0
        else ("whole trace", ms(high - low), "no steps marked"),
        ("computing", f"{shares.get('compute', shares.get('operators', 0)):.0%}", "of the wall time"),
    ]
    if trace.device_keys:
        exposed = f"{shares.get('exposed communication', 0):.0%}"
        figures.append(("exposed communication", exposed, "nothing computed meanwhile"))
        figures.append(("idle", f"{idle:.0%}", count_text(len(trace.device_keys), "device")))
    else:
        figures.append(("outside operators", f"{idle:.0%}", "Python, waiting, other libraries"))
    peak = memory_timeline(trace)["allocated_bytes"].max()
    if isinstance(peak, int) and peak > 0:
        figures.append(("peak allocated", size_text(peak), "of the busiest allocator"))
    figures.append(("events", f"{trace.events.height:,}", count_text(len(traces), "rank")))
    return figures


def account(traces: list[Trace]) -> Section:
    whole = joined(traces, time_account)
    section = Section(
        "Where did the time go?",
        "Every nanosecond of each step is booked once, on each device; the parts add up to the wall time. "
        "Communication and copies count only where nothing computes. A step ends "
        + ("with its own annotation." if traces[0].own_end else "where the next one begins."),
    )
    places = whole.select("rank", "device").unique(maintain_order=True).rows()
    if len(places) > 1:
        section.chart("The mean step, by device", charts.account_chart(whole))
    for rank, number in section.first(places, SHOWN_PLACES, "devices"):
        one = whole.filter((pl.col("rank") == rank) & (pl.col("device") == number))
        name = f"rank {rank} {'host' if number < 0 else f'device {number}'}"
        if one.height > 1 or len(places) == 1:
            section.chart("Each step" + (f", {name}" if len(places) > 1 else ""), charts.account_chart(one))
    section.table("All steps", account_parts(account_total(whole)).filter(pl.col("part") != "wall time"), rows=60)
    rows = []
    for trace in traces:
        summary = step_summary(steps(trace))
        outliers = ", ".join(map(str, summary["outliers"][:8]))  # type: ignore[index]
        clear = "clear" if summary["drift_is_clear"] else "not clear"
        figures = (summary["steps"], summary["median_ns"], summary["mad_ns"], outliers, summary["drift_ns_per_step"])
        rows.append((trace.rank, *figures, clear))
    columns = {"rank": int, "steps": int, "median_ns": float, "median_deviation_ns": float, "outliers": str}
    frame = frame_of(rows, **columns, drift_per_step_ns=float, drift=str)
    section.table("Steps: medians, outliers, drift", frame, rows=64)
    return section


def idle(traces: list[Trace]) -> Section | None:
    frames = [idle_summary(t, d) for t in traces for d in t.device_keys]
    if not frames or not (frame := pl.concat(frames)).height:
        return None
    section = Section(
        "Why was the device idle?",
        "Each gap in the steps is cut into the pieces that different causes held; what held the host longest is named.",
    )
    for trace in traces:
        for number in trace.device_keys:
            if missing := missing_information(trace, number):
                section.text += f" Missing for rank {trace.rank} device {number}: {missing}."
    shown = frame.with_columns(where=charts.PLACE, cause_ms=pl.col("idle_ns") / 1e6)
    several = charts.stacked(charts.main_parts(shown, "cause", "cause_ms"), "where", "cause", "cause_ms")
    section.chart("Idle time by cause", several if len(frames) > 1 else charts.bar_chart(frame, "cause", "idle_ns"))
    section.table("By cause", frame.drop("meaning"), rows=40)
    streams = joined(traces, idle_streams)
    parts = {
        "host_ns": "waited for its launch",
        "event_ns": "waited for another stream",
        "latency_ns": "launch latency",
        "gap_ns": "between kernels",
        "unknown_ns": "unknown",
    }
    where = pl.format("rank {} device {} stream {}", "rank", "device", "stream")
    section.chart("Idle time of each stream", charts.split_bars(streams.head(MOST_STREAMS), where, parts))
    section.table("Of each stream", streams, rows=MOST_STREAMS)
    return section


def health(traces: list[Trace]) -> Section:
    section = Section("Can the trace be trusted?")
    rows = []
    for trace in traces:
        checked = trace_health(trace)
        devices = ", ".join(f"device {d}" for d in checked.devices) or "no device"
        kept = f"{checked.kept:,} of {checked.events:,} events kept"
        section.text += f"Rank {trace.rank}: {kept}, {ms(checked.span_ns)}, {devices}. "
        if checked.uncertain:
            section.text += f"Uncertain: {', '.join(checked.uncertain)}. "
        rows += [(trace.rank, f.severity, f.what, f.count, f.means) for f in checked.findings]
    if not rows:
        section.text += "Nothing was skipped, repaired or missing."
    frame = frame_of(rows, rank=int, severity=str, what=str, count=int, means=str)
    section.table("Findings", frame, rows=60)
    return section
