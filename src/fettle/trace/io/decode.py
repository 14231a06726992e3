"""Bytes of trace events to columns, one chunk at a time.

A chunk is the text of some whole events. msgspec decodes it into typed structs (`events`); what does not decode is
mended step by step: bad UTF-8 and control characters replaced, then fields of an unexpected type accepted, then event
by event (`mend`), skipping what cannot be read and counting it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from fettle.trace.io.events import NO_ARGS, decode_exact, decode_fast
from fettle.trace.io.fields import integer, integers, say, small_number, stream_number, to_array, to_ns, whole_ns
from fettle.trace.io.mend import lenient, read_event_by_event
from fettle.trace.io.side import SideTables
from fettle.trace.kinds import DEVICE_KINDS, Kind, kind_of_category
from fettle.trace.model import EVENT_COLUMNS, ReadFacts

MAX_NAME_CHARS = 8192
MAX_SHAPES = 1_000_000
MAX_SHAPE_BYTES = 4096
_DAY_NS = 86_400 * 10**9
# Below 2**43 us neighbouring float64 are less than a nanosecond apart: rounding gives the written nanosecond back.
# Above, fractional clocks need decimal decoding.
_EXACT_US = 2.0**43
_IS_DEVICE = np.isin(np.arange(256), DEVICE_KINDS)
_IS_OPERATOR = np.isin(np.arange(256), (Kind.OPERATOR, Kind.ANNOTATION))
_UNREADABLE = (ValueError, ArithmeticError, RecursionError)  # msgspec's errors are ValueErrors
_CONTROL = bytes.maketrans(bytes(range(32)), b" " * 32)


class Interner(dict[Any, int]):
    """Text to a dense number; new text gets the next one."""

    def __missing__(self, key: Any) -> int:
        code = len(self)
        self[key] = code
        return code


class Threads(Interner):
    """Process and thread to a dense number, whether their ids were written as numbers or as text."""

    def __init__(self) -> None:
        self.texts = Interner()

    def __missing__(self, key: tuple[Any, Any]) -> int:
        code = self.texts[tuple(map(say, key))]
        self[key] = code
        return code


class Columns:
    """Grows column arrays chunk by chunk; `side` collects the sparse facts."""

    def __init__(self) -> None:
        self.names = Interner()
        self.kinds: dict[str, int] = {}
        self.threads = Threads()
        self.shapes = Interner({b"": 0})
        self.chunks: list[dict[str, npt.NDArray[Any]]] = []
        self.thread_names: dict[str, str] = {}
        self.trailer = b""  # the text behind the events
        self.facts = ReadFacts()
        self.side = SideTables(self.facts)
        self.rows = 0

    def add(self, chunk: bytes) -> bytes:
        """Decode the events in `chunk` (no brackets around them) and append them.

        Returns the bytes at the end that were not whole events: empty where all went well.
        """
        text = b"[" + chunk + b"]"
        rest = b""
        events: list[Any]
        try:
            events = decode_fast(text)
        except _UNREADABLE:
            events, rest, chunk = self._mend(chunk)
        self._append(events, chunk)
        return rest

    def _mend(self, chunk: bytes) -> tuple[list[Any], bytes, bytes]:
        """The events, the bytes at the end that were not whole ones, and the text that they were read from."""
        self.facts.repaired_bytes_chunks += 1
        clean = chunk.decode("utf-8", "replace").encode().translate(_CONTROL)
        try:
            return decode_fast(b"[" + clean + b"]"), b"", clean
        except _UNREADABLE:
            pass
        events: list[Any] = []
        raw, rest, skipped = read_event_by_event(clean)
        self.facts.skipped_events += skipped
        for item in raw:
            event = lenient(item)
            if event is None:
                self.facts.skipped_events += 1
            else:
                events.append(event)
        return events, rest, clean

    def _append(self, events: list[Any], chunk: bytes) -> None:
        self.facts.events_seen += len(events)
        complete = [e for e in events if e.ph == "X"]
        if len(complete) != len(events):
            self._append_others([e for e in events if e.ph != "X"])
        ts_ns, dur_ns, keep = self._clocks(complete, chunk)
        if not keep.all():
            complete = [complete[i] for i in np.flatnonzero(keep)]
            ts_ns, dur_ns = ts_ns[keep], dur_ns[keep]
        if complete:
            self._append_complete(complete, ts_ns, dur_ns, chunk)

    def _clocks(
        self, events: list[Any], chunk: bytes
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Start and duration in ns, and which rows to keep."""
        ts, dur = to_array([e.ts for e in events]), to_array([e.dur for e in events])
        missing = np.zeros(len(events), dtype=bool)
        if np.isnan(ts).any() or np.isnan(dur).any():
            missing = np.array([e.ts is None or e.dur is None for e in events])
            self.facts.missing_duration += int(missing.sum())
        ts_ns, bad_ts = to_ns(ts)
        dur_ns, bad_dur = to_ns(dur)
        bad = bad_ts | bad_dur
        wide = b"." in chunk and bool(np.any((np.abs(ts) >= _EXACT_US) & np.isfinite(ts)))
        if wide and any(isinstance(e.ts, float) for e in events):
            exact = self._exact_clocks(chunk, len(events))
            if exact is not None:
                ts_ns, dur_ns = exact
                bad = np.zeros(len(ts), dtype=bool)
                self.facts.wide_clock_chunks += 1
        bad = (bad | (dur_ns > _DAY_NS)) & ~missing
        self.facts.absurd_times += int(bad.sum())
        self.facts.negative_durations += int((dur_ns < 0).sum())
        return ts_ns, np.maximum(dur_ns, 0), ~(bad | missing)

    def _exact_clocks(self, chunk: bytes, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        try:
            events = [e for e in decode_exact(b"[" + chunk + b"]") if e.ph == "X"]
            ts = np.array([whole_ns(e.ts) for e in events], dtype=np.int64)
            dur = np.array([whole_ns(e.dur) for e in events], dtype=np.int64)
        except _UNREADABLE:
            return None
        return (ts, dur) if len(events) == count else None

    def _append_complete(
        self, events: list[Any], ts_ns: npt.NDArray[np.int64], dur_ns: npt.NDArray[np.int64], chunk: bytes
    ) -> None:
        count, base = len(events), self.rows
        args = [e.args or NO_ARGS for e in events]
        categories = [e.cat or "" for e in events]
        self._learn(sorted(set(categories) - self.kinds.keys()))
        self.facts.uncategorised += categories.count("")
        kind = np.fromiter(map(self.kinds.__getitem__, categories), np.uint8, count)
        names = [e.name or "" for e in events]
        if max(map(len, names)) > MAX_NAME_CHARS:
            names = [name[:MAX_NAME_CHARS] for name in names]
        name = np.fromiter(map(self.names.__getitem__, names), np.uint32, count)
        thread = np.fromiter(map(self.threads.__getitem__, [(e.pid, e.tid) for e in events]), np.int32, count)
        correlation = integers([a.correlation for a in args])
        external = integers([a.external for a in args])
        missing = np.flatnonzero((external < 0) & (kind != Kind.PYTHON))
        external[missing] = integers([args[i].external_old for i in missing.tolist()])
        device, stream = self._places(events, args, kind)
        operators = np.flatnonzero(_IS_OPERATOR[kind]).tolist()
        shape = np.zeros(count, np.uint32)
        if operators:
            shape[operators] = self._shapes(args, operators)
        self.side.of_chunk(args, names, kind, operators, chunk, base)
        columns = (ts_ns, dur_ns, name, kind, thread, device, stream, correlation, external, shape)
        self.chunks.append(dict(zip(EVENT_COLUMNS, columns, strict=True)))
        self.rows += count

    def _places(
        self, events: list[Any], args: list[Any], kind: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        """Device and stream of each event; -1 for none, and 0 for the device of work of which none is known."""
        device, stream = np.full(len(events), -1, np.int16), np.full(len(events), -1, np.int64)
        is_work = _IS_DEVICE[kind]
        rows = np.flatnonzero(is_work).tolist()
        devices = [events[i].pid if args[i].device is None else args[i].device for i in rows]
        streams = [events[i].tid if args[i].stream is None else args[i].stream for i in rows]
        device[rows], stream[rows] = _each(small_number, devices), _each(stream_number, streams)
        device[rows] = np.maximum(device[rows], 0)  # work is on a device, though nobody says which: -1 is the host
        # What else carries a stream: sync events, and the host-side operators of generated kernels.
        for i in [i for i, a in enumerate(args) if a.stream is not None and not is_work[i]]:
            device[i] = small_number(args[i].device if kind[i] == Kind.SYNC else None)
            stream[i] = integer(args[i].stream) if isinstance(args[i].stream, int) else -1
        return device, stream

    def _shapes(self, args: list[Any], operators: list[int]) -> list[int]:
        shapes = self.shapes
        raws = [bytes(args[i].dims) for i in operators]
        if len(shapes) + len(raws) > MAX_SHAPES or max(map(len, raws)) > MAX_SHAPE_BYTES:
            raws = [raw if raw in shapes or len(shapes) < MAX_SHAPES // 2 else b"" for raw in raws]
            raws = [raw if len(raw) <= MAX_SHAPE_BYTES else b"" for raw in raws]
        return list(map(shapes.__getitem__, raws))

    def _learn(self, categories: list[str]) -> None:
        for category in categories:
            self.kinds[category] = kind = kind_of_category(category)
            if kind == Kind.OTHER and category not in ("Trace", "") and len(self.facts.unknown_categories) < 50:
                self.facts.unknown_categories.append(say(category, 100))

    def _append_others(self, events: list[Any]) -> None:
        """Metadata (thread names), and instants of the memory allocator; begins and ends are only counted."""
        memory = []
        self.facts.begin_end += sum(e.ph in ("B", "E") for e in events)
        for e in events:
            if e.ph == "M" and e.name in ("thread_name", "process_name") and e.args is not None:
                key = say(f"{e.pid}/{e.tid}" if e.name == "thread_name" else f"{e.pid}", 200)
                if len(self.thread_names) < 100_000:
                    self.thread_names[key] = say(e.args.name, 200)
            elif e.ph == "i" and e.name == "[memory]" and e.args is not None and e.ts is not None:
                memory.append(e)
        if memory:
            ts_ns, bad = to_ns(to_array([e.ts for e in memory]))
            memory = [e for e, b in zip(memory, bad, strict=True) if not b]
            self.side.put(
                "memory",
                ts_ns=ts_ns[~bad].tolist(),
                thread=[self.threads[(e.pid, e.tid)] for e in memory],
                device_type=[integer(e.args.memory_device_type) for e in memory],
                device=[integer(e.args.memory_device) for e in memory],
                bytes=[integer(e.args.memory_bytes, missing=0) for e in memory],
                address=[integer(e.args.address) for e in memory],
                allocated_bytes=[integer(e.args.allocated) for e in memory],
                reserved_bytes=[integer(e.args.reserved) for e in memory],
            )


def _each(convert: Callable[[Any], int], values: list[Any]) -> list[int]:
    """All values converted, each that occurs once."""
    known = {value: convert(value) for value in set(values)}
    return [known[value] for value in values]
