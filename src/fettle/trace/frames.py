"""How answers become frames: rows under typed columns, names of events, and the rank in front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl

from fettle.trace.model import Ints, Trace


def frame_of(rows: Sequence[Sequence[Any]], **columns: type) -> pl.DataFrame:
    """Rows under named columns of plain types, which an empty frame has too."""
    return pl.DataFrame(rows, schema=columns, orient="row")


def with_rank(trace: Trace, frame: pl.DataFrame) -> pl.DataFrame:
    """The frame with the trace's rank as its first column."""
    return frame.select(pl.lit(trace.rank, dtype=pl.Int64()).alias("rank"), pl.all())


def names_of_rows(trace: Trace, rows: Ints) -> pl.Series:
    """The names of events by row, each text stored once; null for -1."""
    known = rows >= 0
    codes = np.zeros(len(rows), dtype=np.uint32)
    codes[known] = trace.column("name")[rows[known]]
    return pl.Series(trace.names, dtype=pl.String()).gather(pl.Series(codes).set(pl.Series(~known), None))


def joined(traces: Sequence[Trace], analysis: Callable[[Trace], pl.DataFrame]) -> pl.DataFrame:
    """The answers for all traces in one frame."""
    return pl.concat([analysis(trace) for trace in traces], how="vertical_relaxed")
