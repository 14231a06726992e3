"""Sizes, from people and for them."""

import pytest

from fettle.errors import UsageError
from fettle.units import parse_size, size_text

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


def test_sizes_are_written() -> None:
    assert [size_text(size) for size in (0, 1023, 1536, -3 * GIB, 12426629128)] == [
        *("0 B", "1023 B", "1.50 KiB", "-3.00 GiB", "11.6 GiB"),
    ]
