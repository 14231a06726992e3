"""How far kernels fill the device: estimated SM efficiency, as PyTorch's TensorBoard plugin has it, and occupancy.

A kernel with fewer blocks than the device has multiprocessors leaves some of them empty, however long it runs: its SM
efficiency is its blocks for each of them, at most 1. Both numbers are the profiler's, from how a kernel was launched.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.trace.analyses.steps import step_windows
from fettle.trace.frames import frame_of, names_of_rows, with_rank
from fettle.trace.intervals import length_within, levels, merge, split, total
from fettle.trace.model import Trace, per_trace


@per_trace
def _launches(trace: Trace) -> pl.DataFrame:
    """Kernels whose launch was recorded: row, device, name, dur, blocks_per_sm, occupancy (0 to 1)."""
    found = trace.side["launches"]
    rows = found["row"].to_numpy()
    return found.with_columns(
        pl.col("occupancy") / 100,
        device=pl.Series(trace.column("device")[rows].astype(np.int64)),
        name=names_of_rows(trace, rows),
        dur=pl.Series(trace.dur[rows]),
    )


def sm_efficiency(trace: Trace) -> pl.DataFrame:
    """How far each device's multiprocessors were in use during the steps.

    Columns: rank, device, kernel_share (of the steps' time, that in which a kernel ran), sm_share (of the steps' time
    of all multiprocessors, that in which a block ran on them, as estimated: kernels that run together add up, to 1 at
    most), occupancy_share (the estimated occupancy of a multiprocessor, a mean over the kernels' time). Empty where the
    trace does not have the blocks of each multiprocessor: those of AMD's GPUs and old ones.
    """
    found, windows, answers = _launches(trace), step_windows(trace), []
    wall = max(total(windows), 1)
    for device in found["device"].unique().sort():
        own = found.filter(pl.col("device") == device)
        rows = own["row"].to_numpy()
        pieces, level = levels(trace.ts[rows], trace.end[rows], own["blocks_per_sm"].to_numpy())
        start, end, piece, _ = split(pieces, windows)
        running = merge(trace.ts[rows], trace.end[rows])
        filled = float(((end - start) * np.clip(level, 0.0, 1.0)[piece]).sum())
        occupancy = own.select(_over_time("occupancy")).item()
        answers.append((device, int(length_within(running, *windows).sum()) / wall, filled / wall, occupancy))
    shares = dict.fromkeys(("kernel_share", "sm_share", "occupancy_share"), float)
    return with_rank(trace, frame_of(answers, device=int, **shares))


def kernels_by_sm(trace: Trace) -> pl.DataFrame:
    """The same of each kernel name and device, first those that leave most of the device's time unused.

    Columns: rank, device, name, count, sum_ns, unused_ns (of the device, while they ran), sm_share, occupancy_share,
    blocks_per_sm (means over their time). Empty where `sm_efficiency` is.
    """
    found = _launches(trace).with_columns(sm=pl.col("blocks_per_sm").clip(upper_bound=1.0))
    table = (
        found.group_by("device", "name")
        .agg(
            count=pl.len(),
            sum_ns=pl.col("dur").sum(),
            unused_ns=((1 - pl.col("sm")) * pl.col("dur")).sum().round().cast(pl.Int64()),
            sm_share=_over_time("sm"),
            occupancy_share=_over_time("occupancy"),
            blocks_per_sm=_over_time("blocks_per_sm"),
        )
        .sort("unused_ns", "sum_ns", "name", descending=[True, True, False])
    )
    return with_rank(trace, table)


def _over_time(column: str) -> pl.Expr:
    """Its mean over the time of the kernels that have it."""
    spent = pl.col("dur").filter(pl.col(column).is_not_null()).sum()
    return pl.when(spent > 0).then((pl.col(column) * pl.col("dur")).sum() / spent)
