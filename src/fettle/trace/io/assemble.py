"""Decoded columns to a `Trace`: one number a thread, no events from another age, and which rank it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fettle.trace.io.decode import Columns, Interner
from fettle.trace.kinds import DEVICE_KINDS, HOST_KINDS
from fettle.trace.model import EVENT_COLUMNS, SIDE_TABLES, Trace

_WEEK_NS = 7 * 86_400 * 10**9
_IS_WORK = np.isin(np.arange(256), [*HOST_KINDS, *DEVICE_KINDS])


def assemble(path: Path, columns: Columns, metadata: dict[str, Any]) -> Trace:
    """The trace of all decoded columns; lets go of them as it goes."""
    data = {}
    for name, dtype in EVENT_COLUMNS.items():
        # Column by column, letting go of the pieces, so that the peak is the columns plus one of them.
        arrays = [chunk.pop(name) for chunk in columns.chunks]
        values = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        data[name] = pl.Series(name, values, dtype=dtype)
    collected = columns.side.settled()
    side = {
        table: pl.concat(collected[table]) if table in collected else pl.DataFrame(schema=schema)
        for table, schema in SIDE_TABLES.items()
    }
    threads = _unify_threads(columns, data, side)
    events = pl.DataFrame(data)
    events, side, outliers = _drop_outliers(events, side)
    facts = columns.facts
    facts.absurd_times += outliers
    facts.unknown_categories = sorted(set(facts.unknown_categories))
    facts.notes = list(dict.fromkeys(facts.notes))
    return Trace(
        path=path,
        rank=_rank(path, metadata),
        events=events,
        names=[_clean(n) for n in columns.names],
        threads=threads,
        shapes=[b"".join(s.split()).decode("utf-8", "replace") for s in columns.shapes],
        side=side,
        metadata=metadata,
        thread_names=columns.thread_names,
        facts=facts,
    )


def _unify_threads(
    columns: Columns, data: dict[str, pl.Series], side: dict[str, pl.DataFrame]
) -> list[tuple[str, str]]:
    """One number a thread, whether its id was written as a number or as text; returns (process, thread) by number."""
    unified = Interner()
    code = np.array([unified[(_clean(str(p)), _clean(str(t)))] for p, t in columns.threads], dtype=np.int32)
    if len(unified) != len(columns.threads):
        data["thread"] = pl.Series("thread", code[data["thread"].to_numpy()], dtype=pl.Int32())
        memory = side["memory"]
        if memory.height:
            side["memory"] = memory.with_columns(thread=pl.Series(code[memory["thread"].to_numpy()], dtype=pl.Int32()))
    return list(unified)


def _drop_outliers(
    events: pl.DataFrame, side: dict[str, pl.DataFrame]
) -> tuple[pl.DataFrame, dict[str, pl.DataFrame], int]:
    """Drop events whose clock is more than a week from the trace's median: overflown device clocks, not work."""
    work = _IS_WORK[events["kind"].to_numpy()]
    if not work.any():
        return events, side, 0
    ts = events["ts_ns"].to_numpy()
    if int(ts.max()) - int(ts.min()) <= _WEEK_NS:
        return events, side, 0
    far = np.abs(ts - np.int64(np.median(ts[work]))) > _WEEK_NS
    if not far.any():
        return events, side, 0
    moved = np.cumsum(~far) - 1
    kept = {}
    for table, frame in side.items():
        if "row" in frame.columns and frame.height:
            rows = frame["row"].to_numpy()
            stays = ~far[rows]
            frame = frame.filter(pl.Series(stays)).with_columns(row=pl.Series(moved[rows[stays]], dtype=pl.Int64()))
        kept[table] = frame
    return events.filter(pl.Series(~far)), kept, int(far.sum())


def _clean(name: str) -> str:
    return name.encode("utf-8", "replace").decode()


_RANK_IN_NAME = re.compile(r"rank[_\-.]?(\d{1,6})", re.IGNORECASE)


def _rank(path: Path, metadata: dict[str, Any]) -> int:
    info = metadata.get("distributedInfo")
    recorded = info.get("rank") if isinstance(info, dict) else None
    if isinstance(recorded, int) and 0 <= recorded < 10**7:
        return recorded
    match = _RANK_IN_NAME.search(path.name)
    return int(match.group(1)) if match else 0
