"""Write the trace again with what was found, for Perfetto or chrome://tracing: counters, and the critical path."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from fettle.errors import UsageError
from fettle.files import whole
from fettle.trace.analyses.critical import CriticalPath
from fettle.trace.analyses.queue import copy_bandwidth, queue_length
from fettle.trace.io.stream import Counted, find_start, text_of
from fettle.trace.model import Trace

MAX_POINTS = 1_000_000


def augment(trace: Trace, target: Path, *, path: CriticalPath | None = None) -> int:
    """Copy the trace to `target` with counters of queue length and copy bandwidth, and the critical path, if any: as
    JSON, compressed where the name ends in `.gz`.

    Returns the number of added events. The source is copied as it is, byte for byte, around the added events.

    Raises:
        UsageError: `target` is the trace itself, or the trace's event list was not found.
    """
    if target.exists() and target.resolve() == trace.path.resolve():
        raise UsageError("the augmented trace must not overwrite the trace")
    added = 0
    with (
        trace.path.open("rb") as file,
        whole(target) as partial,
        gzip.open(partial, "wb") if target.suffix == ".gz" else partial.open("wb") as out,
    ):
        source = Counted(text_of(file))
        head, beyond = find_start(source)
        out.write(head)
        for event in _events(trace, path):
            out.write(json.dumps(event).encode() + b",\n")
            added += 1
        out.write(beyond)
        while block := source.read():
            out.write(block)
    return added


def _events(trace: Trace, path: CriticalPath | None) -> Iterator[dict[str, Any]]:
    lengths = queue_length(trace).with_columns(name=pl.format("queue length, stream {}", "stream"))
    rates = copy_bandwidth(trace).with_columns(pl.col("gb_per_s").round(3))
    for frame, column, unit in ((lengths, "length", "length"), (rates, "gb_per_s", "GB/s")):
        points = frame.select("name", "device", "ts_ns", column).gather_every(max(1, -(-frame.height // MAX_POINTS)))
        for name, device, ts, value in points.iter_rows():
            yield {"ph": "C", "name": name, "pid": f"fettle: device {device}", "ts": ts / 1000, "args": {unit: value}}
    for row in path.pieces.iter_rows(named=True) if path is not None else ():
        name = trace.names[int(trace.events["name"][row["row"]])] if row["row"] >= 0 else row["category"]
        yield {
            "ph": "X",
            "cat": "critical_path",
            "name": name,
            "pid": "fettle: critical path",
            "tid": row["place"],
            "ts": row["start_ns"] / 1000,
            "dur": (row["end_ns"] - row["start_ns"]) / 1000,
            "args": {"category": row["category"], "event row": row["row"]},
        }
