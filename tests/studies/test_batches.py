"""The largest batch at a step of a ladder: found with few tries, and never one that does not fit."""

import math
from types import SimpleNamespace

import pytest

from fettle.measure import Held, Rules, Trial
from fettle.recipe import Recipe
from fettle.studies.batches import grown, largest

MIB = 2**20


def _machine(weights: int, row: float, full: float = math.inf):
    """Something whose peak is `weights` and so much a batch, in MiB, on a device that is full at `full`."""
    asked: list[int] = []

    def tried(factor: int) -> Trial:
        asked.append(factor)
        need = weights + row * factor
        if need > full:
            return Trial(Recipe(), "failed", "out of memory")
        return Trial(Recipe(), "measured", peak_bytes=int(need * MIB))

    return tried, asked


@pytest.mark.parametrize(("limit", "most"), [(1000, 45), (149, 2), (120, 1), (119, 0), (10_000, 64)])
def test_up_to_a_limit_with_few_tries(limit: int, most: int):
    tried, asked = _machine(100, 20)
    found, why = largest(tried, limit * MIB)
    assert found == most
    assert len(asked) == len(set(asked)) <= 4
    if most < 64:
        assert f"x{most + 1} " in why
    else:
        assert why == "64 times the batch is the most that is tried"


@pytest.mark.parametrize("full", [110, 121, 300, 1000, 5000])
def test_until_the_device_is_full(full: int):
    tried, asked = _machine(100, 20, full)
    found, _ = largest(tried, math.inf)
    assert found <= (full - 100) / 20
    assert found >= min(64, math.floor((full - 100) / 20)) - 2
    assert len(asked) == len(set(asked))


def test_a_peak_that_bends_never_ends_above_the_limit():
    def tried(factor: int) -> Trial:
        return Trial(Recipe(), "measured", peak_bytes=int((100 + 5 * factor + 0.5 * factor**2) * MIB))

    found, _ = largest(tried, 600 * MIB)
    assert 100 + 5 * found + 0.5 * found**2 <= 600 < 100 + 5 * (found + 2) + 0.5 * (found + 2) ** 2


def test_a_try_ends_with_the_budget():
    deadlines, given = list[float](), Trial(Recipe(), "measured", time_ms=1.0, peak_bytes=MIB)
    session = SimpleNamespace(
        standings=SimpleNamespace(known={Recipe(): given}), held=Held(), rules=Rules(), spent=lambda: False,
        costs=SimpleNamespace(deadline=lambda: 7.0), keep=deadlines.append, run=lambda recipes, rules: rules.deadline,
    )  # fmt: skip
    assert grown(session, Recipe(), 10 * MIB).why == "there was no time for a larger one"
    assert deadlines == [7.0]


def test_what_was_not_measured_or_has_no_time_is_said():
    assert largest(lambda factor: Trial(Recipe(), "measured"), MIB) == (0, "what it needs was not measured")
    assert largest(lambda factor: None, MIB) == (0, "there was no time for a larger one")
