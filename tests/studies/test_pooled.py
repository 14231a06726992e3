"""Machines as a random effect: what is planted comes back, intervals hold, and what cannot be pooled is said."""

import itertools
import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from fettle.studies.analysis import analyse
from fettle.studies.effects import effects
from fettle.studies.page import lead
from fettle.studies.pooled import Pooled, pool
from fettle.studies.table import Experiment, Table
from tests.studies.made_up import TIME

PAIR = 0.15


def plant(seed: int, machines: int, spread: float, scatter: float = 0.02) -> tuple[Table, dict]:
    """Three switches on each machine. Machines differ by half in time, and by `spread` (a log) in what the first two
    switches gain. With the true effects."""
    random = np.random.default_rng(seed)
    gains = {name: random.uniform(-0.3, 0.5) for name in "abc"}
    rows = []
    for place in range(machines):
        slower, own = random.normal(0, 0.5), {name: random.normal(0, spread) for name in "ab"}
        for levels in itertools.product(("off", "on"), repeat=3):
            row = dict(zip("abc", levels, strict=True))
            gain = sum(gains[name] + own.get(name, 0.0) for name in "abc" if row[name] == "on")
            gain += PAIR * (row["a"] == row["b"] == "on")
            cost = slower - gain + random.normal(0, scatter)
            rows.append(Experiment({**row, "machine": f"m{place}"}, {TIME.name: 10 * math.exp(cost)}))
    names = tuple(f"m{place}" for place in range(machines))
    factors = {**dict.fromkeys("abc", ("off", "on")), "machine": names}
    true = {((name, "on"),): gains[name] + (PAIR / 2 if name in "ab" else 0) for name in "abc"}
    true |= {((one, "on"), (two, "on")): PAIR * ((one, two) == ("a", "b"))
             for one, two in itertools.combinations("abc", 2)}  # fmt: skip
    return Table(factors, (TIME,), tuple(rows), apart=frozenset({"machine"})), true


def held(table: Table, true: dict) -> list[bool]:
    """Whether each interval holds the truth."""
    pooled = pool(table, "", TIME)
    assert isinstance(pooled, Pooled), pooled
    return [math.log(one.ratio.low) <= true[one.levels] <= math.log(one.ratio.high) for one in effects(pooled.model)]


def test_what_is_planted_comes_back_for_an_average_machine_with_how_machines_differ():
    table, true = plant(3, machines=8, spread=0.1)
    (analysis,) = analyse(table)
    assert "8 machines are pooled by a mixed model" in analysis.pooling
    assert analysis.pooling in lead(analysis)
    assert set(analysis.spreads) >= {("a", "on"), ("b", "on")}
    assert all(1.02 < analysis.spreads[name, "on"] < 1.3 for name in "ab")
    found = {effect.levels: effect for effect in analysis.effects}
    assert set(found) == set(true)  # the machine is none of the effects
    widths = {name: math.log(found[((name, "on"),)].ratio.high / found[((name, "on"),)].ratio.low) for name in "ac"}
    assert widths["a"] > 2 * widths["c"]  # what differs from machine to machine is less sure
    assert ("machine",) in analysis.shares


@pytest.mark.parametrize(("count", "spread"), [(3, 0.02), (5, 0.1)])
def test_intervals_hold_as_often_as_they_say(count: int, spread: float):
    every = [one for seed in range(4) for one in held(*plant(seed, count, spread))]
    assert sum(every) >= 0.85 * len(every)
    wrong = [one for table, true in [plant(0, count, spread)]
             for one in held(table, {term: gain + 1 for term, gain in true.items()})]  # fmt: skip
    assert not any(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "spread"), [(3, 0.0), (3, 0.1), (5, 0.02), (8, 0.1)])
def test_intervals_hold_at_their_rate(count: int, spread: float):
    every = [one for seed in range(150) for one in held(*plant(seed, count, spread))]
    assert 0.92 <= sum(every) / len(every) <= 0.99


def test_a_long_table_needs_no_matrix_as_large_as_its_square():
    table, _ = plant(4, machines=3, spread=0.1)
    random = np.random.default_rng(5)
    rows = [replace(row, values={TIME.name: row.values[TIME.name] * math.exp(random.normal(0, 0.02))})
            for row in table.experiments for _ in range(100)]  # fmt: skip
    tracemalloc.start()
    try:
        pooled = pool(replace(table, experiments=tuple(rows)), "", TIME)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(pooled, Pooled), pooled
    assert peak < 8 * len(rows) ** 2


def test_two_machines_are_no_sample_of_machines():
    table, _ = plant(1, machines=2, spread=0.1)
    (analysis,) = analyse(table)
    assert analysis.pooling.startswith("2 machines are too few")
    assert any(name == "machine" for effect in analysis.effects for name, _ in effect.levels)


def test_a_fit_that_does_not_converge_falls_back_with_one_sentence(monkeypatch):
    from statsmodels.regression.mixed_linear_model import MixedLM

    table, _ = plant(1, machines=3, spread=0.1)
    fitted = MixedLM.fit

    def failing(self, **options):
        found = fitted(self, **options)
        found.converged = False
        return found

    monkeypatch.setattr(MixedLM, "fit", failing)
    (analysis,) = analyse(table)
    assert analysis.pooling.startswith("the mixed model could not be fitted (it did not converge)")
    assert any(name == "machine" for effect in analysis.effects for name, _ in effect.levels)
    assert analysis.checks is not None
    plain = replace(table, apart=frozenset())
    assert {effect.levels for effect in analyse(plain)[0].effects} == {effect.levels for effect in analysis.effects}


def test_a_level_that_failed_on_one_machine_and_times_without_any_scatter_are_no_trouble():
    table, _ = plant(2, machines=4, spread=0.1)
    rows = [row if row.levels["machine"] != "m3" or row.levels["c"] == "off" else replace(row, values={}, reason="no")
            for row in table.experiments]  # fmt: skip
    (analysis,) = analyse(replace(table, experiments=tuple(rows)))
    assert "4 machines are pooled" in analysis.pooling
    exact, _ = plant(2, machines=3, spread=0.0, scatter=0.0)
    (analysis,) = analyse(exact)
    assert "a=on" in {effect.label for effect in analysis.effects}
