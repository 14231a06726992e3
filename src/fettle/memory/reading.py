"""What is in this snapshot file? Every historical format of PyTorch's allocator snapshots, as columns.

Formats, oldest first: a bare list of segments (``torch.cuda.memory_snapshot()``); torch 2.0, whose blocks have a
``history`` and no address, and whose events have no time; the present dictionary of segments, traces, settings and
annotations; and the same with the extra fields that later versions added, which are ignored where they mean nothing
here. Everything is read from values that may be hostile: numbers must fit in 64 bits, and no file may describe more
things than it has bytes (a pickle can repeat one list a million times for two bytes each).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fettle.errors import UsageError
from fettle.memory.pickles import load_plain_data
from fettle.memory.shared import NO_FRAMES, Shared, clean, is_small
from fettle.memory.snapshot import Action, Annotation, Blocks, Ints, Segments, Snapshot, State, Trace
from fettle.procs.limits import granted_memory_bytes
from fettle.units import count_text

DEFAULT_MAX_FILE_BYTES = 1 << 30
"""Reading an honest file takes about ten times its size in memory."""

# The most memory that can come of a file: a dictionary or list is one byte in a pickle, anything else is cheaper.
_MOST_BYTES_PER_CONTAINER = 240
_MOST_BYTES_PER_BYTE = 12
_BYTES_PER_THING = 300
"""What the columns and lists of one event, block or segment take while it is read."""

_ACTIONS = {action.name.lower(): int(action) for action in Action if action is not Action.OTHER}
_STATES = {
    "inactive": int(State.INACTIVE),
    "active_allocated": int(State.ALLOCATED),
    "active_pending_free": int(State.PENDING_FREE),
    "active_awaiting_free": int(State.PENDING_FREE),  # what torch's own documentation calls it
}


def read(path: str | os.PathLike[str], *, max_file_bytes: int = DEFAULT_MAX_FILE_BYTES) -> Snapshot:
    """Read a snapshot file. `UsageError` if it cannot be opened, is over the limit, or is not a snapshot."""
    file = Path(path)
    try:
        size = file.stat().st_size
        if not file.is_file():
            raise UsageError(f"{file}: not a file")
        if size > max_file_bytes:
            raise UsageError(
                f"{file}: {size / 1e9:.1f} GB is over the limit of {max_file_bytes / 1e9:.1f} GB, and reading it may "
                f"take {size * 10 / 1e9:.0f} GB of memory; raise `max_file_bytes`, or record with a smaller ring"
            )
        available = granted_memory_bytes()
        _refuse_beyond(available, _MOST_BYTES_PER_BYTE * size, file)
        raw = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    containers = raw.count(b"}") + raw.count(b"]")
    _refuse_beyond(available, _MOST_BYTES_PER_CONTAINER * containers + _MOST_BYTES_PER_BYTE * len(raw), file)
    budget = min(len(raw), available // _BYTES_PER_THING)
    return parse(load_plain_data(raw, str(file)), name=clean(str(file)), budget=budget)


def _refuse_beyond(available_bytes: int, needed_bytes: int, file: Path) -> None:
    if needed_bytes > available_bytes:
        raise UsageError(
            f"{file}: reading it could take {needed_bytes / 1e9:.1f} GB of memory, "
            f"{available_bytes / 1e9:.1f} GB are available"
        )


def parse(data: object, *, name: str = "snapshot", budget: int | None = None) -> Snapshot:
    """A snapshot from the object that ``torch.cuda.memory._snapshot()`` returns, or from an unpickled file.

    `budget` is the most things the data may describe; `UsageError` beyond it.
    """
    return _Parser(name, budget).parse(data)


class _Parser:
    def __init__(self, name: str, budget: int | None) -> None:
        self.name = name
        self.left = budget if budget is not None else 1 << 62
        self.shared = Shared(self.spend)
        self.notes: list[str] = []

    def parse(self, data: object) -> Snapshot:
        if isinstance(data, list):
            data = {"segments": data}
        if not isinstance(data, dict) or not isinstance(data.get("segments"), list):
            raise self.bad("not a memory snapshot: no list of segments in it")
        extra = data.get("fettle")
        extra = extra if isinstance(extra, dict) else {}
        segments, blocks = self.segments(data["segments"])
        traces = self.traces(data.get("device_traces"))
        return Snapshot(
            name=self.name,
            segments=segments,
            blocks=blocks,
            traces=traces,
            annotations=self.annotations(data.get("external_annotations")),
            settings=_plain_settings(data.get("allocator_settings")),
            stacks=tuple(self.shared.stacks),
            tags=tuple(self.shared.tags),
            allocator="cpu" if extra.get("allocator") == "cpu" else "cuda",
            host_memory=self.host_memory(extra.get("host_memory")),
            notes=tuple(self.notes),
        )

    def bad(self, what: str) -> UsageError:
        return UsageError(f"{self.name}: {what}")

    def spend(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise self.bad("refused: more segments, blocks, events and frames than it has bytes, or than fit in memory")

    def segments(self, rows: list[Any]) -> tuple[Segments, Blocks]:
        self.spend(len(rows))
        if not all(isinstance(row, dict) for row in rows):
            raise self.bad("not a memory snapshot: a segment that is not a dictionary")
        # The profiler's export writes a segment without address for a device that holds nothing.
        rows = [row for row in rows if row.get("address") is not None or row.get("blocks")]

        def column(key: str, default: int | None = None) -> Ints:
            return self.column(rows, key, "segment", default)

        address = self.ints([_signed(row.get("address")) for row in rows], "the address of a segment")
        pools = [row.get("segment_pool_id", (0, 0)) for row in rows]
        if not all(isinstance(pool, (tuple, list)) and len(pool) == 2 for pool in pools):
            raise self.bad("a segment_pool_id that is not a pair")
        segments = Segments(
            device=column("device", 0),
            address=address,
            total_bytes=column("total_size"),
            allocated_bytes=column("allocated_size", -1),
            active_bytes=column("active_size", -1),
            requested_bytes=column("requested_size", -1),
            stream=column("stream", 0),
            small=np.array([row.get("segment_type") == "small" for row in rows], np.bool_),
            pool=self.ints((number for pool in pools for number in pool), "a segment's pool").reshape(-1, 2),
            expandable=np.array([row.get("is_expandable") is True for row in rows], np.bool_),
        )
        return segments, self.blocks(rows, address)

    def blocks(self, rows: list[Any], segment_address: Ints) -> Blocks:
        blocks: list[Any] = []
        owner: list[int] = []
        address: list[int] = []
        for number, row in enumerate(rows):
            inside = row.get("blocks", [])
            if not isinstance(inside, list) or not all(isinstance(block, dict) for block in inside):
                raise self.bad(f"the blocks of segment {number} are not a list of dictionaries")
            self.spend(len(inside))
            blocks += inside
            owner += [number] * len(inside)
            next_address = int(segment_address[number])
            for block in inside:
                at = block.get("address")
                at = next_address if at is None else at
                if not isinstance(at, int) or not isinstance(block.get("size"), int):
                    raise self.bad(f"a block of segment {number} has no whole number as address or size")
                address.append(at)
                next_address = at + block["size"]
        states = [block.get("state") for block in blocks]
        unknown = {state for state in states if isinstance(state, str)} - set(_STATES)
        if unknown:
            self.notes.append(f"{count_text(len(unknown), 'unknown block state')}, counted as inactive")
        return Blocks(
            segment=np.array(owner, np.int64),
            address=self.ints(map(_signed, address), "a block's address"),
            size_bytes=self.column(blocks, "size", "block"),
            requested_bytes=self.ints((_requested(block) for block in blocks), "a block's requested size"),
            state=np.array([_STATES.get(s, 0) if isinstance(s, str) else 0 for s in states], np.int8),
            stack=np.array([self.shared.stack(_block_frames(block)) for block in blocks], np.int64),
            tag=self.shared.row_tags(blocks),
        )

    def traces(self, traces: object) -> dict[int, Trace]:
        if traces is None:
            return {}
        if not isinstance(traces, list) or not all(isinstance(trace, list) for trace in traces):
            raise self.bad("device_traces is not a list of lists")
        return {device: self.trace(events, device) for device, events in enumerate(traces) if events}

    def trace(self, events: list[Any], device: int) -> Trace:
        """All events that can be read; the others are named by their index."""
        self.spend(len(events))
        notes_before = len(self.notes)
        try:
            return self.event_columns(events, device)
        except UsageError:
            wrong = {index: what for index, event in enumerate(events) if (what := _what_is_wrong(event))}
            if not 0 < len(wrong) < len(events):
                raise
        del self.notes[notes_before:]
        shown = "; ".join(f"event {index} {what}" for index, what in list(wrong.items())[:3])
        left = count_text(len(wrong), "event")
        self.notes.append(f"device {device}: {left} could not be read, so what was in use is not exact: {shown}")
        return self.event_columns([event for index, event in enumerate(events) if index not in wrong], device)

    def event_columns(self, events: list[Any], device: int) -> Trace:
        if not all(isinstance(event, dict) for event in events):
            raise self.bad(f"the trace of device {device} holds something that is not a dictionary")
        names = [event.get("action") for event in events]
        unknown = {name for name in names if isinstance(name, str) and name not in _ACTIONS}
        if unknown:
            shown = ", ".join(sorted(clean(name)[:40] for name in unknown)[:3])
            self.notes.append(f"device {device}: events of unknown kind are kept but change nothing: {shown}")
        other = int(Action.OTHER)
        actions = np.array([_ACTIONS.get(name, other) if isinstance(name, str) else other for name in names], np.int8)
        address = [e.get("device_free", 0) if e.get("action") == "oom" else _signed(e.get("addr")) for e in events]
        trace = Trace(
            action=actions,
            address=self.ints(address, "the addr of an event"),
            size_bytes=self.column(events, "size", "event"),
            stream=self.column(events, "stream", "event", 0),
            time_us=self.column(events, "time_us", "event", 0),
            stack=self.shared.event_stacks(events),
            tag=self.shared.row_tags(events),
        )
        return _from_the_oldest(trace)

    def annotations(self, rows: object) -> tuple[Annotation, ...]:
        if not isinstance(rows, list):
            return ()
        self.spend(len(rows))
        kept = []
        for row in rows:
            if not isinstance(row, dict):
                continue
            stage, name, device, time_us = (row.get(key) for key in ("stage", "name", "device", "time_us"))
            if isinstance(stage, str) and isinstance(name, str) and is_small(time_us) and is_small(device or 0):
                kept.append(Annotation(clean(stage), clean(name), device or 0, time_us))  # type: ignore[arg-type]
        if len(kept) < len(rows):
            self.notes.append(f"{count_text(len(rows) - len(kept), 'annotation')} could not be read")
        return tuple(sorted(kept, key=lambda mark: mark.time_us))

    def host_memory(self, rows: object) -> tuple[tuple[int, int], ...]:
        if not isinstance(rows, list):
            return ()
        self.spend(len(rows))
        pairs = [row for row in rows if isinstance(row, (tuple, list)) and len(row) == 2 and all(map(is_small, row))]
        return tuple((int(time_us), int(resident)) for time_us, resident in pairs)

    def column(self, rows: list[Any], key: str, what: str, default: int | None = None) -> Ints:
        return self.ints([row.get(key, default) for row in rows], f"the {key} of a {what}")

    def ints(self, values: Iterable[Any], what: str) -> Ints:
        numbers = list(values)
        kinds = set(map(type, numbers))
        if not kinds <= {int}:
            missing = "missing" if type(None) in kinds else "not a whole number"
            raise self.bad(f"{what} is {missing}")
        try:
            return np.array(numbers, np.int64)
        except OverflowError:
            raise self.bad(f"{what} does not fit in 64 bits") from None


def _signed(address: Any) -> Any:
    """An address as the columns hold it: those from 2**63 on, which Intel's Level Zero gives, in two's complement."""
    return address - (1 << 64) if type(address) is int and 1 << 63 <= address < 1 << 64 else address


def _what_is_wrong(event: object) -> str:
    """Why an event cannot be read; empty where it can."""
    if not isinstance(event, dict):
        return "is not a dictionary"
    oom = event.get("action") == "oom"
    defaults = {"device_free" if oom else "addr": 0 if oom else None, "size": None, "stream": 0, "time_us": 0}
    for key, default in defaults.items():
        value = event.get(key, default)
        value = _signed(value) if key == "addr" else value
        if type(value) is not int:
            return f"has no {key}" if value is None else f"has a {key} that is not a whole number"
        if not -(1 << 63) <= value < 1 << 63:
            return f"has a {key} that does not fit in 64 bits"
    return ""


def _from_the_oldest(trace: Trace) -> Trace:
    """A ring written out from its first slot starts in the middle of time: turn it back if that is what we see."""
    if not trace.has_times:
        return trace
    steps_back = np.flatnonzero(np.diff(trace.time_us) < 0)
    if len(steps_back) != 1 or trace.time_us[-1] > trace.time_us[0]:
        return trace
    turn: Callable[[Any], Any] = lambda column: np.roll(column, -(int(steps_back[0]) + 1))  # noqa: E731
    return Trace(**{field: turn(getattr(trace, field)) for field in Trace.__dataclass_fields__})


def _requested(block: Mapping[str, Any]) -> object:
    """What the program asked for; before torch 2.0 only the rounded size was kept."""
    return block.get("requested_size", _latest(block).get("real_size", block.get("size")))


def _block_frames(block: Mapping[str, Any]) -> object:
    return block.get("frames", _latest(block).get("frames", NO_FRAMES))


def _latest(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first entry of a block's history, where earlier versions of torch kept what they knew of it."""
    history = block.get("history")
    return history[0] if isinstance(history, list) and history and isinstance(history[0], dict) else {}


def _plain_settings(settings: object) -> dict[str, str | int | float | bool]:
    """Scalars only; the table of roundup divisions is kept as ``roundup_power2_divisions[SIZE]`` where it is set."""
    if not isinstance(settings, dict):
        return {}
    flat: dict[str, str | int | float | bool] = {}
    for key, value in settings.items():
        if isinstance(key, str) and isinstance(value, (str, int, float, bool)):
            flat[clean(key)] = clean(value) if isinstance(value, str) else value
        if key == "roundup_power2_divisions" and isinstance(value, dict):
            for size, divisions in value.items():
                if isinstance(size, str) and isinstance(divisions, int) and divisions > 1:
                    flat[f"roundup_power2_divisions[{clean(size)}]"] = divisions
    return flat
