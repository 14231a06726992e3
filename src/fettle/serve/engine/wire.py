"""What the server and its worker processes say to each other, over a socket pair: a header and raw tensors.

A frame is the lengths of header and body, the header in MessagePack, and the body. Neither side unpickles anything.
A large body to the worker stands in memory that both have mapped, and only its length is sent: through the socket it
would be copied three times, in pieces of the socket's buffer. That memory has no name, so nobody else can open it.
"""

from __future__ import annotations

import itertools
import math
import mmap
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from fettle.package.settings import ServeSettings

Shape = tuple[int, ...]
PREFIX = struct.Struct("<IQ")
SHARED = 1 << 63
"""In a body's length: the body stands in the shared memory."""
SHARED_FROM = 1 << 20
"""Bodies of this size, and up to the memory's, go through it."""


class _Message(msgspec.Struct, tag=str.lower, array_like=True):
    """Called by its class on the wire."""


class _OfCall(_Message):
    """Says which call it belongs to."""

    id: int


class Load(_Message):
    """To the worker, once: open this package and warm these batch sizes."""

    folder: str
    settings: ServeSettings
    sizes: list[int]
    threads: int
    cores: list[int]
    trust: str
    device: str
    explain: bool
    sharing: int
    """Workers on its device, which share the memory that is free."""


class Run(_OfCall):
    """To the worker: one call. `shapes[request][input]` describes the body, in this order."""

    size: int
    shapes: list[list[Shape]]
    explain: int | None = None
    """Answer with what moved this element of the first output of the only request (-1: the largest)."""


class Call(_OfCall):
    """To the worker: raw bodies for the handler's four steps; their lengths describe the body."""

    lengths: list[int]
    kinds: list[str]
    explain: bool = False
    """Answer with what moved the answer, instead of the answer."""


class Generate(_OfCall):
    """To the worker: write a text, while others are written. The body is the JSON of what is asked for."""


class Cancel(_OfCall):
    """To the worker: nobody waits for this text any more."""


class Piece(_OfCall):
    """From the worker: the body is the JSON of a text's next piece, or of its `last`."""

    last: bool = False


class Wrote(_Message):
    """From the worker, from time to time while it writes texts: rows of calls, their number and seconds since then."""

    calls: list[tuple[int, int, float]]
    rss: int
    metrics: list[tuple[str, str, float]] = []


class Ping(_OfCall):
    """To the worker: are you there?"""


class Ready(_Message):
    """From the worker: loaded and warm."""

    load_s: float
    texts: int = 0
    """How many it can write at once."""


class Done(_OfCall):
    """From the worker: the outputs' shapes, or the bodies' lengths; and where the time went."""

    shapes: list[Shape]
    join_s: float
    model_s: float
    rss: int
    kinds: list[str] = []
    metrics: list[tuple[str, str, float]] = []
    """What the handler counted: kind, name, value."""
    pre_s: float = 0.0
    post_s: float = 0.0
    """Time of a handler's steps before and after the model."""


class Failed(_OfCall):
    """From the worker: this call, or the loading (id -1), raised. `usage`: the text is for whoever started us."""

    reason: str
    usage: bool = False
    too_long: bool = False
    """Whether the prompt is too long."""


class Pong(_OfCall):
    """From the worker: here I am."""

    rss: int


ToWorker = Load | Run | Call | Generate | Cancel | Ping
FromWorker = Ready | Piece | Wrote | Done | Failed | Pong
_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


class Frames:
    """A worker's messages out of a stream that comes in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._need = PREFIX.size

    def feed(self, data: bytes) -> Iterator[tuple[FromWorker, memoryview]]:
        """Every header and body that is whole now. Bodies are views of what was received. Raises
        `msgspec.MsgspecError` for what is no message."""
        self._buffer += data
        while len(self._buffer) >= self._need:
            head, body = PREFIX.unpack_from(self._buffer)
            whole = PREFIX.size + head + body
            if len(self._buffer) < whole:
                self._need = whole
                return
            # The buffer is handed on, not copied.
            if len(self._buffer) == whole:
                taken, self._buffer = self._buffer, bytearray()
            else:
                taken = self._buffer[:whole]
                del self._buffer[:whole]
            self._need = PREFIX.size
            view = memoryview(taken)
            yield _from_worker.decode(view[PREFIX.size : PREFIX.size + head]), view[PREFIX.size + head :]


def frame(header: ToWorker | FromWorker, body: Sequence[Any] = ()) -> list[Any]:
    """The buffers of one frame, for a gathering write. Those of the body hold bytes, as `flat` makes them."""
    head = _encoder.encode(header)
    return [PREFIX.pack(len(head), sum(map(len, body))) + head, *filter(len, body)]


def shared_frame(header: ToWorker, body: Sequence[Any], memory: mmap.mmap) -> bytes:
    """One frame whose body is put into the shared memory: what is left to send."""
    place = 0
    for part in body:
        view = memoryview(part).cast("B")
        memory[place : place + len(view)] = view
        place += len(view)
    head = _encoder.encode(header)
    return PREFIX.pack(len(head), place | SHARED) + head


def flat(array: Any) -> memoryview:
    """An array's memory, without a copy where it is contiguous."""
    if array.size and array.flags.c_contiguous:
        return memoryview(array).cast("B")  # a fifth of the time of what follows
    plain: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(plain)


def arrays(kinds: Sequence[Any], shapes: Sequence[Shape], body: memoryview, place: int = 0) -> tuple[list[Any], int]:
    """Arrays of these dtypes and shapes as views of a body from `place` on, and where they end."""
    views = []
    for kind, shape in zip(kinds, shapes, strict=True):
        count = math.prod(shape)
        views.append(np.frombuffer(body, kind, count, place).reshape(shape))
        place += count * kind.itemsize
    return views, place


def pieces(body: memoryview, lengths: Sequence[int]) -> list[bytes]:
    """A body cut into the bodies of its requests."""
    ends = list(itertools.accumulate(lengths))
    return [bytes(body[end - length : end]) for length, end in zip(lengths, ends, strict=True)]
