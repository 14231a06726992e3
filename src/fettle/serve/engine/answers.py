"""What a worker sends back for a call, cut into each request's answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fettle.package.tensors import TensorSpec
from fettle.serve.engine import wire
from fettle.serve.engine.request import Answer, Request


def answers(
    items: Sequence[Request], specs: Sequence[TensorSpec], done: wire.Done, body: memoryview
) -> Iterator[Answer]:
    """One for each of `items`, in their order: a body of its own from a handler, else its rows of each output."""
    if items[0].body is not None:
        bodies = wire.pieces(body, [length for (length,) in done.shapes])
        return (Answer(body=part, kind=kind) for part, kind in zip(bodies, done.kinds, strict=True))
    return _rows(items, wire.arrays([spec.kind for spec in specs], done.shapes, body)[0], specs)


def _rows(items: Sequence[Request], arrays: Sequence[Any], specs: Sequence[TensorSpec]) -> Iterator[Answer]:
    """The outputs of a call, cut into each request's rows; what has no rows is everybody's."""
    row = 0
    for request in items:
        end = row + request.rows
        yield Answer([array[row:end] if spec.batched else array for spec, array in zip(specs, arrays, strict=True)])
        row = end
