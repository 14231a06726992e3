"""The host's side: operators and where they come from, threads, small operators, conversions, data loading."""

from __future__ import annotations

import polars as pl

from fettle.trace.analyses import host as host_side
from fettle.trace.analyses.attribution import attribute_kernels, work_by
from fettle.trace.analyses.host import host_summary, parallel_operators, threads
from fettle.trace.analyses.operators import (
    annotation_table,
    call_blocks,
    counter_sums,
    counters_by_operator,
    kernel_sequences,
    operator_table,
)
from fettle.trace.analyses.stacks import CAUSES_OF_HOST
from fettle.trace.frames import joined
from fettle.trace.model import Trace
from fettle.trace.report import charts
from fettle.trace.report.section import Section


def operators(traces: list[Trace]) -> Section | None:
    table = joined(traces, operator_table)
    if not table.height:
        return None
    device = any(t.device_keys for t in traces)
    cost = "device_ns" if device else "self_ns"
    section = Section(
        "Which operators and lines is it?",
        "Self time is an operator's own, without what it calls. "
        + ("Device time is of the kernels that it launched itself." if device else ""),
    )
    section.chart(f"{'Device' if device else 'Self'} time by operator", charts.bar_chart(table, "operator", cost))
    flame = call_blocks(traces, device)
    if flame.height:
        caption = f"Calls merged by path, as wide as their {'device' if device else 'host'} time"
        section.chart(caption, charts.blocks(flame, "milliseconds"))
    shown = table.sort(cost, "host_ns", descending=True)
    section.table("Operators", shown if device else shown.drop("device_ns", "kernels"), rows=20)
    work = joined(traces, attribute_kernels)
    captions = {
        "module": "Modules",
        "line": "Source lines",
        "forward_operator": "Backward work, by forward operator",
        "generated": "Generated kernels, by their graph's file",
    }
    for column, caption in captions.items():
        share = pl.col("device_ns") / max(int(work["duration_ns"].sum()), 1)
        section.table(caption, work_by(work, column).drop_nulls(column).with_columns(share=share), rows=12)
    top = table.filter(pl.col("kernels") >= 3).sort("device_ns", descending=True)
    if top.height:
        name = str(top["operator"][0])
        sequences = joined(traces, lambda t: kernel_sequences(t, name, top=6))
        section.table(f"Kernels in a row under {name}", sequences, rows=12)
    annotated = joined(traces, annotation_table)
    section.table("Annotations", annotated if device else annotated.drop("^device_.*$", "kernels"), rows=12)
    counted = [c for t in traces if (c := counters_by_operator(t)) is not None]
    if counted:
        section.table("Hardware counters by operator", counter_sums(pl.concat(counted), "rank"))
    return section


def host(traces: list[Trace]) -> Section:
    section = Section(
        "The host", "Time of each thread is that of its innermost event; questions do not exclude each other."
    )
    used = joined(traces, threads)
    if used.height:
        where = pl.format("rank {}, {}", "rank", "label") if len(traces) > 1 else pl.col("label")
        causes = {f"{cause}_ns": cause for cause in CAUSES_OF_HOST}
        section.chart("What the threads did", charts.split_bars(used.head(10), where, causes))
    together = joined(traces, parallel_operators).filter(pl.col("time_ns") > 0)
    if together.height:
        at_once = pl.format("{} at once", "threads")
        label = pl.when(pl.col("threads") == 0).then(pl.lit("no thread in an operator")).otherwise(at_once)
        shown = charts.bar_chart(together.with_columns(label=label), "label", "time_ns")
        section.chart("Threads inside operators", shown)
    sizes = joined(traces, host_side.operator_sizes)
    if sizes.height:
        summed = sizes.group_by("power").agg(pl.col("count", "time_ns").sum()).sort("power")
        section.chart("Innermost operators by their length", charts.size_chart(summed))
    section.table("Questions of a slow host", joined(traces, host_summary), rows=40)
    section.table("Small operators", joined(traces, host_side.small_operators), rows=10)
    section.table("Conversions and copies", joined(traces, host_side.conversions), rows=10)
    section.table("Data loading", joined(traces, host_side.data_loading), rows=10)
    wanted = ("rank", "label", "events", "busy_ns", "busy_share", "operators_ns")
    section.table("Threads", used.select(wanted), rows=16)
    return section
