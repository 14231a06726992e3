"""The Open Inference Protocol: what a client may say, and what happens to everything else."""

import asyncio
import contextlib
import gzip
import json
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.package.tensors import TO_NUMPY, TensorSpec
from fettle.serve.http import protocol
from fettle.serve.http.aside import LARGE, aside
from fettle.serve.http.protocol import Malformed, inflate, read_request, write_answer

X = (TensorSpec("x", "FP32", (-1, 4)),)
Y = (TensorSpec("y", "FP32", (-1, 2)),)


def asked(**changes):
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]} | changes
    return json.dumps({"inputs": [{k: v for k, v in tensor.items() if v is not None}]}).encode()


def read(body, header=None, inputs=X, outputs=Y):
    return read_request(body, header, inputs, outputs, max_rows=8)


def test_flat_and_nested_values_are_one():
    for data in ([1, 2, 3, 4], [[1, 2, 3, 4]], [1.0, 2.0, 3.0, 4.0]):
        assert read(asked(data=data)).arrays[0].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "z"}, {"datatype": "FP64"}, {"datatype": "BYTES"}, {"shape": [1, 5]}, {"shape": [4]},
        {"shape": [0, 4]}, {"data": None},
        {"shape": [-1, 4]}, {"shape": [10**18, 4]}, {"shape": [9, 4]}, {"shape": [1] * 40}, {"data": [1, 2, 3]},
        {"data": "1234"}, {"data": [[1, 2], [3, 4]]}, {"data": [[1, 2], [3, 4, 5]]},
        {"data": [1, 2, 3, "x"]}, {"data": [1, 2, 3, None]},
        {"data": {"a": 1}}, {"data": [1e999, 1, 1, 1]}, {"data": [1e300, 1, 1, 1]}, {"data": [True] * 4},
        {"parameters": {"shared_memory_region": "a"}}, {"parameters": {"binary_data_size": 16}},
    ],
)  # fmt: skip
def test_what_does_not_fit_is_a_sentence(changes):
    with pytest.raises(Malformed) as error:
        read(asked(**changes))
    assert error.value.status == 400
    assert "\n" not in error.value.reason


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"inputs": []}', b"[" * 100_000, b"\xff\xfe", b'{"inputs": 3}',
     b'{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ' + b"[" * 100_000],
)  # fmt: skip
def test_what_is_no_request(body):
    with pytest.raises(Malformed):
        read(body)


def test_tensors_that_do_not_go_together_are_a_sentence():
    two = (*X, TensorSpec("z", "FP32", (-1, 1)))
    one = json.loads(asked())["inputs"]
    more = {"name": "z", "shape": [2, 1], "datatype": "FP32", "data": [1, 2]}
    for inputs, request, why in (
        (X, {"inputs": one * 2}, "given twice"), (two, {"inputs": [*one, more]}, "number of rows"),
        (X, {"inputs": one, "outputs": [{"name": "q"}]}, "no output is called"),
        (X, {"inputs": one, "outputs": [{"name": "y", "parameters": {"classification": 2}}]}, "not supported"),
        (X, {"inputs": one, "parameters": [1]}, "parameters: "),
        (X, {"inputs": [{**one[0], "parameters": {"binary_data_size": 15}}]}, "the request has none"),
    ):  # fmt: skip
        with pytest.raises(Malformed, match=why):
            read(json.dumps(request).encode(), inputs=inputs)
    with pytest.raises(Malformed, match="one input"):
        read(b"", 0, inputs=two)
    with pytest.raises(Malformed, match="supported"):
        inflate(b"", "br", 100)


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL"])
def test_large_arrays_are_read_and_written_piece_by_piece(monkeypatch, datatype):
    monkeypatch.setattr(protocol, "LARGE", 16)
    spec = TensorSpec("x", datatype, (-1, 3, 5))
    array = np.random.default_rng(0).integers(-9, 9, (2, 3, 5)).astype(spec.kind)
    flat = array.ravel().tolist()

    def found(data, indent=None):
        tensor = {"name": "x", "datatype": datatype, "shape": array.shape, "data": data}
        return read(json.dumps({"inputs": [tensor]}, indent=indent).encode(), None, (spec,)).arrays[0]

    for data in (flat, array.tolist()):
        for indent in (None, 1):
            assert np.array_equal(found(data, indent), array)
            assert found(data, indent).dtype == spec.kind
    text, _ = write_answer("", "m", "1", [(spec, array, False), (spec, array[:1, :1, :2], False)])
    assert [output["data"] for output in json.loads(text)["outputs"]] == [flat, flat[:2]]
    ragged = [[flat[:6], flat[6:10], flat[10:15]], array[1].tolist()]
    otherwise = [array.reshape(6, 5).tolist(), array[None].tolist(), array.reshape(5, 3, 2).tolist(), [*flat[1:], [1]]]
    for data in (ragged, *otherwise, flat[1:], [*flat, flat[0]], [*flat[1:], None], [*flat[1:], "1"]):
        with pytest.raises(Malformed):
            found(data)
    with pytest.raises(Malformed):
        found([*flat[1:], 2 if datatype == "BOOL" else True])


def test_a_large_body_is_the_work_of_a_thread():
    async def threads():
        return [await aside(size, threading.current_thread) for size in (LARGE - 1, LARGE, 2 * LARGE)]

    small, large, another = asyncio.run(threads())
    assert small is threading.current_thread()
    assert large is another is not small


def binary(tensors, rows, extra=b"", **parameters):
    said = [
        {"name": n, "datatype": d, "shape": list(a.shape), "parameters": {"binary_data_size": a.nbytes}}
        for n, d, a in tensors
    ]
    head = json.dumps({"id": "7", "inputs": said, "parameters": parameters}).encode()
    return head + b"".join(a.tobytes() for _, _, a in tensors) + extra, len(head)


def test_binary_tensors_are_views_of_the_body():
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = read(*binary([("x", "FP32", x)], 2, binary_data_output=True))
    assert found.rows == 2
    assert found.id == "7"
    assert found.wanted == [(0, True)]
    assert np.array_equal(found.arrays[0], x)
    assert not found.arrays[0].flags.writeable


def test_binary_lengths_must_agree():
    x = np.zeros((2, 4), np.float32)
    body, head = binary([("x", "FP32", x)], 2)
    for broken, length in ((body[:-1], head), (body + b"x", head), (body, head + 1), (body, -1), (body, len(body) + 1)):
        with pytest.raises(Malformed):
            read(broken, length)


def test_a_raw_body_is_the_only_input():
    found = read(np.ones(4, np.float32).tobytes(), 0)
    assert found.arrays[0].shape == (1, 4)
    assert found.wanted == [(0, True)]
    for body in (b"", b"123", np.ones(5, np.float32).tobytes()):
        with pytest.raises(Malformed):
            read(body, 0)


def test_timeouts_are_microseconds():
    body = json.loads(asked())
    assert read(json.dumps(body | {"parameters": {"timeout": 2_000_000}}).encode()).timeout_s == 2.0
    for bad in (-1, "soon", True, 1e30):
        with pytest.raises(Malformed):
            read(json.dumps(body | {"parameters": {"timeout": bad}}).encode())
    with pytest.raises(Malformed, match="too long"):
        read(json.dumps(body | {"parameters": {"x": [[]] * 10_000}}).encode())


@pytest.mark.parametrize("datatype", TO_NUMPY)
@given(st.data())
@settings(max_examples=15, deadline=None)
def test_values_survive_both_ways(datatype, data):
    kind = TO_NUMPY[datatype]
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    if kind.kind == "f":
        value = st.floats(-100, 100, width=16)
    elif kind.kind == "b":
        value = st.booleans()
    else:
        limits = np.iinfo(kind)
        value = st.integers(int(limits.min), int(limits.max))
    flat = data.draw(st.lists(value, min_size=rows * width, max_size=rows * width))
    array = np.array(flat, kind).reshape(rows, width)
    spec = TensorSpec("x", datatype, (-1, width))
    text, length = write_answer("", "m", "1", [(spec, array, False)])
    assert length is None
    body = json.dumps({"inputs": json.loads(text)["outputs"]}).encode()
    assert np.array_equal(read(body, None, (spec,)).arrays[0], array)
    assert np.array_equal(read(*binary([("x", datatype, array)], rows), (spec,)).arrays[0], array)


@given(st.binary(max_size=300), st.one_of(st.none(), st.integers(-5, 400)))
@settings(max_examples=300, deadline=None)
def test_garbage_never_does_more_than_be_refused(body, header):
    with contextlib.suppress(Malformed):
        read(body, header)


def test_nan_is_null_in_json_and_kept_in_binary():
    array = np.array([[math.nan, 1.0]], np.float32)
    text, _ = write_answer("1", "m", "1", [(Y[0], array, False)])
    assert json.loads(text)["outputs"][0]["data"] == [None, 1.0]
    body, length = write_answer("1", "m", "1", [(Y[0], array, True)])
    assert json.loads(body[:length])["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert np.isnan(np.frombuffer(body[length:], np.float32)[0])


def test_compressed_bodies_are_bounded():
    assert inflate(gzip.compress(b"abc"), "gzip", 100) == b"abc"
    with pytest.raises(Malformed) as error:
        inflate(gzip.compress(b"\0" * 10_000_000), "gzip", 1000)
    assert error.value.status == 413
    for broken in (b"", b"junk", gzip.compress(b"abc")[:-4]):
        with pytest.raises(Malformed):
            inflate(broken, "gzip", 100)
    with pytest.raises(Malformed):  # of which only the first would be read
        inflate(gzip.compress(b"abc") + gzip.compress(b"def"), "gzip", 100)


def test_an_output_is_not_given_as_often_as_somebody_likes():
    body = json.loads(asked())
    assert read(json.dumps(body | {"outputs": [{"name": Y[0].name}]}).encode()).wanted == [(0, False)]
    with pytest.raises(Malformed):
        read(json.dumps(body | {"outputs": [{"name": Y[0].name}] * 1000}).encode())
