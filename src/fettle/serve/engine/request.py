"""A request that waits for its batch, and its answer, cut out of what a worker sends back for all of them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import msgspec

from fettle.package.tensors import TensorSpec
from fettle.serve.engine import wire


class Request(msgspec.Struct, eq=False):
    """One waiting request: tensors (`arrays`), or a raw body for the handler. Moments are of `time.perf_counter`."""

    rows: int
    key: Hashable
    """Requests with equal keys may share a call."""
    arrays: Sequence[Any] = ()
    body: bytes | None = None
    kind: str = ""
    gone: Callable[[], bool] | None = None
    """Whether the client has gone away; asked just before dispatch."""
    explain: bool = False
    target: int = -1
    """With `explain`: the element of the first output to explain; -1 for the largest."""
    piece: Callable[[bytes], None] | None = None
    """Hears each piece of a text that is being written. None: the request asks for no text."""
    pieces: int = 0
    """Pieces passed on so far: after the first it cannot be tried again."""
    queued: bool = False
    """Kept by the queue: False again once it has been taken, discarded or expired."""
    tries: int = 0
    arrival_s: float = 0.0
    sent_s: float = 0.0
    """When a text joined those that a worker writes."""
    last_piece_s: float = 0.0
    """When its last piece came."""
    deadline_s: float = math.inf
    answer: asyncio.Future[Answer] = None  # type: ignore[assignment]
    """Set with its moments when it begins to wait."""


class Answer(msgspec.Struct):
    """What came back, and where the time went, in seconds."""

    outputs: list[Any] = []
    body: bytes = b""
    kind: str = ""
    queue_s: float = 0.0
    join_s: float = 0.0
    model_s: float = 0.0
    batch_rows: int = 0
    arrival_s: float = 0.0
    done_s: float = 0.0
    """Moments of `time.perf_counter`."""


def answers(items: Sequence[Request], specs: Sequence[TensorSpec], done: wire.Done, body: memoryview) -> list[Answer]:
    """One for each of `items`: a body from a handler, else its rows of each output, and all of one without rows."""
    if items[0].body is not None:
        bodies = wire.pieces(body, [length for (length,) in done.shapes])
        return [Answer(body=part, kind=kind) for part, kind in zip(bodies, done.kinds, strict=True)]
    arrays, row, made = wire.arrays([spec.kind for spec in specs], done.shapes, body)[0], 0, []
    for request in items:
        end = row + request.rows
        parts = [array[row:end] if spec.batched else array for spec, array in zip(specs, arrays, strict=True)]
        made.append(Answer(parts))
        row = end
    return made
