"""Sparse facts of events, collected chunk by chunk into the side tables of `fettle.trace.model`."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fettle.trace.costs import OPERATORS
from fettle.trace.io.fields import integer, integers, number, say, stream_number, to_array
from fettle.trace.kinds import Kind
from fettle.trace.model import SIDE_TABLES, ReadFacts

_FRAME_PIECES = 100
_MOST_CHARS = {"file": 1000, "stack": 8192, "collective": 100, "group": 100, "dtype": 40, "sync": 100}
_MOST_BYTES = 4096


class SideTables:
    """Grows the side tables. Pieces become a frame only now and then: a frame costs more than a chunk's few rows."""

    def __init__(self, facts: ReadFacts) -> None:
        self.facts = facts
        self.frames: dict[str, list[pl.DataFrame]] = {}
        self._pieces: dict[str, list[dict[str, Any]]] = {}

    def put(self, table: str, **values: list[Any]) -> None:
        """Append rows, given column by column."""
        if len(next(iter(values.values()))):
            pieces = self._pieces.setdefault(table, [])
            pieces.append(values)
            if len(pieces) >= _FRAME_PIECES:
                self._settle(table)

    def _settle(self, table: str) -> None:
        pieces = self._pieces.pop(table)
        columns = {name: list(itertools.chain.from_iterable(piece[name] for piece in pieces)) for name in pieces[0]}
        self.frames.setdefault(table, []).append(pl.DataFrame(columns, schema=SIDE_TABLES[table], strict=False))

    def settled(self) -> dict[str, list[pl.DataFrame]]:
        """All rows so far as frames, by table."""
        for table in list(self._pieces):
            self._settle(table)
        return self.frames

    def of_chunk(
        self,
        args: list[Any],
        names: list[str],
        kind: npt.NDArray[np.uint8],
        operators: list[int],
        chunk: bytes,
        base: int,
    ) -> None:
        """What the complete events of one chunk say; `base` is the row of the first one."""
        numbers = integers([args[i].sequence for i in operators])
        has = np.flatnonzero(numbers >= 0)
        rows = np.array(operators, dtype=np.int64)[has] + base
        self.put("autograd", row=rows.tolist(), sequence=numbers[has].tolist())
        # One pass finds the few operators that have any of the rare facts.
        rare = [
            i for i in operators if (a := args[i]).stack is not None or a.collective is not None or a.file is not None
        ]
        self._arguments("generated", [i for i in rare if args[i].file], args, base)
        self._arguments("stacks", [i for i in rare if args[i].stack], args, base)
        products = [i for i in operators if names[i] in OPERATORS]
        inputs = {
            name: [bytes(getattr(args[i], name))[:_MOST_BYTES].decode("utf-8", "replace") for i in products]
            for name in ("types", "values")
        }
        self.put("products", row=[base + i for i in products], **inputs)
        copies = np.flatnonzero((kind == Kind.MEMCPY) | (kind == Kind.MEMSET)).tolist()
        copies = [i for i in copies if args[i].bytes is not None or args[i].gb_per_s is not None]
        self._arguments("copies", copies, args, base)
        kernels = np.flatnonzero(kind == Kind.KERNEL).tolist()
        blocks = to_array([args[i].blocks for i in kernels])
        launched = np.flatnonzero(blocks >= 0)  # -1: not known to the profiler
        self.put(
            "launches",
            row=[base + kernels[i] for i in launched.tolist()],
            blocks_per_sm=blocks[launched].tolist(),
            occupancy=[args[kernels[i]].occupancy for i in launched.tolist()],
        )
        collectives = [i for i in (*rare, *kernels) if args[i].collective is not None]
        self._arguments("collectives", collectives, args, base)
        self._arguments("syncs", np.flatnonzero(kind == Kind.SYNC).tolist(), args, base)
        ranges = np.flatnonzero(kind == Kind.COUNTER_RANGE)
        if len(ranges):
            self._counters(chunk, ranges, base)

    def _arguments(self, table: str, some: list[int], args: list[Any], base: int) -> None:
        """What some events say, in a table whose columns are named as their arguments are."""
        columns: dict[str, list[Any]] = {"row": [base + i for i in some]}
        for name, dtype in itertools.islice(SIDE_TABLES[table].items(), 1, None):
            values = [getattr(args[i], name) for i in some]
            if dtype == pl.String():
                columns[name] = ["" if value is None else say(value, _MOST_CHARS[name]) for value in values]
            elif name == "wait_on_stream":
                columns[name] = list(map(stream_number, values))
            else:
                columns[name] = list(map(number if dtype == pl.Float64() else integer, values))
        self.put(table, **columns)

    def _counters(self, chunk: bytes, rows: npt.NDArray[np.int64], base: int) -> None:
        try:
            events = [e for e in json.loads(b"[" + chunk + b"]") if isinstance(e, dict)]
        except (ValueError, RecursionError):
            self.facts.notes.append("hardware counters could not be read from one chunk")
            return
        ranges = [e for e in events if e.get("cat") == "cuda_profiler_range" and e.get("ph") == "X"]
        if len(ranges) != len(rows):
            self.facts.notes.append("hardware counters could not be matched to their ranges in one chunk")
            return
        for row, event in zip(rows.tolist(), ranges, strict=True):
            values = event.get("args")
            cells = [(say(k, 200), number(v)) for k, v in (values if isinstance(values, dict) else {}).items()]
            full = [(k, v) for k, v in cells if v is not None][:200]
            self.put("counters", row=[base + row] * len(full), counter=[k for k, _ in full], value=[v for _, v in full])
