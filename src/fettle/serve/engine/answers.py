"""What a worker sends back for a call, cut into each request's answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fettle.package.tensors import TensorSpec
from fettle.serve.engine import wire
from fettle.serve.engine.request import Answer, Request


def answers(
    items: Sequence[Request], specs: Sequence[TensorSpec], done: wire.Done, body: memoryview
) -> Iterator[Answer]:
    """One for each of `items`, in their order: a body of its own from a handler, else its rows of each output."""
    return _bodies(done, body) if items[0].body is not None else _rows(items, _arrays(specs, done.shapes, body), specs)


def _bodies(done: wire.Done, body: memoryview) -> Iterator[Answer]:
    """What a handler answered, cut into one body for each request."""
    place = 0
    for (length,), kind in zip(done.shapes, done.kinds, strict=True):
        yield Answer(body=bytes(body[place : place + length]), kind=kind)
        place += length


def _arrays(specs: Sequence[TensorSpec], shapes: Sequence[wire.Shape], body: memoryview) -> list[Any]:
    """The outputs of a call, as views of what came back."""
    found, place = [], 0
    for spec, shape in zip(specs, shapes, strict=True):
        count = math.prod(shape)
        found.append(np.frombuffer(body, spec.kind, count, place).reshape(shape))
        place += count * spec.kind.itemsize
    return found


def _rows(items: Sequence[Request], arrays: Sequence[Any], specs: Sequence[TensorSpec]) -> Iterator[Answer]:
    """The outputs of a call, cut into each request's rows; what has no rows is everybody's."""
    row = 0
    for request in items:
        end = row + request.rows
        yield Answer([array[row:end] if spec.batched else array for spec, array in zip(specs, arrays, strict=True)])
        row = end
