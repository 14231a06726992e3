"""Decoded columns to a `Trace`: steps by their names, no events from another age, and which rank it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fettle.trace.io.decode import Columns
from fettle.trace.io.fields import say
from fettle.trace.kinds import DEVICE_KINDS, HOST_KINDS, Kind
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
    # Old traces know a step only by its name; new ones call it an annotation.
    steps = [code for name, code in columns.names.items() if name.startswith("ProfilerStep#")]
    names, kinds = data["name"].to_numpy(), data["kind"].to_numpy()
    marks = np.isin(names, steps) & (kinds == Kind.OPERATOR)
    data["kind"] = pl.Series(np.where(marks, np.uint8(Kind.ANNOTATION), kinds), dtype=pl.UInt8())
    events, side, outliers = _drop_outliers(pl.DataFrame(data), side)
    facts = columns.facts
    facts.absurd_times += outliers
    facts.unknown_categories = sorted(set(facts.unknown_categories))
    facts.notes = list(dict.fromkeys(facts.notes))
    return Trace(
        path=path,
        rank=_rank(path, metadata),
        events=events,
        names=[say(name) for name in columns.names],
        threads=list(columns.threads.texts),
        shapes=[b"".join(s.split()).decode("utf-8", "replace") for s in columns.shapes],
        side=side,
        metadata=metadata,
        thread_names=columns.thread_names,
        facts=facts,
    )


def _drop_outliers(
    events: pl.DataFrame, side: dict[str, pl.DataFrame]
) -> tuple[pl.DataFrame, dict[str, pl.DataFrame], int]:
    """Drop events whose clock is more than a week from the trace's median: overflown device clocks, not work."""
    work, ts = _IS_WORK[events["kind"].to_numpy()], events["ts_ns"].to_numpy()
    if not work.any() or int(ts.max()) - int(ts.min()) <= _WEEK_NS:
        return events, side, 0
    far = np.abs(ts - np.int64(np.median(ts[work]))) > _WEEK_NS
    moved = np.cumsum(~far) - 1
    kept = {}
    for table, frame in side.items():
        if "row" in frame.columns and frame.height:
            rows = frame["row"].to_numpy()
            stays = ~far[rows]
            frame = frame.filter(pl.Series(stays)).with_columns(row=pl.Series(moved[rows[stays]], dtype=pl.Int64()))
        kept[table] = frame
    return events.filter(pl.Series(~far)), kept, int(far.sum())


_RANK_IN_NAME = re.compile(r"rank[_\-.]?(\d{1,6})", re.IGNORECASE)


def _rank(path: Path, metadata: dict[str, Any]) -> int:
    info = metadata.get("distributedInfo")
    recorded = info.get("rank") if isinstance(info, dict) else None
    if isinstance(recorded, int) and 0 <= recorded < 10**7:
        return int(recorded)
    match = _RANK_IN_NAME.search(path.name)
    return int(match.group(1)) if match else 0
