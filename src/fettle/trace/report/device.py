"""The device's side: kernels, launches, communication, queues and copies."""

from __future__ import annotations

import polars as pl

from fettle.trace.analyses.arrival import arrival, clock_offsets, match_collectives, stragglers
from fettle.trace.analyses.communication import collective_table, collectives
from fettle.trace.analyses.communication import overlap as overlap_of
from fettle.trace.analyses.flops import limits_of, product_summary, product_table
from fettle.trace.analyses.kernels import kernel_classes, kernel_table, kernels_across_ranks
from fettle.trace.analyses.launches import call_table, launch_stats
from fettle.trace.analyses.occupancy import kernels_by_sm, sm_efficiency
from fettle.trace.analyses.queue import bandwidth_summary, copy_bandwidth, queue_length, queue_summary
from fettle.trace.frames import joined
from fettle.trace.kinds import short_kernel_name
from fettle.trace.model import Trace
from fettle.trace.report import charts
from fettle.trace.report.section import Section

SHOWN_RANKS = 3


def kernels(traces: list[Trace]) -> Section | None:
    frame = joined(traces, kernel_table)
    if not frame.height:
        return None
    section = Section("Which kernels took the time?", "Statistics are over launches. Short: under 10 microseconds.")
    # One bar a function; its template instances are rows of the table.
    short = frame.with_columns(function=pl.Series([short_kernel_name(n) for n in frame["name"]], dtype=pl.String()))
    section.chart("Longest kernels, by function", charts.bar_chart(short, "function", "sum_ns", color="class"))
    classes = joined(traces, kernel_classes)
    together = classes.with_columns(where=charts.PLACE, ms=pl.col("time_ns") / 1e6)
    section.chart("What ran together", charts.stacked(together, "where", "classes", "ms"))
    first = ["rank", "device", "name", "sum_ns", "share", "count"]
    ordered = frame.select(*first, *(c for c in frame.columns if c not in (*first, "class")), "class")
    section.table("Longest kernels", ordered.sort("sum_ns", descending=True), rows=25)
    section.table("What ran together", classes, rows=32)
    if len(traces) > 1:
        section.table("Across ranks", kernels_across_ranks(traces))
    if (filled := joined(traces, sm_efficiency)).height:
        section.table("How far they fill the device: estimated SM efficiency and occupancy", filled, rows=32)
        least = joined(traces, kernels_by_sm).sort("unused_ns", descending=True)
        section.table("Kernels that leave most of it unused", least)
    return section


def products(traces: list[Trace]) -> Section | None:
    table = joined(traces, product_table)
    if not table.height:
        return None
    limits = limits_of(traces[0])
    section = Section(
        "How near do products come to what the device can do?",
        "Matrix products, convolutions and attention whose shapes were recorded; bytes are the least to be moved. "
        + (
            "The roof is the device's data sheet: " if limits is not None
            else "The device's limits are not known: 'fettle trace flops' takes --peak and --bandwidth."
        )
        + (f"{limits.gb_per_s:,.0f} GB/s and up to {max(limits.tflop_per_s.values()):,.0f} TFLOP/s." if limits else ""),
    )  # fmt: skip
    if table["intensity"].null_count() < table.height:
        section.chart("Rate by intensity", charts.roofline_chart(table, limits))
    section.table("By operator", product_summary(table))
    section.table("By distinct shapes", table, rows=20)
    return section


def launches(traces: list[Trace]) -> Section | None:
    frame = joined(traces, launch_stats)
    if not frame.height:
        return None
    section = Section(
        "How was the work launched?",
        "Long delays mean that work queued behind other work (the device is busy); delays of a few microseconds with "
        "kernels shorter than their launch mean that the host cannot keep up: fuse, compile, or launch a graph.",
    )
    for caption, chart in charts.launch_charts(frame).items():
        section.chart(caption, charts.sized(chart, 180))
    section.table("Launch calls", call_table(frame), rows=20)
    return section


def communication(traces: list[Trace]) -> Section | None:
    hidden = joined(traces, overlap_of)
    if not hidden.height or hidden["communication_ns"].sum() == 0:
        return None
    section = Section("Communication", "Bandwidths of one rank include its waiting for the others: lower bounds.")
    parts = {"hidden_ns": "hidden communication", "exposed_ns": "exposed communication"}
    section.chart("Communication hidden behind compute", charts.split_bars(hidden, charts.PLACE, parts))
    each = joined(traces, collectives)
    if each.filter((pl.col("bytes") > 0) & (pl.col("bus_gb_per_s") > 0)).height:
        section.chart("Bus bandwidth by message size", charts.collective_chart(each))
    section.table("Hidden behind compute", hidden, rows=64)
    section.table("Collectives", joined(traces, collective_table))
    if len(traces) > 1:
        matched = match_collectives(traces)
        skews = arrival(traces, matched)
        if not skews.height:
            section.text += " No collective could be matched between the ranks: no stragglers, no skew."
            return section
        late = stragglers(traces, matched)
        who = late.with_columns(who=pl.format("rank {}: {}", "rank", "reason"))
        caption = "Waiting of the other ranks, by the rank that came last"
        section.chart(caption, charts.bar_chart(who, "who", "caused_ns"))
        section.chart("Arrival skew over time", charts.arrival_chart(skews))
        section.table("Who was waited for", late, rows=64, keep="rank")
        section.table("Largest arrival skews", skews.sort("skew_ns", descending=True).drop("key", "first_ns"))
        section.table("Clocks, aligned by the ends of shared collectives", clock_offsets(matched), rows=64)
    else:
        section.text += " Who waits for whom needs the traces of several ranks: give the folder."
    return section


def queues(traces: list[Trace]) -> Section | None:
    frame = joined(traces, queue_summary)
    copies = joined(traces, bandwidth_summary)
    if not frame.height and not copies.height:
        return None
    section = Section(
        "Queues and copies over time",
        "A device whose queue is often empty waits for the host. "
        "Depth: how long a queue can be, where launches waited for a slot in it.",
    )
    for trace in section.first(traces, SHOWN_RANKS, "ranks"):
        rank = f", rank {trace.rank}" if len(traces) > 1 else ""
        series = queue_length(trace)
        if series.height:
            section.chart(f"Queue length{rank}", charts.queue_chart(series))
        series = copy_bandwidth(trace)
        if series.height:
            section.chart(f"Bandwidth of copies{rank}", charts.bandwidth_chart(series))
    section.table("Queue length, weighted by time", frame, rows=32)
    section.table("Copies", copies)
    return section
