"""What the reader sees first: the verdict, the account of the time, why devices idled; and at the end what to trust."""

from __future__ import annotations

import polars as pl

from fettle.trace.analyses.account import account_total, time_account
from fettle.trace.analyses.health import trace_health
from fettle.trace.analyses.idle import idle_summary
from fettle.trace.analyses.memory_timeline import memory_timeline
from fettle.trace.analyses.steps import step_summary, steps
from fettle.trace.analyses.waits import CAUSES
from fettle.trace.model import Trace
from fettle.trace.report import charts
from fettle.trace.report.section import Section, ms, place
from fettle.units import size_text

SHOWN_PLACES = 6


def _shares(trace: Trace) -> pl.DataFrame:
    """The first place's account as parts with their share of the wall time, longest first."""
    account = time_account(trace)
    parts = charts.account_parts(account.filter(pl.col("device") == account["device"][0]))
    whole = float(parts["ns"].sum() or 1)
    return (
        parts.group_by("part")
        .agg(pl.col("ns").sum())
        .with_columns(share=pl.col("ns") / whole)
        .sort("ns", descending=True)
    )


def verdict(traces: list[Trace]) -> str:
    """Two or three sentences: where most of the time went, and why the rest was lost."""
    trace = traces[0]
    shares = _shares(trace)
    told = dict(shares.select("part", "share").iter_rows())
    who = ("The device" if trace.device_keys else "The main thread") + (
        f" of rank {trace.rank}" if len(traces) > 1 else ""
    )
    busy = told.get("compute", 0.0)
    lost = [(part, share) for part, share in told.items() if part != "compute" and share >= 0.01][:3]
    said = f"{who} {'computed' if trace.device_keys else 'was inside operators'} for {busy:.0%} of the time."
    if lost:
        said += " The rest: " + ", ".join(f"{part.replace('_', ' ')} {share:.0%}" for part, share in lost) + "."
        first = lost[0][0]
        if first in CAUSES:
            said += f" The longest is {first.replace('_', ' ')}: {CAUSES[first]}."
    return said


def tiles(traces: list[Trace]) -> list[tuple[str, str, str]]:
    """Name, value and note of the page's few headline figures."""
    trace = traces[0]
    summary = step_summary(steps(trace))
    count = int(summary["steps"])  # type: ignore[arg-type]
    low, high = trace.span
    told = dict(_shares(trace).select("part", "share").iter_rows())
    idle = sum(share for part, share in told.items() if part in CAUSES)
    found = [
        ("median step", ms(float(summary["median_ns"])), f"{count} steps")  # type: ignore[arg-type]
        if steps(trace)["step"][0] >= 0
        else ("whole trace", ms(high - low), "no steps marked"),
        ("computing", f"{told.get('compute', 0):.0%}", "of the wall time"),
    ]
    if trace.device_keys:
        found.append(
            ("exposed communication", f"{told.get('exposed communication', 0):.0%}", "nothing computed meanwhile")
        )
        found.append(("idle", f"{idle:.0%}", f"{len(trace.device_keys)} device(s)"))
    else:
        found.append(("outside operators", f"{idle:.0%}", "Python, waiting, other libraries"))
    peak = memory_timeline(trace)["allocated_bytes"].max()
    if isinstance(peak, int) and peak > 0:
        found.append(("peak allocated", size_text(peak), "of the busiest allocator"))
    found.append(("events", f"{trace.events.height:,}", f"{len(traces)} rank(s)"))
    return found


def account(traces: list[Trace]) -> Section:
    """Every nanosecond, booked once."""
    whole = pl.concat([time_account(t) for t in traces])
    section = Section(
        "Where did the time go?",
        "Every nanosecond of each step is booked once, on each device; the parts add up to the wall time. "
        "Communication and copies count only where nothing computes.",
    )
    places = whole.select("rank", "device").unique(maintain_order=True).rows()
    if len(places) > 1:
        section.chart("The mean step, by device", charts.account_chart(whole))
    for rank, number in places[:SHOWN_PLACES]:
        one = whole.filter((pl.col("rank") == rank) & (pl.col("device") == number))
        name = f"rank {rank} {'host' if number < 0 else f'device {number}'}"
        if one.height > 1 or len(places) == 1:
            section.chart("Each step" + (f", {name}" if len(places) > 1 else ""), charts.account_chart(one))
    totals = account_total(whole)
    frames = []
    for rank, number in places[:SHOWN_PLACES]:
        one = totals.filter((pl.col("rank") == rank) & (pl.col("device") == number))
        parts = charts.account_parts(one.with_columns(step=pl.lit(-1, dtype=pl.Int64()))).sort("ns", descending=True)
        wall = int(one["wall_ns"][0]) or 1
        meaning = {"compute": "kernels ran" if number >= 0 else "the main thread was inside an operator", **CAUSES}
        frames.append(
            parts.select(
                "where",
                "part",
                time_ns="ns",
                share=pl.col("ns") / wall,
                meaning=pl.col("part").replace_strict(meaning, default="", return_dtype=pl.String()),
            )
        )
    table = pl.concat(frames)
    section.table("All steps", table if len(places) > 1 else table.drop("where"), rows=60)
    summaries = [(t.rank, step_summary(steps(t))) for t in traces]
    told = pl.DataFrame(
        [
            (
                rank,
                one["steps"],
                one["median_ns"],
                one["mad_ns"],
                ", ".join(map(str, one["outliers"][:8])),  # type: ignore[index]
                one["drift_ns_per_step"],
                "clear" if one["drift_is_clear"] else "not clear",
            )
            for rank, one in summaries
        ],
        schema=["rank", "steps", "median_ns", "median_deviation_ns", "outliers", "drift_per_step_ns", "drift"],
        orient="row",
    )
    section.table("Steps: medians, outliers, drift", told, rows=64)
    return section


def idle(traces: list[Trace]) -> Section | None:
    """Idle time by cause."""
    frames = [idle_summary(t, d) for t in traces for d in t.device_keys]
    if not frames or not (frame := pl.concat(frames)).height:
        return None
    section = Section(
        "Why was the device idle?",
        "Each gap is cut into the pieces that different causes held; what held the host longest is named.",
    )
    if len(frames) == 1:
        section.chart("Idle time by cause", charts.bar_chart(frame, "cause", "idle_ns"))
    else:
        named = frame.with_columns(where=pl.format("rank {} device {}", "rank", "device"), ms=pl.col("idle_ns") / 1e6)
        section.chart(
            "Idle time by cause", charts.stacked(charts.main_parts(named, "cause", "ms"), "where", "cause", "ms")
        )
    section.table("By cause", frame.drop("meaning"), rows=40)
    return section


def health(traces: list[Trace]) -> Section:
    """What reading met, and which answers that makes uncertain."""
    section = Section("Can the trace be trusted?")
    rows = []
    for trace in traces:
        found = trace_health(trace)
        devices = ", ".join(place(trace, d) for d in found.devices) or "no device"
        section.text += (
            f"Rank {trace.rank}: {found.kept:,} of {found.events:,} events kept, {ms(found.span_ns)}, {devices}. "
        )
        if found.uncertain:
            section.text += f"Uncertain: {', '.join(found.uncertain)}. "
        rows += [(trace.rank, f.severity, f.what, f.count, f.means) for f in found.findings]
    if not rows:
        section.text += "Nothing was skipped, repaired or missing."
    section.table(
        "Findings", pl.DataFrame(rows, schema=["rank", "severity", "what", "count", "means"], orient="row"), rows=60
    )
    return section
