"""Effects against a planted model."""

import itertools
import math
import random

import pytest

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search import effects

PLANTED = {"a": math.log(2.0), "b": math.log(0.8), "c": 0.0}
TOGETHER = math.log(1.3)


def trials(noise=0.0, skip=lambda levels: False, repeats=1):
    rng = random.Random(0)
    found = []
    for on in itertools.product((False, True), repeat=3):
        levels = {name: "on" for name, yes in zip("abc", on, strict=True) if yes}
        gain = sum(PLANTED[name] for name in levels) + TOGETHER * ({"a", "b"} <= levels.keys())
        if not skip(levels):
            found += [
                Trial(Recipe(levels), "measured", time_ms=100 * math.exp(-gain + rng.gauss(0, noise)))
                for _ in range(repeats)
            ]
    return found


def test_planted_effects_come_back():
    found = {effect.label: effect for effect in effects(trials(noise=0.002, repeats=2))}
    # main effects are averages over the other techniques: half of the interaction belongs to each
    assert found["a=on"].ratio.estimate == pytest.approx(2.0 * 1.3**0.5, rel=0.01)
    assert found["b=on"].ratio.estimate == pytest.approx(0.8 * 1.3**0.5, rel=0.01)
    assert found["a=on × b=on"].ratio.estimate == pytest.approx(1.3, rel=0.01)
    readings = {label: effect.reading for label, effect in found.items()}
    assert (readings["a=on"], readings["b=on"], readings["c=on"]) == ("helped", "hurt", "same")
    assert (readings["a=on × b=on"], readings["a=on × c=on"]) == ("helped", "same")


def test_a_missing_cell_is_no_guess():
    found = {e.label: e for e in effects(trials(noise=0.002, repeats=3, skip=lambda on: {"b", "c"} <= on.keys()))}
    assert found["b=on × c=on"].reading == "cannot tell"
    assert found["b=on × c=on"].ratio is None
    assert found["a=on × b=on"].ratio.estimate == pytest.approx(1.3, rel=0.01)


def test_agrees_with_statsmodels():
    api = pytest.importorskip("statsmodels.formula.api")
    pandas = pytest.importorskip("pandas")
    data = trials(noise=0.05, repeats=2)
    rows = [{"y": math.log(t.time_ms), **{n: t.recipe.levels.get(n, "") for n in "abc"}} for t in data]
    fit = api.ols("y ~ (C(a, Sum) + C(b, Sum) + C(c, Sum))**2", pandas.DataFrame(rows)).fit()
    a = effects(data)[0]
    low, high = sorted(math.exp(2 * bound) for bound in fit.conf_int().loc["C(a, Sum)[S.]"])
    assert a.ratio.estimate == pytest.approx(math.exp(2 * fit.params["C(a, Sum)[S.]"]))
    assert (a.ratio.low, a.ratio.high) == pytest.approx((low, high))


def test_nothing_varied_has_no_effects():
    assert effects([Trial(Recipe(), "measured", time_ms=1.0)]) == []


def test_too_few_trials_cannot_tell():
    assert {effect.reading for effect in effects(trials()[:2])} == {"cannot tell"}
