"""Files from outside are hostile until parsed."""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.errors import UsageError
from fettle.memory import pickles
from fettle.memory.pickles import load_plain_data

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=30,
)


@given(plain, st.sampled_from([2, 3, 4, 5]))
@settings(max_examples=150, deadline=None)
def test_plain_data_comes_back_as_it_was(value: object, protocol: int) -> None:
    assert load_plain_data(pickle.dumps({"x": value}, protocol=protocol), "f") == {"x": value}


def test_a_pair_of_integers_is_the_one_tuple_that_is_read() -> None:
    assert load_plain_data(pickle.dumps([7, (0, 70_000), (2**40, 1)], protocol=4), "f") == [7, (0, 70_000), (2**40, 1)]


def test_pairs_between_two_frames_are_read() -> None:
    """A long loop's recording holds a hundred thousand pairs, of times and sizes."""
    value = [(1_700_000_000_000_000 + number, (1 << 33) + number) for number in range(20_000)]
    assert load_plain_data(pickle.dumps(value, protocol=4), "f") == value


def test_strings_of_every_length() -> None:
    value = ["a" * 200, "b" * 300, "c" * 70_000, "é\n" * 40_000]
    assert load_plain_data(pickle.dumps(value, protocol=4), "f") == value


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch /tmp/fettle-was-here",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", [Evil(), {"segments": [Evil()]}, {1, 2}, frozenset([1]), b"bytes", 1j, 2**80])
def test_anything_but_plain_data_is_refused(value: object, protocol: int) -> None:
    with pytest.raises(UsageError, match="refused, not plain data"):
        load_plain_data(pickle.dumps(value, protocol=protocol), "f")


def _bombs() -> dict[str, bytes]:
    return {
        "memo index": b"\x80\x02Nr\xff\xff\xff\xff.",
        "memo lookup": b"\x80\x02j\xff\xff\xff\x7f.",
        "long string": b"\x80\x04X\xff\xff\xff\xff.",
        "very long string": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
        "byte array": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        "long integer": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 60) + b".",
        "tuples in tuples as a key": b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.",
        "pairs in pairs as a key": b"\x80\x02}K\x00" + b"K\x00\x86" * 300_000 + b"Ns.",
        "only marks": b"\x80\x02" + b"(" * 1_000_000,
        "unbalanced": b"\x80\x02uuuu.",
        "unhashable key": b"\x80\x02}]Ns.",
        "append to a number": b"\x80\x02K\x01K\x02a.",
    }


@pytest.mark.parametrize("name", _bombs())
def test_bombs_cost_neither_time_nor_memory(name: str) -> None:
    raw = _bombs()[name]
    tracemalloc.start()
    began = time.process_time()  # not the wall clock: that tells of the machine too
    with pytest.raises(UsageError):
        load_plain_data(raw, "bomb")
    seconds = time.process_time() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    assert seconds < 60  # on any machine: work that grows with what a bomb claims would not end


def test_pairs_that_were_chosen_to_have_one_hash_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, whole, pairs = 11400714785074694791, 14029467366897019727, 1 << 64, list[bytes]()
    back = pow(second, -1, whole)
    for number in range(80_000):  # what CPython makes of a pair: xxHash, whose second lane is chosen to bring it to 0
        lane = (2870177450012600261 + number * second) % whole
        lane = (lane << 31 | lane >> 33) % whole * first % whole
        other = -lane * back % whole
        other -= whole * (other >> 63)
        if abs(other) < (1 << 61) - 1:
            pairs.append(struct.pack("<cicBq2s", b"J", number, b"\x8a", 8, other, b"\x86N"))
    monkeypatch.setattr(pickles, "_LEAST_S", 0.1, raising=False)
    with pytest.raises(UsageError, match="far longer to read"):
        load_plain_data(b"\x80\x02}(" + b"".join(pairs) + b"u.", "bomb")


def test_deeply_nested_lists_do_not_crash() -> None:
    value = load_plain_data(b"\x80\x02" + b"]" * 300_000 + b"a" * 299_999 + b".", "deep")
    assert isinstance(value, list)


@pytest.mark.parametrize("raw", [b"", b"\x80", b"hello world", b"PK\x03\x04 a zip file", b"(dp0\nS'a'\np1\nI1\ns."])
def test_foreign_files_are_named_as_such(raw: bytes) -> None:
    with pytest.raises(UsageError, match="not a memory snapshot"):
        load_plain_data(raw, "f")


def test_every_truncation_is_noticed() -> None:
    raw = pickle.dumps({"segments": [{"address": 2**40, "name": "x" * 300, "pool": (0, 0)}]}, protocol=4)
    for length in range(4, len(raw)):
        with pytest.raises(UsageError):
            load_plain_data(raw[:length], "f")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_flipped_bytes_give_a_value_or_a_usage_error(data: st.DataObject) -> None:
    raw = bytearray(pickle.dumps({"segments": [{"a": 1, "b": [1.5, "text", (3, 4)]}] * 3}, protocol=4))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(UsageError):  # any other exception fails the test
        load_plain_data(bytes(raw), "f")
