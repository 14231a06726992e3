"""Ask your own: SQL over the frames of a trace."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import polars as pl

from fettle.errors import UsageError
from fettle.trace.analyses.account import time_account
from fettle.trace.analyses.attribution import attribute_kernels
from fettle.trace.analyses.communication import collectives
from fettle.trace.analyses.idle import idle_pieces
from fettle.trace.analyses.kernels import kernel_table
from fettle.trace.analyses.launches import launch_stats
from fettle.trace.analyses.memory_timeline import memory_timeline
from fettle.trace.analyses.operators import operator_table
from fettle.trace.analyses.queue import queue_length
from fettle.trace.analyses.steps import steps
from fettle.trace.frames import frame_of, names_of_rows, with_rank
from fettle.trace.kinds import Kind
from fettle.trace.model import Trace


def events_frame(trace: Trace) -> pl.DataFrame:
    """All events with their text: rank, row, ts_ns, dur_ns, name, kind, process, thread, device, stream, correlation
    and shapes."""
    kinds = pl.Series([k.name.lower() for k in Kind], dtype=pl.String())
    process = pl.Series([p for p, _ in trace.threads], dtype=pl.String())
    thread = pl.Series([t for _, t in trace.threads], dtype=pl.String())
    events = trace.events
    columns = {
        "row": pl.int_range(events.height, eager=True),
        **{name: events[name] for name in ("ts_ns", "dur_ns")},
        "name": names_of_rows(trace, np.arange(events.height)),
        "kind": kinds.gather(events["kind"].cast(pl.UInt32())),
        "process": process.gather(events["thread"].cast(pl.UInt32())),
        "thread": thread.gather(events["thread"].cast(pl.UInt32())),
        **{name: events[name] for name in ("device", "stream", "correlation")},
        "shapes": pl.Series(trace.shapes, dtype=pl.String()).gather(events["shape"]),
    }
    return with_rank(trace, pl.DataFrame(columns))


def _idle(trace: Trace) -> pl.DataFrame:
    parts = [
        idle_pieces(trace, d).with_columns(device=pl.lit(d), cause=pl.col("cause").cast(pl.String()))
        for d in trace.device_keys
    ]
    return with_rank(trace, pl.concat(parts) if parts else frame_of([], start_ns=int, end_ns=int, cause=str))


TABLES: dict[str, Callable[[Trace], pl.DataFrame]] = {
    "events": events_frame,
    "steps": steps,
    "account": time_account,
    "idle": _idle,
    "kernels": kernel_table,
    "launches": launch_stats,
    "work": attribute_kernels,
    "operators": operator_table,
    "collectives": collectives,
    "queue": queue_length,
    "memory": memory_timeline,
}


_QUOTED = re.compile(r"""'[^']*'|"([^"]*)\"""")
_ODD = re.compile(r"--|/\*|[\\$`]")
"""Comments and other quotes: beside these nothing is taken for a text."""
_READS = re.compile(r"\bread_(\w+\s*\(|(csv|ipc|json|ndjson|parquet)\b)", re.IGNORECASE)


def query(traces: list[Trace], text: str) -> pl.DataFrame:
    """Run one SQL query over the tables named in `TABLES`; all ranks are in each table. Tables that the text names
    are computed.

    Raises:
        UsageError: The query does not parse, or names what is not there.
    """
    if not re.match(r"\s*(select|with)\b", text, re.IGNORECASE):
        raise UsageError("only queries: select ... from ... (or with ... select ...)")
    if _READS.search(text if _ODD.search(text) else _QUOTED.sub(r"\1 ", text)):
        raise UsageError(f"only the trace is read: tables {', '.join(TABLES)}")
    named = [name for name in TABLES if name in text.lower()]
    frames = {name: pl.concat([TABLES[name](t) for t in traces], how="diagonal_relaxed") for name in named}
    try:
        result = pl.SQLContext(frames, eager=True).execute(text)
    except (pl.exceptions.PolarsError, ValueError, TypeError) as error:
        raise UsageError(
            f"cannot run this query: {str(error).splitlines()[0]} (tables: {', '.join(TABLES)})"
        ) from error
    return result if isinstance(result, pl.DataFrame) else result.collect()
