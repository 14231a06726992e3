"""What the server and its worker processes say to each other, over a socket pair: a header and raw tensors.

A frame is the lengths of header and body, the header in MessagePack, and the body. Neither side unpickles anything.
A large body to the worker stands in memory that both have mapped, and only its length is sent: through the socket it
would be copied three times, in pieces of the socket's buffer. That memory has no name, so nobody else can open it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

PREFIX = struct.Struct("<IQ")
MAX_HEADER = 16 << 20
SHARED = 1 << 63
"""In a body's length: the body stands in the shared memory."""
SHARED_FROM, SHARED_BYTES = 1 << 20, 256 << 20
"""Bodies of this size and up to that go through it. Pages take memory only once they were used."""


class Load(msgspec.Struct, tag="load", array_like=True):
    """To the worker, once: open this package and warm these batch sizes."""

    folder: str
    sizes: list[int]
    threads: int
    cores: list[int]
    trust: str = ""
    device: str = "cpu"
    explain: bool = False


class Run(msgspec.Struct, tag="run", array_like=True):
    """To the worker: one call. `shapes[request][input]` describes the body, in this order."""

    id: int
    size: int
    shapes: list[list[list[int]]]


class Call(msgspec.Struct, tag="call", array_like=True):
    """To the worker: raw bodies for the handler's four steps; their lengths describe the body."""

    id: int
    lengths: list[int]
    kinds: list[str]
    explain: bool = False
    """Answer with what moved the answer, instead of the answer."""


class Explain(msgspec.Struct, tag="explain", array_like=True):
    """To the worker: what moved the answer of one request, whose inputs' shapes describe the body."""

    id: int
    shapes: list[list[int]]
    target: int = -1


class Generate(msgspec.Struct, tag="generate", array_like=True):
    """To the worker: prompts to answer piece by piece; their lengths describe the body. `Done` has none then."""

    id: int
    lengths: list[int]


class Cancel(msgspec.Struct, tag="cancel", array_like=True):
    """To the worker, during `Generate`: nobody waits for this prompt's answer any more."""

    id: int
    index: int


class Piece(msgspec.Struct, tag="piece", array_like=True):
    """From the worker, during `Generate`: the body is the next piece of this prompt's answer, or `last`, all of it."""

    id: int
    index: int
    last: bool = False


class Ping(msgspec.Struct, tag="ping", array_like=True):
    """To the worker: are you there?"""

    id: int


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """From the worker: loaded and warm."""

    pid: int
    seconds: dict[int, float]
    """Of a warm call, by batch size."""
    load_s: float


class Done(msgspec.Struct, tag="done", array_like=True):
    """From the worker: the outputs' shapes, or the bodies' lengths; and where the time went."""

    id: int
    shapes: list[list[int]]
    join_s: float
    model_s: float
    rss: int
    kinds: list[str] = []
    metrics: list[tuple[str, str, float]] = []
    """What the handler counted: kind, name, value."""


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """From the worker: this call, or the loading (id -1), raised. `usage`: the text is for whoever started us."""

    id: int
    reason: str
    usage: bool = False


class Pong(msgspec.Struct, tag="pong", array_like=True):
    """From the worker: here I am."""

    id: int
    rss: int


ToWorker = Load | Run | Call | Explain | Generate | Cancel | Ping
FromWorker = Ready | Piece | Done | Failed | Pong
_encoder = msgspec.msgpack.Encoder()
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)


def frame(header: ToWorker | FromWorker, body: Sequence[Any] = ()) -> list[Any]:
    """The buffers of one frame, for a gathering write."""
    head = _encoder.encode(header)
    views = [memoryview(part).cast("B") if len(part) else b"" for part in body]
    return [PREFIX.pack(len(head), sum(len(view) for view in views)) + head, *views]


def shared_memory() -> tuple[int, mmap.mmap] | None:
    """Memory for one worker's bodies, and the descriptor that the worker maps. None where there cannot be any."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("fettle")
    try:
        os.ftruncate(descriptor, SHARED_BYTES)
        return descriptor, mmap.mmap(descriptor, SHARED_BYTES)
    except OSError:  # a limit on file sizes holds for this too
        os.close(descriptor)
        return None


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
    plain: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(plain)
