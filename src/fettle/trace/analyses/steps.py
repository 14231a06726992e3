"""The steps of a trace: `ProfilerStep#N` annotations, or the annotation that the caller names."""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from fettle.errors import UsageError
from fettle.trace.frames import frame_of, with_rank
from fettle.trace.intervals import Intervals
from fettle.trace.kinds import Kind
from fettle.trace.model import Trace, per_trace

_STEP = re.compile(r"^ProfilerStep#(\d+)$")


@per_trace
def steps(trace: Trace, annotation: str | None = None) -> pl.DataFrame:
    """The trace's steps in order.

    Columns: rank, step (its number), start_ns, end_ns (the next step's start; its own end for the last, and for all
    where the trace says `own_end`), wall_ns. Steps do not overlap. Without any, one row: step -1, the whole trace.

    Args:
        annotation: Take the annotations of exactly this name for steps, numbered from 0, instead of `ProfilerStep#N`.

    Raises:
        UsageError: There is no such annotation.
    """
    wanted = _marks(trace, annotation)
    codes = trace.column("name")
    rows = np.flatnonzero((trace.kind == Kind.ANNOTATION) & np.isin(codes, list(wanted)))
    if annotation is not None and not len(rows):
        names = {trace.names[c] for c in np.unique(codes[trace.kind == Kind.ANNOTATION]).tolist()}
        some = sorted(n for n in names if not _STEP.match(n))[:10]
        raise UsageError(f"no annotation '{annotation}' in {trace.path.name}: it has {', '.join(some) or 'none'}")
    rows = rows[np.argsort(trace.ts[rows], kind="stable")]
    # The same step can be annotated on several threads: the first one counts.
    marked: list[tuple[int, int, int]] = []
    for row in rows.tolist():
        number = wanted[int(codes[row])] if annotation is None else len(marked)
        start, end = int(trace.ts[row]), int(trace.end[row])
        again = marked and (start < marked[-1][2] or (annotation is None and number == marked[-1][0]))
        if not again and end > start:
            marked.append((number, start, end))
    frame = frame_of(marked or [(-1, *trace.span)], step=int, start_ns=int, end_ns=int)
    if annotation is None and not trace.own_end:
        frame = frame.with_columns(end_ns=pl.col("start_ns").shift(-1).fill_null(pl.col("end_ns")))
    return with_rank(trace, frame.with_columns(wall_ns=pl.col("end_ns") - pl.col("start_ns")))


def step_windows(trace: Trace, step: int | None = None) -> Intervals:
    """Where one step begins and ends, or each of all steps; the trace's whole span where none are marked.

    Raises:
        UsageError: There is no such step.
    """
    frame = steps(trace)
    if step is not None:
        known = frame["step"].to_list()
        frame = frame.filter(pl.col("step") == step)
        if not frame.height:
            known_steps = f"it has {known[0]} to {known[-1]}" if known[-1] >= 0 else "no steps are marked in it"
            raise UsageError(f"no step {step} in {trace.path.name}: {known_steps}")
    return frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()


@per_trace
def step_thread(trace: Trace) -> int:
    """The thread whose annotations mark the steps; -1 where there are none."""
    codes = trace.column("name")
    rows = np.flatnonzero((trace.kind == Kind.ANNOTATION) & np.isin(codes, list(_marks(trace, None))))
    return int(trace.column("thread")[rows[np.argmin(trace.ts[rows])]]) if len(rows) else -1


def _marks(trace: Trace, annotation: str | None) -> dict[int, int]:
    """Name numbers that mark steps, with the steps' numbers (-1: they are counted)."""
    if annotation is not None:
        return {code: -1 for code, name in enumerate(trace.names) if name == annotation}
    matches = ((code, _STEP.match(name)) for code, name in enumerate(trace.names))
    return {code: int(match.group(1)) for code, match in matches if match and len(match.group(1)) < 18}


def step_summary(frame: pl.DataFrame) -> dict[str, float | int | list[int]]:
    """Median, spread, outliers and drift of steps' wall times.

    Returns median_ns, mad_ns (median absolute deviation), outliers (steps further than 5 scaled MADs, 1.4826 x MAD
    being a standard deviation for normal data, and than 2% of the median), drift_ns_per_step (Theil-Sen: the median
    slope of all pairs) and drift_is_clear (Kendall's S beyond 1.96 of its standard deviation; needs 5 steps).
    """
    wall = frame["wall_ns"].to_numpy().astype(np.float64)
    median = float(np.median(wall))
    mad = float(np.median(np.abs(wall - median)))
    far = np.abs(wall - median) > max(5 * 1.4826 * mad, 0.02 * median)
    outliers = frame["step"].to_numpy()[far].tolist() if len(wall) > 2 else []
    spacing = max(1, len(wall) // 1000)
    sample = wall[::spacing]
    i, j = np.triu_indices(len(sample), 1)
    slopes = (sample[j] - sample[i]) / ((j - i) * spacing) if len(i) else np.zeros(1)
    n = len(sample)
    s = float(np.sign(sample[j] - sample[i]).sum()) if len(i) else 0.0
    deviation = (n * (n - 1) * (2 * n + 5) / 18) ** 0.5
    return {
        "steps": len(wall),
        "median_ns": median,
        "mad_ns": mad,
        "outliers": outliers,
        "drift_ns_per_step": float(np.median(slopes)),
        "drift_is_clear": bool(n >= 5 and abs(s) > 1.96 * deviation),
    }
