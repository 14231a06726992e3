"""Sizes, from people and for them."""

import math

import pytest

from fettle.errors import UsageError
from fettle.units import parse_size, rate_text, seconds_text, size_text

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("80M", 80 * MIB), ("1.5GiB", 3 * GIB // 2), ("2 gb", 2 * 10**9)]
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "-3MB", "3 XB", "1e3", "9" * 400])
def test_other_words_are_not_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_times_are_written() -> None:
    assert [seconds_text(value) for value in (0, 2e-6, 0.0123, 1.5, 75.4, 89.6, 1234, 7500, math.nan)] == [
        *("0 s", "2 µs", "12.3 ms", "1.5 s", "75.4 s", "89.6 s", "21 min", "2 h 05 min", "-"),
    ]


def test_rates_are_written() -> None:
    assert [rate_text(rate) for rate in (0.5, 44.234, 1234.5, 11377.0, math.nan)] == [
        *("0.5", "44.23", "1234", "11,380", "nan"),
    ]


def test_sizes_are_written() -> None:
    assert [size_text(size) for size in (0, 1023, 1536, -3 * GIB, 12426629128)] == [
        *("0 B", "1023 B", "1.50 KiB", "-3.00 GiB", "11.6 GiB"),
    ]
