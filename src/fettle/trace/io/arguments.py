"""What the columns leave out, read from the file once more where it is asked for: types and values of inputs, and how
far a launch fills the device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import TypeVar

import msgspec
import numpy as np
import polars as pl

from fettle.errors import UsageError
from fettle.trace.io.stream import Counted, begin, chunks, text_of
from fettle.trace.kinds import Kind, kind_of_category
from fettle.trace.model import Trace

T = TypeVar("T")

_Texts = tuple[tuple[str, ...], tuple[str, ...]]


class _Inputs(msgspec.Struct, gc=False):
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b"[]"))
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b"[]"))


class _Call(msgspec.Struct, gc=False):
    ph: str = ""
    name: str | None = None
    args: _Inputs | None = None


class _Launch(msgspec.Struct, gc=False):
    blocks: float | None = msgspec.field(name="blocks per SM", default=None)
    occupancy: float | None = msgspec.field(name="est. achieved occupancy %", default=None)


class _Kernel(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    args: _Launch | None = None


_calls = msgspec.json.Decoder(list[_Call]).decode
_kernels = msgspec.json.Decoder(list[_Kernel]).decode
_texts = msgspec.json.Decoder(tuple[str, ...]).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)


def operator_inputs(trace: Trace, operators: Collection[str]) -> dict[str, list[_Texts]]:
    """By operator, for each of its calls in the file's order: the types of its inputs, and their values as text (empty
    for tensors). Fewer calls than the trace has where the file is gone or parts of it cannot be read.
    """
    by_operator: dict[str, list[_Texts]] = {name: [] for name in operators}
    known: dict[tuple[bytes, bytes], _Texts] = {}
    for call in _again(trace, _calls):
        if call.ph == "X" and call.name in by_operator:
            inputs = call.args or _Inputs()
            key = bytes(inputs.types), bytes(inputs.values)
            with suppress(*_UNREADABLE):
                if key not in known:
                    known[key] = _texts(key[0]), _texts(key[1])
                by_operator[call.name].append(known[key])
    return by_operator


def kernel_launches(trace: Trace) -> pl.DataFrame:
    """What the profiler recorded of kernels' launches: row, blocks_per_sm, occupancy (0 to 1, estimated). Nothing where
    it recorded none, or where the file is gone or parts of it cannot be read.
    """
    schema = {"row": pl.Int64(), "blocks_per_sm": pl.Float64(), "occupancy": pl.Float64()}
    rows = np.flatnonzero(trace.kind == Kind.KERNEL)
    if not len(rows):
        return pl.DataFrame(schema=schema)
    complete = (event for event in _again(trace, _kernels) if event.ph == "X")
    found = [event.args for event in complete if kind_of_category(event.cat or "") == Kind.KERNEL]
    if len(found) != len(rows):  # which kernels these are is not known
        return pl.DataFrame(schema=schema)
    told = [
        (row, args.blocks, None if args.occupancy is None else args.occupancy / 100)
        for row, args in zip(rows.tolist(), found, strict=True)
        if args is not None and args.blocks is not None and args.blocks >= 0  # -1: not known to the profiler
    ]
    return pl.DataFrame(told, schema=schema, orient="row")


def _again(trace: Trace, decode: Callable[[bytes], list[T]]) -> Iterator[T]:
    """The file's events once more. Parts that cannot be read are left out."""
    with suppress(OSError, EOFError, zlib.error, UsageError), trace.path.open("rb") as file:
        source = Counted(text_of(file))
        _, text, boundary = begin(source)
        for chunk, last in chunks(source, text, boundary, []):
            whole = chunk[: chunk.rfind(b"}", 0, chunk.rfind(b"]")) + 1] if last else chunk
            with suppress(*_UNREADABLE):
                yield from decode(b"[" + whole + b"]")
