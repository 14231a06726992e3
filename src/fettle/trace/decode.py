"""Bytes of trace events to columns, one chunk at a time.

A chunk is the text of some whole events. msgspec decodes it into typed structs that name only the fields we keep; the
rest is skipped without being built. When a chunk does not decode, it is mended step by step: bad UTF-8 and control
characters replaced, then fields of an unexpected type accepted, then event by event, skipping what cannot be read and
counting it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from fettle.trace.kinds import DEVICE_KINDS, Kind, kind_of_category
from fettle.trace.model import SIDE_TABLES

MAX_NAME_CHARS = 8192
MAX_SHAPES = 1_000_000
MAX_SHAPE_BYTES = 4096
_DAY_NS = 86_400 * 10**9
_INT64_MAX = 2**63 - 1
# Below 2**43 us neighbouring float64 are less than a nanosecond apart: rounding gives the written nanosecond back.
# Above, fractional clocks need decimal decoding.
_EXACT_US = 2.0**43


class Args(msgspec.Struct, gc=False):
    """The arguments that we keep. Rare ones are `Any`: they cost nothing where they are absent."""

    stream: int | str | float | None = None
    device: int | str | None = None
    correlation: int | None = None
    external: int | None = msgspec.field(name="External id", default=None)
    external_old: int | None = msgspec.field(name="external id", default=None)
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=msgspec.Raw())  # empty: not recorded
    sequence: int | None = msgspec.field(name="Sequence number", default=None)
    forward_thread: int | None = msgspec.field(name="Fwd thread id", default=None)
    stack: Any = msgspec.field(name="Call stack", default=None)
    bytes: Any = None
    bandwidth: Any = msgspec.field(name="memory bandwidth (GB/s)", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    in_elements: Any = msgspec.field(name="In msg nelems", default=None)
    out_elements: Any = msgspec.field(name="Out msg nelems", default=None)
    dtype: Any = None
    collective_sequence: Any = msgspec.field(name="Seq", default=None)
    sync: Any = msgspec.field(name="cuda_sync_kind", default=None)
    wait_on_stream: Any = None
    wait_on_record: Any = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)
    kernel_file: Any = None
    kernel_hash: Any = None
    address: Any = msgspec.field(name="Addr", default=None)
    memory_bytes: Any = msgspec.field(name="Bytes", default=None)
    allocated: Any = msgspec.field(name="Total Allocated", default=None)
    reserved: Any = msgspec.field(name="Total Reserved", default=None)
    memory_device: Any = msgspec.field(name="Device Id", default=None)
    memory_device_type: Any = msgspec.field(name="Device Type", default=None)
    name: Any = None


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float | None = None
    dur: int | float | None = None
    args: Args | None = None


class ExactEvent(msgspec.Struct, gc=False):
    """As `Event`, with clocks as decimal text: for fractional microseconds since 1970, which a float64 would round."""

    ph: str = ""
    cat: str | None = None
    name: str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    ts: Decimal | None = None
    dur: Decimal | None = None
    args: Args | None = None


_decode_fast = msgspec.json.Decoder(list[Event]).decode
_decode_exact = msgspec.json.Decoder(list[ExactEvent]).decode
_NO_ARGS = Args()
_CONTROL = bytes.maketrans(bytes(range(32)), b" " * 32)


class Interner(dict[Any, int]):
    """Text to a dense number; new text gets the next one."""

    def __missing__(self, key: Any) -> int:
        code = len(self)
        self[key] = code
        return code


@dataclass
class Tally:
    """What decoding met so far; becomes `ReadFacts`."""

    events_seen: int = 0
    skipped_events: int = 0
    repaired_chunks: int = 0
    negative_durations: int = 0
    absurd_times: int = 0
    missing_duration: int = 0
    wide_clock_chunks: int = 0
    flow_events: int = 0
    unknown_categories: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in (
            "events_seen",
            "skipped_events",
            "repaired_chunks",
            "negative_durations",
            "absurd_times",
            "missing_duration",
            "wide_clock_chunks",
            "flow_events",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.unknown_categories |= other.unknown_categories
        self.notes += [note for note in other.notes if note not in self.notes]


class Columns:
    """Grows column arrays chunk by chunk; `side` collects the sparse facts."""

    def __init__(self) -> None:
        self.names = Interner()
        self.categories = Interner()
        self.category_kind: list[int] = []
        self.threads = Interner()
        self.shapes = Interner({b"": 0})
        self.chunks: list[dict[str, npt.NDArray[Any]]] = []
        self.side: dict[str, list[pl.DataFrame]] = {}
        self.thread_names: dict[str, str] = {}
        self.tally = Tally()
        self.rows = 0

    def put(self, table: str, **values: list[Any] | npt.NDArray[Any]) -> None:
        if len(next(iter(values.values()))):
            frame = pl.DataFrame(values, schema=SIDE_TABLES[table], strict=False)
            self.side.setdefault(table, []).append(frame)

    def add(self, chunk: bytes) -> bytes:
        """Decode the events in `chunk` (no brackets around them) and append them.

        Returns the bytes at the end that were not whole events: empty where all went well.
        """
        text = b"[" + chunk + b"]"
        rest = b""
        events: list[Any]
        try:
            events = _decode_fast(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError):
            events, rest = self._mend(chunk)
        self._append(events, chunk)
        return rest

    def _mend(self, chunk: bytes) -> tuple[list[Any], bytes]:
        self.tally.repaired_chunks += 1
        clean = chunk.decode("utf-8", "replace").encode().translate(_CONTROL)
        try:
            return _decode_fast(b"[" + clean + b"]"), b""
        except (msgspec.DecodeError, RecursionError, OverflowError, ValueError):
            pass
        events: list[Any] = []
        raw, rest, skipped = read_event_by_event(clean)
        self.tally.skipped_events += skipped
        for item in raw:
            event = _lenient(item)
            if event is None:
                self.tally.skipped_events += 1
            else:
                events.append(event)
        return events, rest

    def _append(self, events: list[Any], chunk: bytes) -> None:
        self.tally.events_seen += len(events)
        complete = [e for e in events if e.ph == "X"]
        if len(complete) != len(events):
            others = [e for e in events if e.ph != "X" and e.ph not in ("s", "f", "t")]
            self.tally.flow_events += len(events) - len(complete) - len(others)
            if others:
                self._append_others(others)
        if not complete:
            return
        ts_ns, dur_ns, keep = self._clocks(complete, chunk)
        if keep is not None:
            complete = [complete[i] for i in np.flatnonzero(keep)]
            ts_ns, dur_ns = ts_ns[keep], dur_ns[keep]
            if not complete:
                return
        self._append_complete(complete, ts_ns, dur_ns, chunk)

    def _clocks(
        self, events: list[Any], chunk: bytes
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
        """Start and duration in ns, and which rows to keep (None: all)."""
        ts, dur = _to_array([e.ts for e in events]), _to_array([e.dur for e in events])
        keep = None
        if ts.dtype == object or dur.dtype == object:
            ts, dur, keep = self._odd_clocks(ts, dur)
        elif ts.dtype == np.float64:
            fractional_and_wide = bool(np.any((np.abs(ts) >= _EXACT_US) & np.isfinite(ts)))
            if fractional_and_wide and b"." in chunk:
                exact = self._exact_clocks(chunk, len(events))
                if exact is not None:
                    ts, dur = exact
                    self.tally.wide_clock_chunks += 1
        ts_ns, bad_ts = _to_ns(ts)
        dur_ns, bad_dur = _to_ns(dur)
        bad = bad_ts | bad_dur | (dur_ns > _DAY_NS)
        if bad.any():
            self.tally.absurd_times += int(bad.sum())
            keep = ~bad if keep is None else keep & ~bad
        negative = dur_ns < 0
        if negative.any():
            self.tally.negative_durations += int(negative.sum())
            dur_ns = np.maximum(dur_ns, 0)
        return ts_ns, dur_ns, keep

    def _odd_clocks(self, ts: npt.NDArray[Any], dur: npt.NDArray[Any]) -> tuple[Any, Any, npt.NDArray[np.bool_]]:
        """Clocks that are missing or wider than 64 bits: rows without a start or duration are dropped and counted."""
        missing = np.array([a is None or b is None for a, b in zip(ts, dur, strict=True)])
        self.tally.missing_duration += int(missing.sum())

        def plain(values: npt.NDArray[Any]) -> npt.NDArray[np.float64] | npt.NDArray[np.int64]:
            cells = [0 if v is None or abs(v) > 2**53 else v for v in values.tolist()]
            return np.array(cells)

        wide = np.array([_is_wide(a) or _is_wide(b) for a, b in zip(ts, dur, strict=True)])
        self.tally.absurd_times += int((wide & ~missing).sum())
        return plain(ts), plain(dur), ~missing & ~wide

    def _exact_clocks(self, chunk: bytes, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        try:
            events = [e for e in _decode_exact(b"[" + chunk + b"]") if e.ph == "X"]
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, ArithmeticError):
            return None
        if len(events) != count or any(e.ts is None or e.dur is None for e in events):
            return None
        # Whole nanoseconds as integers; `_to_ns` leaves object arrays of this kind alone.
        try:
            ts = np.array([_whole_ns(e.ts) for e in events], dtype=np.int64)
            dur = np.array([_whole_ns(e.dur) for e in events], dtype=np.int64)
        except (OverflowError, ArithmeticError, ValueError):
            return None
        return ts.view("timedelta64[ns]"), dur.view("timedelta64[ns]")

    def _append_complete(
        self, events: list[Any], ts_ns: npt.NDArray[np.int64], dur_ns: npt.NDArray[np.int64], chunk: bytes
    ) -> None:
        count, base = len(events), self.rows
        args = [e.args or _NO_ARGS for e in events]
        categories = np.fromiter(map(self.categories.__getitem__, [e.cat or "" for e in events]), np.int32, count)
        while len(self.category_kind) < len(self.categories):
            self._learn_category()
        kind = np.array(self.category_kind, dtype=np.uint8)[categories]
        names = [e.name or "" for e in events]
        if max(map(len, names)) > MAX_NAME_CHARS:
            names = [name[:MAX_NAME_CHARS] for name in names]
        name = np.fromiter(map(self.names.__getitem__, names), np.uint32, count)
        thread = np.fromiter(map(self.threads.__getitem__, [(e.pid, e.tid) for e in events]), np.int32, count)
        correlation = _integers([a.correlation for a in args])
        external = _integers([a.external for a in args])
        if (external < 0).all():
            external = _integers([a.external_old for a in args])
        # Old traces know a step only by its name; new ones call it an annotation.
        for code in [self.names[n] for n in {n for n in set(names) if n.startswith("ProfilerStep#")}]:
            kind[(name == code) & (kind == Kind.OPERATOR)] = Kind.ANNOTATION

        device = np.full(count, -1, np.int16)
        stream = np.full(count, -1, np.int64)
        work = np.flatnonzero(np.isin(kind, DEVICE_KINDS))
        if len(work):
            chosen = [(args[i], events[i]) for i in work.tolist()]
            device[work] = _plain_or([a.device if a.device is not None else e.pid for a, e in chosen], _small)
            stream[work] = _plain_or([a.stream if a.stream is not None else e.tid for a, e in chosen], _stream)
        # What else carries a stream: sync events, and the host-side operators of generated kernels.
        others = [i for i, a in enumerate(args) if a.stream is not None]
        if len(others) > len(work) or not np.isin(others, work).all():
            for i in np.setdiff1d(others, work).tolist():
                device[i] = _small(args[i].device if kind[i] == Kind.SYNC else None)
                stream[i] = _integer(args[i].stream) if isinstance(args[i].stream, int) else stream[i]

        shape = np.zeros(count, np.uint32)
        operators = np.flatnonzero((kind == Kind.OPERATOR) | (kind == Kind.ANNOTATION)).tolist()
        if operators:
            shapes = self.shapes
            raws = [bytes(args[i].dims) for i in operators]
            if len(shapes) + len(raws) > MAX_SHAPES or max(map(len, raws)) > MAX_SHAPE_BYTES:
                raws = [raw if raw in shapes or len(shapes) < MAX_SHAPES // 2 else b"" for raw in raws]
                raws = [raw if len(raw) <= MAX_SHAPE_BYTES else b"" for raw in raws]
            shape[operators] = list(map(shapes.__getitem__, raws))
        self._side_of_operators(args, operators, base)
        self._side_of_device(args, kind, base)
        ranges = np.flatnonzero(kind == Kind.COUNTER_RANGE)
        if len(ranges):
            self._counters(chunk, ranges, base)
        self.chunks.append(
            {
                "ts_ns": ts_ns,
                "dur_ns": dur_ns,
                "name": name,
                "kind": kind,
                "thread": thread,
                "device": device,
                "stream": stream,
                "correlation": correlation,
                "external": external,
                "shape": shape,
            }
        )
        self.rows += count

    def _learn_category(self) -> None:
        category = list(self.categories)[len(self.category_kind)]
        kind = kind_of_category(category)
        if kind == Kind.OTHER and category not in ("Trace", "") and len(self.tally.unknown_categories) < 50:
            self.tally.unknown_categories.add(_say(category, 100))
        self.category_kind.append(int(kind))

    def _side_of_operators(self, args: list[Any], rows: list[int], base: int) -> None:
        numbers = _integers([args[i].sequence for i in rows])
        has = np.flatnonzero(numbers >= 0)
        if len(has):
            with_number = np.array(rows, dtype=np.int64)[has]
            forward = _integers([args[i].forward_thread for i in with_number.tolist()])
            self.put("autograd", row=with_number + base, sequence=numbers[has], forward_thread=forward)
        # One pass finds the few operators that have any of the rare facts.
        rare = [
            i
            for i in rows
            if (a := args[i]).stack
            or a.collective is not None
            or a.kernel_file is not None
            or a.kernel_hash is not None
        ]
        some = [i for i in rare if args[i].kernel_file is not None or args[i].kernel_hash is not None]
        if some:
            self.put(
                "generated",
                row=[base + i for i in some],
                file=[_say(args[i].kernel_file or "", 1000) for i in some],
                hash=[_say(args[i].kernel_hash or "", 200) for i in some],
            )
        some = [i for i in rare if args[i].stack]
        if some:
            self.put("stacks", row=[base + i for i in some], stack=[_say(args[i].stack, MAX_NAME_CHARS) for i in some])
        self._collectives([i for i in rare if args[i].collective is not None], args, base)

    def _side_of_device(self, args: list[Any], kind: npt.NDArray[np.uint8], base: int) -> None:
        rows = np.flatnonzero((kind == Kind.MEMCPY) | (kind == Kind.MEMSET)).tolist()
        some = [i for i in rows if args[i].bytes is not None or args[i].bandwidth is not None]
        if some:
            self.put(
                "copies",
                row=[base + i for i in some],
                bytes=[_integer(args[i].bytes) for i in some],
                gb_per_s=[_number(args[i].bandwidth) for i in some],
            )
        rows = np.flatnonzero(kind == Kind.KERNEL).tolist()
        self._collectives([i for i in rows if args[i].collective is not None], args, base)
        some = np.flatnonzero(kind == Kind.SYNC).tolist()
        if some:
            self.put(
                "syncs",
                row=[base + i for i in some],
                sync=[_say(args[i].sync or "", 100) for i in some],
                wait_on_stream=[_stream(args[i].wait_on_stream) for i in some],
                wait_on_record=[_integer(args[i].wait_on_record) for i in some],
            )

    def _collectives(self, some: list[int], args: list[Any], base: int) -> None:
        if some:
            self.put(
                "collectives",
                row=[base + i for i in some],
                collective=[_say(args[i].collective, 100) for i in some],
                group=["" if args[i].group is None else _say(args[i].group, 100) for i in some],
                group_size=[_integer(args[i].group_size) for i in some],
                in_elements=[_integer(args[i].in_elements) for i in some],
                out_elements=[_integer(args[i].out_elements) for i in some],
                dtype=["" if args[i].dtype is None else _say(args[i].dtype, 40) for i in some],
                sequence=[_integer(args[i].collective_sequence) for i in some],
            )

    def _counters(self, chunk: bytes, rows: npt.NDArray[np.int64], base: int) -> None:
        try:
            found = [e for e in json.loads(b"[" + chunk + b"]") if isinstance(e, dict)]
        except (ValueError, RecursionError):
            self.tally.notes.append("hardware counters could not be read from one chunk")
            return
        ranges = [e for e in found if e.get("cat") == "cuda_profiler_range" and e.get("ph") == "X"]
        if len(ranges) != len(rows):
            self.tally.notes.append("hardware counters could not be matched to their ranges in one chunk")
            return
        for row, event in zip(rows.tolist(), ranges, strict=True):
            values = event.get("args")
            cells = [(_say(k, 200), _number(v)) for k, v in (values if isinstance(values, dict) else {}).items()]
            told = [(k, v) for k, v in cells if v is not None][:200]
            self.put("counters", row=[base + row] * len(told), counter=[k for k, _ in told], value=[v for _, v in told])

    def _append_others(self, events: list[Any]) -> None:
        """Metadata (thread names), and instants of the memory allocator."""
        memory = []
        for e in events:
            if e.ph == "M" and e.name in ("thread_name", "process_name") and e.args is not None:
                key = _say(f"{e.pid}/{e.tid}" if e.name == "thread_name" else f"{e.pid}", 200)
                if len(self.thread_names) < 100_000:
                    self.thread_names[key] = _say(e.args.name, 200)
            elif e.ph == "i" and e.name == "[memory]" and e.args is not None and e.ts is not None:
                memory.append(e)
        if memory:
            ts_ns, bad = _to_ns(_to_array([e.ts for e in memory]))
            memory = [e for e, b in zip(memory, bad, strict=True) if not b]
            self.put(
                "memory",
                ts_ns=ts_ns[~bad].tolist(),
                thread=[self.threads[(e.pid, e.tid)] for e in memory],
                device_type=[_integer(e.args.memory_device_type) for e in memory],
                device=[_integer(e.args.memory_device) for e in memory],
                bytes=[_integer(e.args.memory_bytes, missing=0) for e in memory],
                address=[_integer(e.args.address) for e in memory],
                allocated_bytes=[_integer(e.args.allocated) for e in memory],
                reserved_bytes=[_integer(e.args.reserved) for e in memory],
            )


def read_event_by_event(text: bytes) -> tuple[list[dict[str, Any]], bytes, int]:
    """Salvage events from a chunk that does not decode as a whole.

    Returns the events that could be read, the unread end (an event that has only begun, or what follows the array's
    closing bracket, which is then its first character), and how many events had to be skipped.
    """
    decoder = json.JSONDecoder(strict=False)
    source = text.decode("utf-8", "replace")
    events: list[dict[str, Any]] = []
    skipped = 0
    at, size = 0, len(source)
    next_event = re.compile(r'\}\s*,\s*(?=\{\s*"(?:ph|name|cat)"\s*:)')
    while at < size:
        while at < size and source[at] in " \t\r\n,":
            at += 1
        if at >= size or source[at] == "]":
            break
        try:
            item, at = decoder.raw_decode(source, at)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError) and (
                error.pos >= size - 8 or error.msg.startswith("Unterminated string")
            ):
                break  # not broken, only not finished: more text may follow
            found = next_event.search(source, at)
            if found is None:
                break
            skipped += 1
            at = found.end()
            continue
        if isinstance(item, dict):
            events.append(item)
        else:
            skipped += 1
    return events, source[at:].encode(), skipped


def _lenient(item: dict[str, Any]) -> Event | None:
    """An event whose fields have the wrong type, made to fit; None where it has no meaning left."""
    args = item.get("args")
    known = None
    if isinstance(args, dict):
        cells: dict[str, Any] = {
            field_name: args[encoded]
            for field_name, encoded in zip(Args.__struct_fields__, Args.__struct_encode_fields__, strict=True)
            if encoded in args and encoded not in _TYPED_ARGS
        }
        cells |= {name: _integer_or_none(args.get(encoded)) for name, encoded in _INTEGER_ARGS}
        known = Args(**cells)
        if "stream" in args and isinstance(args["stream"], (int, str)):
            known.stream = args["stream"]
        if "device" in args and isinstance(args["device"], (int, str)):
            known.device = args["device"]
        if isinstance(args.get("Input Dims"), list):
            known.dims = msgspec.Raw(msgspec.json.encode(args["Input Dims"]))
    ph = item.get("ph")
    if not isinstance(ph, str):
        return None
    return Event(
        ph=ph,
        cat=_text(item.get("cat")),
        name=_text(item.get("name")),
        pid=_text_or_integer(item.get("pid")),
        tid=_text_or_integer(item.get("tid")),
        ts=_clock(item.get("ts")),
        dur=_clock(item.get("dur")),
        args=known,
    )


_INTEGER_ARGS = [
    ("correlation", "correlation"),
    ("external", "External id"),
    ("external_old", "external id"),
    ("sequence", "Sequence number"),
    ("forward_thread", "Fwd thread id"),
]
_TYPED_ARGS = {"stream", "device", "Input Dims", *(encoded for _, encoded in _INTEGER_ARGS)}


def _text(value: Any) -> str | None:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def _plain_or(values: list[Any], convert: Callable[[Any], int]) -> npt.NDArray[np.int64] | list[int]:
    """Small plain integers as they are, at once; anything else one by one."""
    try:
        array = np.array(values)
    except (ValueError, OverflowError):
        return [convert(v) for v in values]
    if array.dtype == np.int64 and len(array) and array.min() >= 0 and array.max() <= 10_000:
        return array
    return [convert(v) for v in values]


def _say(value: Any, limit: int) -> str:
    """Any value as text that can be stored: cut, and without lone surrogates."""
    return str(value)[:limit].encode("utf-8", "replace").decode()


def _text_or_integer(value: Any) -> str | int | None:
    return value if isinstance(value, int) else _text(value)


def _integer_or_none(value: Any) -> int | None:
    number = _integer(value, missing=-(2**62))
    return None if number == -(2**62) else number


def _clock(value: Any) -> float | int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return value
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _whole_ns(microseconds: Decimal | None) -> int:
    return int(((microseconds or Decimal(0)) * 1000).to_integral_value())


def _is_wide(value: Any) -> bool:
    return value is not None and abs(value) > 2**53


def _to_array(values: list[Any]) -> npt.NDArray[Any]:
    """Numbers as int64 where all are integers, as float64 where some are not, as objects where some are missing or
    huge.
    """
    try:
        array = np.array(values)
    except (OverflowError, ValueError):
        return np.array(values, dtype=object)
    return array if array.dtype in (np.int64, np.float64) else np.array(values, dtype=object)


def _to_ns(values: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Microseconds to nanoseconds, exactly, and which values are no clock (not finite, or beyond 104 days since 1970
    x 10).
    """
    if values.dtype == np.dtype("timedelta64[ns]"):
        ns = values.view(np.int64)
        return ns, np.zeros(len(ns), dtype=bool)
    if values.dtype == np.float64:
        bad = ~np.isfinite(values) | (np.abs(values) > 9e15)
        safe = np.where(bad, 0.0, values)
        whole = np.floor(safe)
        ns = whole.astype(np.int64) * 1000 + np.rint((safe - whole) * 1000.0).astype(np.int64)
        return ns, bad
    numbers = values.astype(np.int64)
    bad = np.abs(numbers) > 9 * 10**15
    return np.where(bad, 0, numbers) * 1000, bad


def _integers(values: list[Any]) -> npt.NDArray[np.int64]:
    cells = [-1 if v is None else v for v in values]
    try:
        return np.array(cells, dtype=np.int64)
    except (OverflowError, ValueError, TypeError):
        return np.array([_integer(v) for v in values], dtype=np.int64)


def _integer(value: Any, missing: int = -1) -> int:
    """An integer that fits in 64 bits, from whatever JSON held; `missing` where there is none."""
    if isinstance(value, str):
        try:
            value = int(value, 0) if len(value) < 25 else missing
        except ValueError:
            return missing
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) else missing
    if not isinstance(value, int) or abs(value) > _INT64_MAX:
        return missing
    return int(value)


def _number(value: Any) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _small(value: Any) -> int:
    """A device number: -1 for what is none (a process id, for one, where the device was not told)."""
    number = _integer(value)
    return number if -1 <= number <= 10_000 else -1


def _stream(value: Any) -> int:
    """A stream number; text such as `stream 7` counts, and the unsigned 32-bit -1 of sync events means none."""
    if isinstance(value, str):
        digits = value.rsplit(" ", 1)[-1]
        value = _integer(digits)
    number = _integer(value)
    return -1 if number in (2**32 - 1, 2**64 - 1) else number
