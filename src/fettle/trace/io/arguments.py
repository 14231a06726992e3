"""What the columns leave out, read from the file once more where it is asked for: types and values of inputs."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress

import msgspec

from fettle.errors import UsageError
from fettle.trace.io.stream import Counted, begin, chunks, text_of
from fettle.trace.model import Trace

_Texts = tuple[tuple[str, ...], tuple[str, ...]]


class _Inputs(msgspec.Struct, gc=False):
    types: msgspec.Raw = msgspec.field(name="Input type", default=msgspec.Raw(b"[]"))
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b"[]"))


class _Call(msgspec.Struct, gc=False):
    ph: str = ""
    name: str | None = None
    args: _Inputs | None = None


_calls = msgspec.json.Decoder(list[_Call]).decode
_texts = msgspec.json.Decoder(tuple[str, ...]).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError)


def operator_inputs(trace: Trace, operators: Collection[str]) -> dict[str, list[_Texts]]:
    """By operator, for each of its calls in the file's order: the types of its inputs, and their values as text (empty
    for tensors). Fewer calls than the trace has where the file is gone or parts of it cannot be read.
    """
    by_operator: dict[str, list[_Texts]] = {name: [] for name in operators}
    known: dict[tuple[bytes, bytes], _Texts] = {}
    for call in _again(trace):
        if call.ph == "X" and call.name in by_operator:
            inputs = call.args or _Inputs()
            key = bytes(inputs.types), bytes(inputs.values)
            with suppress(*_UNREADABLE):
                if key not in known:
                    known[key] = _texts(key[0]), _texts(key[1])
                by_operator[call.name].append(known[key])
    return by_operator


def _again(trace: Trace) -> Iterator[_Call]:
    """The file's events once more. Parts that cannot be read are left out."""
    with suppress(OSError, EOFError, zlib.error, UsageError), trace.path.open("rb") as file:
        source = Counted(text_of(file))
        _, text, boundary = begin(source)
        for chunk, last in chunks(source, text, boundary, []):
            whole = chunk[: chunk.rfind(b"}", 0, chunk.rfind(b"]")) + 1] if last else chunk
            with suppress(*_UNREADABLE):
                yield from _calls(b"[" + whole + b"]")
