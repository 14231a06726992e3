"""Sparse facts of events, collected chunk by chunk into the side tables of `fettle.trace.model`."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fettle.trace.io.fields import integer, integers, number, say, stream_number
from fettle.trace.kinds import Kind
from fettle.trace.model import SIDE_TABLES, ReadFacts

MAX_TEXT_CHARS = 8192
_FRAME_ROWS = 200_000


class SideTables:
    """Grows the side tables. Pieces become a frame only now and then: a frame costs more than a chunk's few rows."""

    def __init__(self, facts: ReadFacts) -> None:
        self.facts = facts
        self.frames: dict[str, list[pl.DataFrame]] = {}
        self._pieces: dict[str, list[dict[str, Any]]] = {}
        self._rows: dict[str, int] = {}

    def put(self, table: str, **values: list[Any] | npt.NDArray[Any]) -> None:
        """Append rows, given column by column."""
        count = len(next(iter(values.values())))
        if count:
            self._pieces.setdefault(table, []).append(values)
            self._rows[table] = self._rows.get(table, 0) + count
            if self._rows[table] >= _FRAME_ROWS:
                self._settle(table)

    def _settle(self, table: str) -> None:
        pieces = self._pieces.pop(table)
        self._rows[table] = 0
        columns = {name: list(itertools.chain.from_iterable(_plain(p[name]) for p in pieces)) for name in pieces[0]}
        self.frames.setdefault(table, []).append(pl.DataFrame(columns, schema=SIDE_TABLES[table], strict=False))

    def settled(self) -> dict[str, list[pl.DataFrame]]:
        """All rows so far as frames, by table."""
        for table in list(self._pieces):
            self._settle(table)
        return self.frames

    def of_chunk(
        self, args: list[Any], kind: npt.NDArray[np.uint8], operators: list[int], chunk: bytes, base: int
    ) -> None:
        """What the complete events of one chunk say; `base` is the row of the first one."""
        self._operators(args, operators, base)
        self._device(args, kind, base)
        ranges = np.flatnonzero(kind == Kind.COUNTER_RANGE)
        if len(ranges):
            self._counters(chunk, ranges, base)

    def _operators(self, args: list[Any], rows: list[int], base: int) -> None:
        chosen = [args[i] for i in rows]
        numbers = integers([a.sequence for a in chosen])
        has = np.flatnonzero(numbers >= 0)
        if len(has):
            self.put("autograd", row=np.array(rows, dtype=np.int64)[has] + base, sequence=numbers[has])
        # One pass finds the few operators that have any of the rare facts.
        rare = [
            i
            for i, a in zip(rows, chosen, strict=True)
            if a.stack is not None or a.collective is not None or a.kernel_file is not None
        ]
        if not rare:
            return
        some = [i for i in rare if args[i].kernel_file]
        if some:
            self.put("generated", row=[base + i for i in some], file=[say(args[i].kernel_file, 1000) for i in some])
        some = [i for i in rare if args[i].stack]
        if some:
            self.put("stacks", row=[base + i for i in some], stack=[say(args[i].stack, MAX_TEXT_CHARS) for i in some])
        self._collectives([i for i in rare if args[i].collective is not None], args, base)

    def _device(self, args: list[Any], kind: npt.NDArray[np.uint8], base: int) -> None:
        rows = np.flatnonzero((kind == Kind.MEMCPY) | (kind == Kind.MEMSET)).tolist()
        some = [i for i in rows if args[i].bytes is not None or args[i].bandwidth is not None]
        if some:
            self.put(
                "copies",
                row=[base + i for i in some],
                bytes=[integer(args[i].bytes) for i in some],
                gb_per_s=[number(args[i].bandwidth) for i in some],
            )
        rows = np.flatnonzero(kind == Kind.KERNEL).tolist()
        self._collectives([i for i in rows if args[i].collective is not None], args, base)
        some = np.flatnonzero(kind == Kind.SYNC).tolist()
        if some:
            self.put(
                "syncs",
                row=[base + i for i in some],
                sync=[say(args[i].sync or "", 100) for i in some],
                wait_on_stream=[stream_number(args[i].wait_on_stream) for i in some],
                wait_on_record=[integer(args[i].wait_on_record) for i in some],
            )

    def _collectives(self, some: list[int], args: list[Any], base: int) -> None:
        if some:
            self.put(
                "collectives",
                row=[base + i for i in some],
                collective=[say(args[i].collective, 100) for i in some],
                group=["" if args[i].group is None else say(args[i].group, 100) for i in some],
                group_size=[integer(args[i].group_size) for i in some],
                in_elements=[integer(args[i].in_elements) for i in some],
                out_elements=[integer(args[i].out_elements) for i in some],
                dtype=["" if args[i].dtype is None else say(args[i].dtype, 40) for i in some],
            )

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


def _plain(values: Any) -> list[Any]:
    plain: list[Any] = values.tolist() if isinstance(values, np.ndarray) else values
    return plain
