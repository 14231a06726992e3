"""What an atlas foresees of a model that it has not seen."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fettle.atlas import rows_of
from fettle.atlas.prediction import Predictor
from fettle.measure import Accuracy
from fettle.recipe import Recipe
from fettle.search import SLOWEST
from tests.atlas.made_up import DEAR_S, about, atlas, gain, recipes, trial

EVERY = [recipe for recipe in recipes() if recipe.levels]


@pytest.fixture(scope="module")
def conv() -> Predictor:
    return Predictor(atlas(), about("new", 1.0), guess_s=lambda recipe: 5.0)


def test_gains_are_foreseen_by_what_alike_models_had(conv: Predictor) -> None:
    off = [one.gain - gain(recipe, 1.0) for recipe, one in zip(EVERY, conv.forecast(EVERY, ()), strict=True)]
    assert math.sqrt(float(np.mean(np.square(off)))) < 0.12
    plain = Predictor(atlas(), about("new", 0.0)).forecast([Recipe.parse("channels_last=on")], ())[0]
    assert plain.gain < 0 < conv.forecast([Recipe.parse("channels_last=on")], ())[0].gain


def test_intervals_hold_the_truth(conv: Predictor) -> None:
    held = [abs(one.gain - gain(recipe, 1.0)) < 2 * one.spread
            for recipe, one in zip(EVERY, conv.forecast(EVERY, ()), strict=True)]  # fmt: skip
    assert sum(held) >= 0.9 * len(held)


def test_trials_of_the_model_itself_say_more_than_the_atlas(conv: Predictor) -> None:
    """This model is not like the others: bf16 makes it slower."""
    asked = [Recipe.parse("precision=bf16 compile=default"), Recipe.parse("compile=default")]
    before = conv.forecast(asked, ())
    seen = [trial(Recipe(), 0.0), trial(Recipe.parse("precision=bf16"), -0.5)]
    after = conv.forecast(asked, seen)
    assert after[0].gain < before[0].gain - 0.5
    assert after[0].spread < before[0].spread
    assert abs(after[1].gain - before[1].gain) < 0.1  # of the other level that says nothing
    known = conv.forecast([Recipe.parse("precision=bf16")], seen)[0]
    assert known.gain == pytest.approx(-0.5, abs=0.1)


def test_what_all_models_gain_on_a_machine_is_foreseen_there() -> None:
    """There 16 bits are slow: no unit multiplies them."""
    asked = [Recipe.parse("precision=bf16"), Recipe.parse("compile=default")]
    rows = atlas()
    for number in range(4):
        there = [trial(recipe, gain(recipe, 0.0) - 1.8 * ("precision" in recipe.levels)) for recipe in EVERY]
        rows += rows_of(about(f"other{number}", number % 2 * 1.0, "there"), [trial(Recipe(), 0.0), *there[::2]])
    here, there = (Predictor(rows, about("new", 0.0, machine)).forecast(asked, ()) for machine in ("here", "there"))
    assert here[0].gain > 0.6
    assert there[0].gain < -0.5
    assert here[1].gain > 0.1
    assert there[1].gain > 0.1


def test_what_is_slower_than_a_third_counts_as_a_third() -> None:
    """A hundred times slower here and ten times there says no more than that it is slow."""
    rows = []
    for number in range(4):
        slow = [trial(recipe, gain(recipe, 0.0) - (2.0 + number) * ("threads" in recipe.levels)) for recipe in EVERY]
        rows += rows_of(about(f"model{number}", 0.0), [trial(Recipe(), 0.0), *slow[::2]])
    found = Predictor(rows, about("new", 0.0)).forecast([Recipe.parse("threads=1")], ())[0]
    assert SLOWEST <= found.gain < SLOWEST + 0.2
    assert found.spread < 0.4


def test_a_level_that_changes_little_everywhere_is_foreseen_closely(conv: Predictor) -> None:
    little, much = conv.forecast([Recipe.parse("matmul=medium"), Recipe.parse("precision=bf16")], ())
    assert little.spread < 0.8 * much.spread


def test_a_level_that_no_model_had_may_be_anything(conv: Predictor) -> None:
    known, unknown = conv.forecast([Recipe.parse("compile=default"), Recipe.parse("sparsity=2-4")], ())
    assert unknown.gain == 0
    assert unknown.spread > 1.5 * known.spread


def test_the_workload_as_given_gains_nothing_surely(conv: Predictor) -> None:
    given = conv.forecast([Recipe()], ())[0]
    assert given.gain == pytest.approx(0, abs=1e-9)


def test_what_failed_elsewhere_is_likely_to_fail_and_seconds_are_counted(conv: Predictor) -> None:
    broken = [replace(trial(recipe, 0.5), status="failed", speedup=None) for recipe in EVERY
              if "compile" in recipe.levels]  # fmt: skip
    rows = atlas() + rows_of(about("alike", 1.0), [trial(Recipe(), 0.0), *broken])
    wary = Predictor(rows, about("new", 1.0), guess_s=lambda recipe: 5.0)
    dear, cheap = wary.forecast([Recipe.parse("compile=default"), Recipe.parse("precision=bf16")], ())
    assert dear.works < conv.forecast([Recipe.parse("compile=default")], ())[0].works - 0.05
    assert cheap.works > 0.85
    assert 5 < dear.seconds <= 5 + DEAR_S
    assert cheap.seconds < 10


def test_another_limit_on_the_error_counts(conv: Predictor) -> None:
    rows = rows_of(about("alike", 1.0), [trial(Recipe(), 0.0)] + [
        replace(trial(recipe, 0.5), accuracy=Accuracy(error=0.01)) for recipe in EVERY if "precision" in recipe.levels
    ])  # fmt: skip
    asked = [Recipe.parse("precision=bf16")]
    strict, loose = (Predictor(rows, about("new", 1.0), max_error=most).forecast(asked, ())[0] for most in (1e-3, 0.02))
    assert strict.works < 0.5 < loose.works


def test_rows_of_another_mode_or_device_are_not_gone_by() -> None:
    assert len(Predictor(atlas(), about("new", 1.0))) > 100
    training = msgspec.structs.replace(about("new", 1.0), mode="training")
    assert len(Predictor(atlas(), training)) == 0


def test_models_of_which_less_is_known_may_stand_among_the_others() -> None:
    """As close to each of two models as can be, while those are far apart: no points lie so."""
    blind = msgspec.structs.replace(about("blind", 0.5), flops=None, convolution=None, matrix=None)
    trials = [trial(Recipe(), 0.0), *(trial(recipe, gain(recipe, 0.5)) for recipe in EVERY)]
    among = Predictor(atlas() + rows_of(blind, trials), about("new", 1.0))
    apart = Predictor(atlas(), blind)
    for found in (among.forecast(EVERY, trials), apart.forecast(EVERY, trials[:3])):
        assert all(math.isfinite(one.gain) and one.spread > 0 for one in found)


def test_the_most_promising_ideas_come_first(conv: Predictor) -> None:
    assert {"precision": "bf16", "channels_last": "on"}.items() <= conv.ideas[0].levels.items()
    assert "threads" not in conv.ideas[0].levels


@pytest.mark.slow
def test_forecasts_are_the_same_under_any_hash_seed() -> None:
    code = (
        "from fettle.atlas.prediction import Predictor; from tests.atlas.made_up import *\n"
        "p = Predictor(atlas(4, 12), about('new', 1.0))\n"
        "print([(f'{one.gain:.9f}', f'{one.spread:.9f}') for one in p.forecast(p.ideas, ())])\n"
        "print([str(recipe) for recipe in p.ideas])"
    )
    root = Path(__file__).parents[2]
    said = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root,
                       env={**os.environ, "PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert said[0] == said[1] != ""
