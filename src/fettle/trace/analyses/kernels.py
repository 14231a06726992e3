"""Which kernels took the time, with statistics over their launches."""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.trace.analyses.account import device_classes
from fettle.trace.analyses.launches import launch_rows
from fettle.trace.frames import frame_of, names_of_rows, with_rank
from fettle.trace.intervals import combinations
from fettle.trace.kinds import Kind
from fettle.trace.model import Ints, Trace

CLASSES = ("compute", "communication", "copy")
SHORT_NS = 10_000


def class_of_row(trace: Trace, rows: Ints) -> Ints:
    """0 compute, 1 communication, 2 copy or memory set, for rows of device work."""
    kind = trace.kind[rows]
    return np.where(kind == Kind.KERNEL, np.where(trace.is_collective[rows], 1, 0), 2).astype(np.int64)


def class_names(trace: Trace, rows: Ints) -> pl.Series:
    """The same in words."""
    return pl.Series(CLASSES).gather(class_of_row(trace, rows))


def kernel_classes(trace: Trace) -> pl.DataFrame:
    """Device time by what ran together: exclusive combinations of compute, communication and copies.

    Columns: rank, device, classes (such as `compute+communication`), time_ns, share (of the device's busy time).
    """
    parts = []
    for device in trace.device_keys:
        lengths = combinations(dict(zip(CLASSES, device_classes(trace, device), strict=True)))
        busy = sum(lengths.values()) or 1
        parts += [(trace.rank, device, "+".join(names), ns, ns / busy) for names, ns in lengths.items()]
    frame = frame_of(parts, rank=int, device=int, classes=str, time_ns=int, share=float)
    return frame.sort("rank", "device", "time_ns", descending=[False, False, True])


def kernel_table(trace: Trace) -> pl.DataFrame:
    """One row a kernel name and device, longest first.

    Columns: rank, device, name, class, count, sum_ns, share (of the summed device work of that device), mean_ns,
    median_ns, std_ns (of the launches; 0 for one), min_ns, max_ns, short (launches under 10 us), call_ns (mean launch
    call), delay_ns (median from the end of the launch call to the start).
    """
    rows, launch = trace.device_rows, launch_rows(trace)
    linked = pl.col("linked")
    frame = pl.DataFrame(
        {
            "device": trace.column("device")[rows].astype(np.int64),
            "name": names_of_rows(trace, rows),
            "class": class_names(trace, rows),
            "dur": trace.dur[rows],
            "linked": launch >= 0,
            "call_ns": trace.dur[launch],
            "delay_ns": trace.ts[rows] - trace.end[launch],
        }
    )
    dur = pl.col("dur")
    table = (
        frame.group_by("device", "name", "class")
        .agg(
            count=pl.len(),
            sum_ns=dur.sum(),
            mean_ns=dur.mean(),
            median_ns=dur.median(),
            std_ns=dur.std().fill_null(0.0),
            min_ns=dur.min(),
            max_ns=dur.max(),
            short=(dur < SHORT_NS).sum(),
            call_ns=pl.col("call_ns").filter(linked).mean(),
            delay_ns=pl.col("delay_ns").filter(linked).median(),
        )
        .with_columns(share=pl.col("sum_ns") / pl.col("sum_ns").sum().over("device"))
        .sort("sum_ns", "name", descending=[True, False])
    )
    columns = ("device", "name", "class", "count", "sum_ns", "share")
    return with_rank(trace, table.select(*columns, pl.exclude(*columns)))


def kernels_across_ranks(traces: list[Trace]) -> pl.DataFrame:
    """Each kernel name over all ranks.

    Columns: name, class, ranks, count, sum_ns, min_rank_ns and max_rank_ns (the smallest and largest sum of a rank),
    spread (their ratio), slowest_rank.
    """
    table = pl.concat([kernel_table(t) for t in traces])
    by_rank = table.group_by("name", "class", "rank").agg(pl.col("sum_ns").sum(), pl.col("count").sum())
    return (
        by_rank.group_by("name", "class")
        .agg(
            ranks=pl.len(),
            count=pl.col("count").sum(),
            min_rank_ns=pl.col("sum_ns").min(),
            max_rank_ns=pl.col("sum_ns").max(),
            slowest_rank=pl.col("rank").sort_by("sum_ns").last(),
            sum_ns=pl.col("sum_ns").sum(),
        )
        .with_columns(spread=pl.col("max_rank_ns") / pl.col("min_rank_ns"))
        .sort("sum_ns", "name", descending=[True, False])
    )
