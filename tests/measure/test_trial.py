"""What fetching memory from the system costs, as slices show it."""

import pytest

from fettle.measure import Slice, fetching


def slices(*turns: tuple[float | None, float]) -> list[Slice]:
    return [Slice("1:0", number, ms, quiet=True, pages=pages) for number, (pages, ms) in enumerate(turns, 1)]


def test_slices_that_fetch_memory_are_told_from_those_that_keep_it():
    assert fetching(slices((0, 26.0), (6500, 35.0), (12, 26.2), (6400, 36.0), (2000, 29.0))) == (
        "26.1 ms a call where the memory that it frees is kept, 35.5 ms where it goes back to the system and 6500 "
        "pages of it are fetched anew: which of the two is chance"
    )


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [(None, 26.0), (None, 35.0), (None, 26.0), (None, 35.0)],  # of an earlier version
        [(0, 26.0), (0, 35.0), (0, 26.0), (0, 35.0)],  # slower for another reason
        [(30, 26.0), (30, 35.0), (0, 26.0), (0, 35.0)],
        [(6500, 35.0), (6500, 36.0), (6500, 35.0)],  # always, so nothing is chance
        [(6500, 35.0), (0, 26.0), (0, 26.0)],  # once
        [(6500, 26.5), (6500, 26.4), (0, 26.0), (0, 26.2)],  # pages are cheap here
    ],
)
def test_nothing_is_said_where_chance_makes_no_difference(turns):
    assert fetching(slices(*turns)) == ""
