"""Open a trace: stream the file in chunks into columns, in bounded memory, with several processes where it pays.

The text of a file is never held whole. A chunk ends where one event ends and the next begins: at `}`, a comma, and `{`
followed by the key that events of this file begin with. Inside a JSON string a quote is escaped, so that sequence
cannot occur there; inside an event's arguments it can, which is why every chunk is verified by decoding it.
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import multiprocessing
import os
import re
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import polars as pl

from fettle.errors import UsageError
from fettle.trace import sidecar
from fettle.trace.decode import Columns, Interner, Tally, read_event_by_event
from fettle.trace.kinds import DEVICE_KINDS, HOST_KINDS
from fettle.trace.model import EVENT_COLUMNS, SIDE_TABLES, ReadFacts, Trace

BLOCK_BYTES = 8 << 20
MAX_CARRY_BYTES = 64 << 20
MAX_HEADER_BYTES = 64 << 20
PARALLEL_ABOVE_BYTES = 160 << 20
DEFAULT_MAX_EVENTS = 200_000_000

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_FIRST_KEY = re.compile(rb'\s*\{\s*"([^"\\]{1,40})"')
_WEEK_NS = 7 * 86_400 * 10**9


def load(
    path: str | Path,
    *,
    rank: int | None = None,
    use_sidecar: bool = True,
    processes: int | None = None,
    max_events: int = DEFAULT_MAX_EVENTS,
) -> Trace:
    """Open one profiler trace (JSON or gzipped JSON).

    Args:
        path: The file.
        rank: Which rank it is; None takes it from the file's `distributedInfo`, its name, or else 0.
        use_sidecar: Read the columns kept from an earlier opening of the very same bytes, and keep them otherwise.
        processes: How many processes decode a large uncompressed file; None chooses.
        max_events: Refuse files with more events than this.

    Raises:
        UsageError: The file is missing, unreadable, or holds no trace events.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no such trace file: {path}")
    key = sidecar.key_of(path) if use_sidecar else None
    if key is not None:
        kept = sidecar.read(path, key, rank)
        if kept is not None:
            return kept
    try:
        columns, metadata, facts = _read(path, processes, max_events)
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    trace = _assemble(path, rank, columns, metadata, facts)
    if key is not None and facts["file_bytes"] > 1 << 20:
        sidecar.write(trace, key)
    return trace


def load_all(path: str | Path, **options: Any) -> list[Trace]:
    """Open a file, or every trace in a folder (`*.json`, `*.json.gz`), one trace a rank, ordered by rank.

    Two files that claim one rank get different ones, and the health report says so.
    """
    path = Path(path)
    if not path.is_dir():
        return [load(path, **options)]
    files = sorted(p for p in path.iterdir() if p.is_file() and p.name.endswith((".json", ".json.gz", ".gz")))
    if not files:
        raise UsageError(f"no *.json or *.json.gz traces in {path}")
    traces, taken, unreadable = [], set(), []
    for file in files:
        try:
            trace = load(file, **options)
        except UsageError as error:
            unreadable.append(str(error))
            continue
        if trace.rank in taken:
            free = next(r for r in range(len(files) + 1) if r not in taken)
            trace = _with_rank(trace, free, f"rank {trace.rank} is claimed by another file too; called {free} here")
        taken.add(trace.rank)
        traces.append(trace)
    if not traces:
        raise UsageError(unreadable[0])
    return sorted(traces, key=lambda t: t.rank)


def _with_rank(trace: Trace, rank: int, note: str) -> Trace:
    return replace(trace, rank=rank, facts=replace(trace.facts, notes=(*trace.facts.notes, note)))


def _read(path: Path, processes: int | None, max_events: int) -> tuple[Columns, dict[str, Any], dict[str, Any]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    if not compressed and size > PARALLEL_ABOVE_BYTES and processes != 1:
        count = min(processes or min(os.cpu_count() or 1, 8), max(1, size // (64 << 20)))
        if count > 1:
            return _read_in_parallel(path, size, count, max_events)
    columns = Columns()
    with path.open("rb") as file:
        stream: Any = _Inflate(file) if compressed else file
        counted = _Counted(stream)
        header, trailer, truncated = _stream_events(counted, columns, max_events)
    metadata = _metadata(header, trailer, columns.tally)
    if columns.tally.events_seen == 0:
        raise UsageError(f"{path} holds no trace events: is it a profiler trace in Chrome JSON format?")
    return (
        columns,
        metadata,
        {"file_bytes": size, "text_bytes": counted.bytes, "truncated": truncated or counted.broken},
    )


class _Inflate:
    """Gzip as a stream that hands out all that can be inflated before it says that the end is missing."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.inflate, self.waiting = file, zlib.decompressobj(31), b""

    def read(self, wanted: int) -> bytes:
        parts: list[bytes] = []
        have = 0
        while have < wanted:
            data = self.waiting or self.file.read(1 << 18)
            self.waiting = b""
            if not data:
                if not self.inflate.eof and not parts:
                    raise EOFError("the compressed file ends in the middle")
                break
            if self.inflate.eof:  # another member, or padding
                data = data.lstrip(b"\0")
                if not data:
                    continue
                self.inflate = zlib.decompressobj(31)
            try:
                part = self.inflate.decompress(data, wanted - have)
            except zlib.error:
                if not parts:
                    raise
                self.waiting = data  # met again by the next call, which has nothing to hand out
                break
            self.waiting = self.inflate.unused_data or self.inflate.unconsumed_tail
            parts.append(part)
            have += len(part)
        return b"".join(parts)


class _Counted:
    """Reads blocks, counts them, and ends quietly where a compressed stream is cut off."""

    def __init__(self, stream: BinaryIO, limit: int | None = None) -> None:
        self.stream, self.limit, self.bytes, self.broken = stream, limit, 0, False

    def read(self) -> bytes:
        wanted = BLOCK_BYTES if self.limit is None else min(BLOCK_BYTES, self.limit - self.bytes)
        if wanted <= 0 or self.broken:
            return b""
        try:
            block = self.stream.read(wanted)
        except (EOFError, zlib.error):
            if self.bytes == 0:
                raise
            self.broken = True
            return b""
        self.bytes += len(block)
        return block


def _find_start(source: _Counted) -> tuple[bytes, bytes]:
    """The text before the first event, and what was read beyond it."""
    text = source.read()
    if text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        at = text.index(b"[") + 1
        return b"{", text[at:]
    while True:
        found = _START.search(text)
        if found is not None:
            return text[: found.start()], text[found.end() :]
        more = source.read()
        if not more or len(text) > MAX_HEADER_BYTES:
            raise UsageError('not a profiler trace: no "traceEvents" array in the file')
        text += more


def _boundary(first_key: bytes) -> re.Pattern[bytes]:
    keys = b"|".join(re.escape(k) for k in {first_key, b"ph", b"name"})
    return re.compile(rb"\}\s*,\s*(?=\{\s*\"(?:" + keys + rb")\"\s*:)")


def _stream_events(source: _Counted, columns: Columns, max_events: int) -> tuple[bytes, bytes, bool]:
    """Feed all events to `columns`. Returns the text before and after the event array, and whether the end is
    missing.
    """
    header, text = _find_start(source)
    first = _FIRST_KEY.match(text) or _FIRST_KEY.match(text := text + source.read())
    boundary = _boundary(first.group(1) if first else b"ph")
    unread: list[bytes] = []
    for chunk, last in _chunks(source, text, boundary, unread):
        if last:
            return header, *_last_chunk(chunk, columns)
        rest = columns.add(chunk)
        if columns.tally.events_seen > max_events:
            raise UsageError(f"more than {max_events} events: cut the trace, or raise max_events")
        if rest.startswith(b"]"):
            return header, rest + b"," + _drain(source), False
        if rest:
            unread.append(rest)
    return header, b"", True


def _chunks(
    source: _Counted, text: bytes, boundary: re.Pattern[bytes], unread: list[bytes]
) -> Iterator[tuple[bytes, bool]]:
    """Whole events, about a block at a time; the last piece (from the last event's start) is marked.

    What the caller could not read of a piece, because it was cut inside an event, it puts into `unread`: it then
    comes first in the next piece.
    """
    carry, ended = text, False
    while True:
        block = b"" if ended else source.read()
        ended = not block
        carry += block
        cut = _last_boundary(carry, boundary)
        if cut is not None:
            separator, rest = carry[cut[0] : cut[1]], carry[cut[1] :]
            yield carry[: cut[0]], False
            carry = (unread.pop() + separator if unread else b"") + rest
        if len(carry) > MAX_CARRY_BYTES:
            raise UsageError(f"no end of an event within {MAX_CARRY_BYTES >> 20} MiB: not a profiler trace")
        if ended:
            yield carry, True
            return


def _last_boundary(text: bytes, boundary: re.Pattern[bytes]) -> tuple[int, int] | None:
    """(end of the last whole event, start of the next) in `text`."""
    window = 64 << 10
    while True:
        start = max(0, len(text) - window)
        last = None
        for last in boundary.finditer(text, start):  # noqa: B007 - the last match is what we want
            pass
        if last is not None:
            return last.start() + 1, last.end()
        if start == 0:
            return None
        window *= 8


def _last_chunk(chunk: bytes, columns: Columns) -> tuple[bytes, bool]:
    """The last event and what follows the array: returns (text after the array, whether its end is missing)."""
    raw, rest, skipped = read_event_by_event(chunk)
    columns.tally.skipped_events += skipped
    if raw:
        # From the text itself where possible: decoded numbers would have lost digits of fractional clocks since 1970.
        whole = chunk[: len(chunk) - len(rest)].rstrip().rstrip(b",") if chunk.endswith(rest) and not skipped else b""
        columns.add(whole or json.dumps(raw).encode()[1:-1])
    return rest, not rest.startswith(b"]")


def _drain(source: _Counted) -> bytes:
    """What is left of the file after the event array, up to a bound: the metadata that some writers put there."""
    parts: list[bytes] = []
    while sum(map(len, parts)) < MAX_HEADER_BYTES and (block := source.read()):
        parts.append(block)
    return b"".join(parts)


def _metadata(header: bytes, trailer: bytes, tally: Tally) -> dict[str, Any]:
    """The top-level keys around the events; {} and a note where they do not parse."""
    merged: dict[str, Any] = {}
    before = header.strip().lstrip(b"\xef\xbb\xbf").rstrip(b", \r\n\t")
    after = trailer.strip()[1:].strip(b", \r\n\t")
    for text in (before + b"}", b"{" + (after or b"}")):
        try:
            value = json.loads(text.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            if len(text.strip(b"{} \n")) > 0:
                tally.notes.append("some of the trace's metadata could not be read")
            continue
        if isinstance(value, dict):
            merged.update(value)
    return merged


# --- several processes ---------------------------------------------------------------------------------------------


def _read_in_parallel(
    path: Path, size: int, count: int, max_events: int
) -> tuple[Columns, dict[str, Any], dict[str, Any]]:
    """Cut the file at event boundaries into `count` spans; a worker decodes each and leaves its columns in files."""
    with path.open("rb") as file:
        header, text = _find_start(_Counted(file))
        start = size if not text else file.tell() - len(text)
        first = _FIRST_KEY.match(text)
        boundary = _boundary(first.group(1) if first else b"ph")
        cuts = [start]
        for i in range(1, count):
            at = start + (size - start) * i // count
            file.seek(at)
            found = _event_start(file.read(BLOCK_BYTES), boundary)
            if found is not None and at + found > cuts[-1]:
                cuts.append(at + found)
    cuts.append(size)
    with tempfile.TemporaryDirectory(prefix="fettle-trace-") as scratch:
        jobs = [
            (str(path), a, b, i, scratch, boundary.pattern, max_events)
            for i, (a, b) in enumerate(itertools.pairwise(cuts))
        ]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(max_workers=len(jobs) - 1 or 1, mp_context=context) as pool:
            pending = [pool.submit(_decode_span, *job) for job in jobs[1:]]
            own = _decode_span(*jobs[0][:4], None, *jobs[0][5:])
            parts = [own, *(p.result() for p in pending)]
        columns, trailer, truncated = _join(parts)
    metadata = _metadata(header, trailer, columns.tally)
    return columns, metadata, {"file_bytes": size, "text_bytes": size, "truncated": truncated}


def _event_start(text: bytes, boundary: re.Pattern[bytes]) -> int | None:
    """Where an event starts in a piece of the file: a boundary behind which an event can be read, not a part of its
    arguments.
    """
    decoder = json.JSONDecoder(strict=False)
    for found in itertools.islice(boundary.finditer(text), 1000):
        try:
            event, _ = decoder.raw_decode(text[found.end() : found.end() + (1 << 17)].decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and "ph" in event and "pid" in event:
            return found.end()
    return None


def _decode_span(
    path: str, start: int, stop: int, index: int, scratch: str | None, pattern: bytes, max_events: int
) -> dict[str, Any]:
    """Decode bytes [start, stop) of a file: whole events. Runs in a worker; big columns travel as files."""
    columns, boundary = Columns(), re.compile(pattern)
    trailer, truncated, ended = b"", False, False
    with open(path, "rb") as file:
        file.seek(start)
        source = _Counted(file, stop - start)
        at_end = stop == os.path.getsize(path)
        unread: list[bytes] = []
        for chunk, last in _chunks(source, b"", boundary, unread):
            if last and at_end:
                trailer, truncated = _last_chunk(chunk, columns)
                ended = True
                continue
            text = chunk.rstrip().rstrip(b",") if last else chunk
            rest = columns.add(text)
            if rest.startswith(b"]"):
                trailer, ended = rest + b"," + _drain(source), True
                break
            if rest and not last:
                unread.append(rest)
            if columns.tally.events_seen > max_events:
                raise UsageError(f"more than {max_events} events: cut the trace, or raise max_events")
    part: dict[str, Any] = {
        "names": list(columns.names),
        "threads": list(columns.threads),
        "shapes": list(columns.shapes),
        "side": columns.side,
        "thread_names": columns.thread_names,
        "tally": columns.tally,
        "rows": columns.rows,
        "trailer": trailer,
        "truncated": truncated,
        "ended": ended,
    }
    if scratch is None:
        part["chunks"] = columns.chunks
        return part
    for name in EVENT_COLUMNS:
        arrays = [chunk.pop(name) for chunk in columns.chunks]
        np.save(Path(scratch) / f"{index}-{name}.npy", np.concatenate(arrays) if arrays else np.zeros(0, np.int64))
    part["files"] = {name: str(Path(scratch) / f"{index}-{name}.npy") for name in EVENT_COLUMNS}
    return part


def _join(parts: list[dict[str, Any]]) -> tuple[Columns, bytes, bool]:
    """Put the spans' columns behind one another, their text numbers translated into common ones."""
    joined = Columns()
    trailer, truncated = b"", False
    for part in parts:
        names = np.array([joined.names[n] for n in part["names"]], dtype=np.uint32)
        threads = np.array([joined.threads[t] for t in part["threads"]], dtype=np.int32)
        shapes = np.array([joined.shapes[s] for s in part["shapes"]], dtype=np.uint32)
        files = part.get("files")
        chunks = part["chunks"] if files is None else [{name: np.load(file) for name, file in files.items()}]
        for chunk in chunks:
            if len(chunk["ts_ns"]):
                chunk["name"] = names[chunk["name"]]
                chunk["thread"] = threads[chunk["thread"]]
                chunk["shape"] = shapes[chunk["shape"]]
                joined.chunks.append(chunk)
        for table, frames in part["side"].items():
            for frame in frames:
                if "row" in frame.columns:
                    frame = frame.with_columns(pl.col("row") + joined.rows)
                if "thread" in frame.columns:
                    frame = frame.with_columns(thread=pl.Series(threads[frame["thread"].to_numpy()], dtype=pl.Int32()))
                joined.side.setdefault(table, []).append(frame)
        joined.rows += part["rows"]
        joined.thread_names.update(part["thread_names"])
        joined.tally.add(part["tally"])
        if part["ended"]:
            trailer, truncated = part["trailer"], part["truncated"]
    return joined, trailer, truncated


# --- columns to a Trace --------------------------------------------------------------------------------------------


def _assemble(path: Path, rank: int | None, columns: Columns, metadata: dict[str, Any], facts: dict[str, Any]) -> Trace:
    data = {}
    for name, dtype in EVENT_COLUMNS.items():
        # Column by column, letting go of the pieces, so that the peak is the columns plus one of them.
        arrays = [chunk.pop(name) for chunk in columns.chunks]
        values = np.concatenate(arrays) if arrays else np.zeros(0, np.int64)
        data[name] = pl.Series(name, values, dtype=dtype)
    side = {
        table: pl.concat(columns.side[table]) if table in columns.side else pl.DataFrame(schema=schema)
        for table, schema in SIDE_TABLES.items()
    }
    tally = columns.tally
    threads = _unify_threads(columns, data, side)
    events = pl.DataFrame(data)
    events, side, outliers = _drop_outliers(events, side)
    return Trace(
        path=path,
        rank=_rank(path, metadata) if rank is None else rank,
        events=events,
        names=[_clean(n) for n in columns.names],
        threads=threads,
        shapes=[b"".join(s.split()).decode("utf-8", "replace") for s in columns.shapes],
        side=side,
        metadata=metadata,
        thread_names=columns.thread_names,
        facts=ReadFacts(
            events_seen=tally.events_seen,
            skipped_events=tally.skipped_events,
            repaired_bytes_chunks=tally.repaired_chunks,
            negative_durations=tally.negative_durations,
            absurd_times=tally.absurd_times + outliers,
            missing_duration=tally.missing_duration,
            wide_clock_chunks=tally.wide_clock_chunks,
            flow_events=tally.flow_events,
            unknown_categories=tuple(sorted(tally.unknown_categories)),
            notes=tuple(tally.notes),
            **facts,
        ),
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
    kinds = events["kind"].to_numpy()
    work = np.isin(kinds, [*HOST_KINDS, *DEVICE_KINDS])
    if not work.any():
        return events, side, 0
    ts = events["ts_ns"].to_numpy()
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
    told = info.get("rank") if isinstance(info, dict) else None
    if isinstance(told, int) and 0 <= told < 10**7:
        return told
    found = _RANK_IN_NAME.search(path.name)
    return int(found.group(1)) if found else 0


def open_text(path: Path) -> io.BufferedIOBase:
    """The bytes of a trace's JSON, plain or gzipped."""
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if compressed else path.open("rb")
