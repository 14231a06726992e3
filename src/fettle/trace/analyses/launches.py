"""Which host call launched which device work, and how long the work then waited.

Calls and work are tied by the profiler's correlation number. Every runtime or driver call counts that has work of its
number: kernel launches of any API, copies, memory sets, and graphs, where one call starts hundreds of kernels.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.trace.frames import names_of_rows
from fettle.trace.kinds import Kind, is_graph_launch
from fettle.trace.model import Ints, Trace, per_trace
from fettle.trace.ordering import last_before, order_by

LONG_CALL_NS = 50_000
LATE_NS = 100_000


@per_trace
def launch_rows(trace: Trace) -> Ints:
    """By device work in order of its start, the row of its launch: the last call before it; -1 for none."""
    device_rows = trace.device_rows
    correlation = trace.column("correlation")
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & (correlation > 0))
    calls = calls[order_by(correlation[calls], trace.ts[calls])]
    numbers = correlation[calls]
    wanted = correlation[device_rows]
    left, right = np.searchsorted(numbers, wanted), np.searchsorted(numbers, wanted, side="right")
    launch = np.where((right > left) & (wanted > 0), np.append(calls, -1)[left], -1)
    several = np.flatnonzero((launch >= 0) & (right - left > 1))
    if len(several):
        last = last_before(numbers, trace.ts[calls], wanted[several], trace.ts[device_rows[several]])
        launch[several] = calls[np.where(last >= 0, last, left[several])]
    return launch


def launched_work(trace: Trace) -> tuple[Ints, Ints]:
    """The work whose launch is known, and those launches, row by row."""
    launch = launch_rows(trace)
    return trace.device_rows[launch >= 0], launch[launch >= 0]


def launch_stats(trace: Trace) -> pl.DataFrame:
    """One row a piece of device work with a known launch.

    Columns: rank, device, stream, row, call_row, name, call, graph (bool), call_ns (length of the launch call),
    duration_ns (of the work), delay_ns (end of the call to start of the work; negative: it started inside the call, or
    clocks differ), short (bool: the work is shorter than the call that launched it; null for graphs).
    """
    rows, calls = launched_work(trace)
    frame = pl.DataFrame(
        {
            "rank": np.full(len(rows), trace.rank),
            "device": trace.column("device")[rows],
            "stream": trace.column("stream")[rows],
            "row": rows,
            "call_row": calls,
            "name": names_of_rows(trace, rows),
            "call": names_of_rows(trace, calls),
            "graph": trace.named(is_graph_launch, calls),
            "call_ns": trace.dur[calls],
            "duration_ns": trace.dur[rows],
            "delay_ns": trace.ts[rows] - trace.end[calls],
        }
    )
    return frame.with_columns(short=pl.when(~pl.col("graph")).then(pl.col("duration_ns") < pl.col("call_ns")))


def call_table(launches: pl.DataFrame) -> pl.DataFrame:
    """`launch_stats` by launch call.

    Columns: rank, call, graph, calls, work (pieces of device work), calls_ns (sum of the calls), median_call_ns,
    median_delay_ns, short (pieces shorter than their call), long_calls (over `LONG_CALL_NS`), late (pieces that start
    more than `LATE_NS` after their call). Longest sum first. A graph's call counts once.
    """
    once = pl.col("call_ns").filter(pl.col("call_row").is_first_distinct())
    return (
        launches.group_by("rank", "call", "graph")
        .agg(
            calls=pl.col("call_row").n_unique(),
            work=pl.len(),
            calls_ns=once.sum(),
            median_call_ns=once.median(),
            median_delay_ns=pl.col("delay_ns").median(),
            short=pl.col("short").sum(),
            long_calls=(once > LONG_CALL_NS).sum(),
            late=(pl.col("delay_ns") > LATE_NS).sum(),
        )
        .sort("calls_ns", "call", descending=[True, False])
    )
