"""The Open Inference Protocol v2, REST with binary tensors: bytes of a request to arrays, arrays to bytes of an answer.

Everything that a client says is checked before memory is asked for. The form is decided by the header
``Inference-Header-Content-Length``, never by the content type, as clients differ there.
Source: the KServe "open inference protocol" and Triton's binary tensor data extension.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from fettle.package.tensors import TensorSpec
from fettle.serve.engine.refusal import Malformed
from fettle.serve.http.aside import LARGE
from fettle.units import count_text

Array = np.ndarray[Any, Any]
MAX_DIMS = 16
_NONE = msgspec.Raw(b"{}")
"""The parameters of whoever gives none."""


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: msgspec.Raw = _NONE
    data: msgspec.Raw = msgspec.Raw(b"")


class _Output(msgspec.Struct):
    name: str
    parameters: msgspec.Raw = _NONE


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: msgspec.Raw = _NONE
    outputs: list[_Output] | None = None


class Tensor(msgspec.Struct, omit_defaults=True):
    """An output of an answer; without `data` it follows the JSON in binary."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: dict[str, Any] = {}


class Outputs(msgspec.Struct, omit_defaults=True):
    """The JSON of an answer."""

    model_name: str
    model_version: str
    outputs: list[Tensor]
    id: str = ""


_requests = msgspec.json.Decoder(_Request)
_ints = msgspec.json.Decoder(list[int])
_objects = msgspec.json.Decoder(dict[str, Any])
_lists: dict[str, msgspec.json.Decoder[Any]] = {
    "f": msgspec.json.Decoder(list[float]), "i": _ints, "u": _ints, "b": msgspec.json.Decoder(list[bool])
}  # fmt: skip
"""By numpy's letter for a dtype: how flat values are read."""
_VALUES = b"0123456789+-.eEtruefals \t\r\n"
"""The bytes of numbers, true, false and white space."""
_MOST_PARAMETERS = 1 << 14
"""Bytes of an object of parameters: those of long ones would be twenty times as large in memory."""
_UNSUPPORTED = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "classification")


class Inference(msgspec.Struct):
    """A request for one call: arrays in the order of the model's inputs."""

    id: str
    arrays: list[Array]
    rows: int
    wanted: list[tuple[int, bool]]
    """Outputs to give, as (index, in binary)."""
    timeout_s: float | None = None
    parameters: dict[str, Any] = {}


def read_request(
    body: bytes, header_length: int | None, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], max_rows: int
) -> Inference:
    """The arrays of a request. `header_length` is the JSON's length where raw tensors follow it, None without them.

    Raises `Malformed`.
    """
    if header_length == 0:
        return _raw_request(body, inputs, outputs)
    if header_length is not None and not 0 < header_length <= len(body):
        raise Malformed("Inference-Header-Content-Length does not fit the body")
    whole, end = memoryview(body), len(body) if header_length is None else header_length
    try:
        request, rest = _requests.decode(whole[:end]), whole[end:]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"the request is not an inference request: {str(error)[:200]}") from None
    by_name: dict[str, Array] = {}
    place = 0
    for tensor in request.inputs:
        for spec in inputs:
            if spec.name == tensor.name:
                break
        else:
            names = ", ".join(spec.name for spec in inputs)
            raise Malformed(f"no input is called {tensor.name[:80]!r}, only {names}")
        if tensor.name in by_name:
            raise Malformed(f"the input {spec.name} is given twice")
        shape = _shape(tensor, spec, max_rows)
        said = {} if tensor.parameters is _NONE else _parameters(tensor.parameters)
        size = said.get("binary_data_size")
        if said and any(name in said for name in _UNSUPPORTED):
            raise Malformed("shared memory is not supported")
        if size is None:
            by_name[spec.name] = _from_json(tensor, spec, shape)
            continue
        count, kind = math.prod(shape), spec.kind
        if header_length is None or not isinstance(size, int) or isinstance(size, bool):
            raise Malformed(f"the input {spec.name} announces binary data, but the request has none")
        if size != count * kind.itemsize:
            raise Malformed(f"the input {spec.name} has {size} bytes; its shape needs {count * kind.itemsize}")
        if place + size > len(rest):
            raise Malformed("the body is shorter than its tensors")
        by_name[spec.name] = np.frombuffer(rest, kind, count, place).reshape(shape)
        place += size
    if place != len(rest):
        raise Malformed("the body is longer than its tensors")
    arrays, rows = [], 0
    for spec in inputs:
        array = by_name.get(spec.name)
        if array is None:
            raise Malformed(f"the input {spec.name} is missing")
        if spec.batched:
            if rows not in (0, len(array)):
                raise Malformed("the inputs differ in their number of rows")
            rows = len(array)
        arrays.append(array)
    parameters = {} if request.parameters is _NONE else _parameters(request.parameters)
    wanted = _wanted(request.outputs, parameters.get("binary_data_output") is True, outputs)
    timeout_s = _timeout_s(parameters["timeout"]) if "timeout" in parameters else None
    return Inference(request.id, arrays, rows or 1, wanted, timeout_s, parameters)


def _parameters(raw: msgspec.Raw) -> dict[str, Any]:
    if len(memoryview(raw)) > _MOST_PARAMETERS:
        raise Malformed("the parameters are too long")
    try:
        return _objects.decode(raw)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the request is not an inference request: parameters: {str(error)[:200]}") from None


def _shape(tensor: _Input, spec: TensorSpec, max_rows: int) -> tuple[int, ...]:
    if tensor.datatype != spec.datatype:
        raise Malformed(f"the input {spec.name} is {spec.datatype}, not {tensor.datatype[:20]!r}")
    shape = tuple(tensor.shape)
    if len(shape) > MAX_DIMS or not spec.fits(shape) or (shape and min(shape) < 1):
        raise Malformed(f"the input {spec.name} has shape {list(spec.shape)}, not {list(shape)[:MAX_DIMS]}")
    if spec.batched and shape[0] > max_rows:
        raise Malformed(f"a request may have at most {count_text(max_rows, 'row')}, not {shape[0]}")
    return shape


def _from_json(tensor: _Input, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    data, count = bytes(tensor.data), math.prod(shape)
    # Two characters are the least that a number and its comma take: no more is allocated than the body pays for.
    if count > len(data):
        raise Malformed(f"the input {spec.name} has fewer values than its shape {list(shape)}")
    try:
        array = _values(data, spec, shape)
    except OverflowError:
        raise Malformed(f"the input {spec.name} holds a number that no {spec.datatype} can be") from None
    except msgspec.MsgspecError:
        raise Malformed(f"the input {spec.name} is not an array of {spec.datatype}") from None
    if array.size != count:
        raise Malformed(f"the input {spec.name} has {array.size} values; its shape {list(shape)} needs {count}")
    return array.reshape(shape)


def _values(data: bytes, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
    """The values of flat or nested JSON, in order. Large data are decoded piece by piece: decoding one is a single call
    into C, during which no other thread can run."""
    kind = spec.kind
    decode = _lists[kind.kind].decode
    if len(data) < LARGE:
        try:
            return _as_array(decode(data), kind)
        except msgspec.ValidationError:
            pass  # nested
    arrays, brackets, begin = [], [], 0
    while begin < len(data):
        end = data.find(b",", begin + LARGE)
        piece = data[begin : end if end >= 0 else len(data)]
        arrays.append(_as_array(decode(b"[%b]" % piece.translate(None, b"[]")), kind))
        brackets.append(piece.translate(None, _VALUES))
        begin += len(piece) + 1
    if b",".join(brackets) not in (_brackets(shape), _brackets((math.prod(shape),))):
        raise Malformed(f"the input {spec.name} has other values than its shape {list(shape)}, flat or nested like it")
    return np.concatenate(arrays)


def _as_array(values: list[Any], kind: np.dtype[Any]) -> Array:
    """OverflowError for a number that is too large: numpy takes a float for infinite."""
    if kind.kind == "f":
        return np.frombuffer(struct.pack(f"<{len(values)}{kind.char}", *values), kind)
    return np.array(values, kind)


def _brackets(shape: tuple[int, ...]) -> bytes:
    """What is left of an array of this shape, as JSON, without its values: ``[[,,],[,,]]``."""
    left = b""
    for size in reversed(shape):
        left = b"[%b]" % ((left + b",") * (size - 1) + left)
    return left


def _raw_request(body: bytes, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Inference:
    if len(inputs) != 1:
        raise Malformed("a raw body needs a model with one input")
    spec = inputs[0]
    shape = tuple(1 if index == 0 and spec.batched else size for index, size in enumerate(spec.shape))
    free = [index for index, size in enumerate(shape) if size == -1]
    count, left = divmod(len(body), spec.kind.itemsize)
    known = math.prod(size for size in shape if size != -1)
    if left or len(free) > 1 or count == 0 or count % known or (not free and count != known):
        raise Malformed(f"a raw body for {spec.name} must be {spec.datatype} of shape {list(shape)}")
    shape = tuple(count // known if size == -1 else size for size in shape)
    array = np.frombuffer(body, spec.kind, count).reshape(shape)
    return Inference("", [array], 1, [(index, True) for index in range(len(outputs))])


def _wanted(asked: Sequence[_Output] | None, binary: bool, outputs: Sequence[TensorSpec]) -> list[tuple[int, bool]]:
    if not asked:
        return [(index, binary) for index in range(len(outputs))]
    places = {spec.name: index for index, spec in enumerate(outputs)}
    if len(asked) > len(places):
        raise Malformed(f"the model has {count_text(len(places), 'output')}, and {len(asked)} are asked for")
    wanted = []
    for output in asked:
        if output.name not in places:
            raise Malformed(f"no output is called {output.name[:80]!r}: {', '.join(places)}")
        said = {} if output.parameters is _NONE else _parameters(output.parameters)
        if any(name in said for name in _UNSUPPORTED):
            raise Malformed("shared memory and classification are not supported")
        wanted.append((places[output.name], bool(said.get("binary_data", binary))))
    return wanted


def _timeout_s(value: Any) -> float | None:
    if value is None or value == 0:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e12:
        raise Malformed("the parameter timeout is a number of microseconds")
    return float(value) / 1e6


def write_answer(
    request_id: str, model: str, version: str, outputs: Sequence[tuple[TensorSpec, Array, bool]]
) -> tuple[bytes, int | None]:
    """The body of an answer, and the JSON's length where raw tensors follow it.

    JSON has no NaN and no infinity: such values become null there. Binary outputs keep them.
    """
    tensors, raw = [], []
    for spec, array, binary in outputs:
        tensor = Tensor(spec.name, array.shape, spec.datatype)
        if binary:
            raw.append(np.ascontiguousarray(array).tobytes())
            tensor.parameters = {"binary_data_size": len(raw[-1])}
        else:
            tensor.data = _data(array)
        tensors.append(tensor)
    text = msgspec.json.encode(Outputs(model, version, tensors, request_id))
    return b"".join([text, *raw]), len(text) if raw else None


def _data(array: Array) -> Any:
    """An array's values for msgspec to encode; many are encoded piece by piece, as `_values` reads them."""
    flat, some = array.ravel(), LARGE // 8
    if flat.size <= some:
        return flat.tolist()
    pieces = [msgspec.json.encode(flat[begin : begin + some].tolist()) for begin in range(0, flat.size, some)]
    return msgspec.Raw(b"[%b]" % b",".join(piece[1:-1] for piece in pieces))


def inflate(body: bytes, encoding: str, most: int) -> bytes:
    """A compressed body, unpacked up to `most` bytes."""
    if encoding not in ("gzip", "deflate"):
        raise Malformed("the body's Content-Encoding is not supported", 415)
    unpacker = zlib.decompressobj(31 if encoding == "gzip" else 15)
    try:
        data = unpacker.decompress(body, most)
    except zlib.error:
        raise Malformed("the body is damaged") from None
    if unpacker.unconsumed_tail:
        raise Malformed("the body is too large", 413)
    if not unpacker.eof or unpacker.unused_data:
        raise Malformed("the body is cut off, or something follows it")
    return data


def metadata(
    name: str, versions: Sequence[str], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> dict[str, Any]:
    """The answer of ``GET /v2/models/NAME``."""

    def tensors(specs: Sequence[TensorSpec]) -> list[dict[str, Any]]:
        return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]

    return {
        "name": name, "versions": list(versions), "platform": "pytorch_fettle",
        "inputs": tensors(inputs), "outputs": tensors(outputs),
    }  # fmt: skip
