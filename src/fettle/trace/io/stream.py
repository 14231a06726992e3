"""The text of a trace as a stream of chunks of whole events; never held whole.

A chunk ends where one event ends and the next begins: at `}`, a comma, and `{` followed by the key that events of this
file begin with. Inside a JSON string a quote is escaped, so that sequence cannot occur there; inside an event's
arguments it can, which is why every chunk is verified by decoding it.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import Any

from fettle.errors import UsageError
from fettle.procs.limits import granted_memory_bytes
from fettle.trace.io.decode import Columns
from fettle.trace.io.mend import read_event_by_event
from fettle.trace.model import ReadFacts

# Small enough that a block, its events and its arrays stay in memory that the process already has: with 8 MiB, handing
# memory back and taking it again cost as much as decoding.
BLOCK_BYTES = 512 << 10
MAX_CARRY_BYTES = 16 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_METADATA_BYTES = 16 << 20
SPARE_BYTES = 32 << 20
"""Less free memory is none for another 8 MiB of text; and the longest columns are copied once more at the end."""
_NEARLY_ALL_EVENTS_BYTES = 16 << 10

_START = re.compile(rb'"traceEvents"\s*:\s*\[')
_FIRST_KEY = re.compile(rb'\s*\{\s*"([^"\\]{1,40})"')
Stream = BufferedReader | gzip.GzipFile


class NoMemoryLeft(UsageError):
    """The file may be in order: unlike one that is not, it is left out of no folder."""


class Counted:
    """Reads blocks, counts them, and ends quietly where a compressed stream is cut off."""

    def __init__(self, stream: Stream, limit: int | None = None, on_read: Callable[[], None] | None = None) -> None:
        self.stream, self.limit, self.on_read = stream, limit, on_read
        self.bytes, self.broken = 0, False

    def read(self) -> bytes:
        wanted = BLOCK_BYTES if self.limit is None else min(BLOCK_BYTES, self.limit - self.bytes)
        block = bytearray()
        try:
            # Piece by piece: what could be inflated before an error is not lost with it.
            while not self.broken and len(block) < wanted and (part := self.stream.read1(wanted - len(block))):
                block += part
        except (EOFError, zlib.error, gzip.BadGzipFile):
            if not self.bytes and not block:
                raise
            self.broken = True
        self.bytes += len(block)
        if self.on_read is not None:
            self.on_read()
        return bytes(block)


def find_start(source: Counted) -> tuple[bytes, bytes]:
    """The text up to the first event, with the bracket before it, and what was read beyond that."""
    text = source.read()
    if text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        at = text.index(b"[") + 1
        return text[:at], text[at:]
    sought = 0
    while True:
        match = _START.search(text, sought)
        if match is not None:
            return text[: match.end()], text[match.end() :]
        more = source.read()
        if not more or len(text) > MAX_HEADER_BYTES:
            raise UsageError('not a profiler trace: no "traceEvents" array in the file')
        sought = max(0, len(text) - 1024)
        text += more


def boundary_of(first_key: bytes) -> re.Pattern[bytes]:
    keys = b"|".join(re.escape(k) for k in {first_key, b"ph", b"name"})
    return re.compile(rb"\}\s*,\s*(?=\{\s*\"(?:" + keys + rb")\"\s*:)")


def begin(source: Counted) -> tuple[bytes, bytes, re.Pattern[bytes]]:
    """What `find_start` says, and what parts two events of this file."""
    header, text = find_start(source)
    first = _FIRST_KEY.match(text) or _FIRST_KEY.match(text := text + source.read())
    return header, text, boundary_of(first.group(1) if first else b"ph")


def feed(
    source: Counted,
    text: bytes,
    boundary: re.Pattern[bytes],
    columns: Columns,
    max_events: int,
    to_the_end: bool = True,
) -> None:
    """Feed the events of `text` and of what follows it to `columns`; the text after the event array, which a part that
    is not read `to_the_end` may lack."""
    unread: list[bytes] = []
    for number, (chunk, last) in enumerate(chunks(source, text, boundary, unread)):
        if number % 16 == 15 and granted_memory_bytes() < SPARE_BYTES + columns.rows * 16:
            raise NoMemoryLeft(
                "no memory is left for all of its events: record fewer steps, or open it on a larger machine"
            )
        if columns.trailer:  # the array has ended: what follows may hold what looks like the beginnings of events
            columns.trailer += b"," + chunk
            if len(columns.trailer) > MAX_METADATA_BYTES:
                return
            continue
        if last and to_the_end:
            _last_chunk(chunk, columns)
            return
        rest = columns.add(chunk.rstrip().rstrip(b",") if last else chunk)
        if columns.facts.events_seen > max_events:
            raise UsageError(f"more than {max_events} events: cut the trace, or raise max_events")
        if rest.startswith(b"]"):
            columns.trailer = rest
        elif rest:
            unread.append(rest)


def chunks(
    source: Counted, text: bytes, boundary: re.Pattern[bytes], unread: list[bytes]
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
    for start in (max(0, len(text) - _NEARLY_ALL_EVENTS_BYTES), 0):
        last = deque(boundary.finditer(text, start), maxlen=1)
        if last:
            return last[0].start() + 1, last[0].end()
    return None


def _last_chunk(chunk: bytes, columns: Columns) -> None:
    """The last event and what follows the array, whose end may be missing."""
    raw, rest, skipped = read_event_by_event(chunk)
    columns.facts.skipped_events += skipped
    if raw:
        # From the text itself where possible: decoded numbers would have lost digits of fractional clocks since 1970.
        whole = chunk[: len(chunk) - len(rest)].rstrip().rstrip(b",") if chunk.endswith(rest) and not skipped else b""
        columns.add(whole or json.dumps(raw).encode()[1:-1])
    columns.trailer, columns.facts.truncated = rest, not rest.startswith(b"]")


def parse_metadata(header: bytes, trailer: bytes, facts: ReadFacts) -> dict[str, Any]:
    """The top-level keys around the events; {} and a note where they do not parse."""
    merged: dict[str, Any] = {}
    before = _START.sub(b"", header).strip().lstrip(b"\xef\xbb\xbf").rstrip(b"[, \r\n\t")
    after = trailer.strip()[1:].strip(b", \r\n\t")
    for text in (before + b"}", b"{" + (after or b"}")):
        try:
            if len(text) > MAX_METADATA_BYTES:
                raise ValueError
            value = json.loads(text.decode("utf-8", "replace"), strict=False)
        except (ValueError, RecursionError):
            if len(text.strip(b"{} \n")) > 0:
                facts.notes.append("some of the trace's metadata could not be read")
            continue
        if isinstance(value, dict):
            merged.update(value)
    return merged


def text_of(file: BufferedReader) -> Stream:
    """The bytes of an open trace's JSON, plain or gzipped."""
    compressed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if compressed else file
