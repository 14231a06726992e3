"""A search that is told what to expect: it is quicker where that is right, and as good where it is wrong."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from recorded import Recorded

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search import Forecast, Guide, Space, auto

LEVELS = {"precision": ("fp32", "bf16", "fp16"), "compile": ("off", "default"), "layout": ("off", "on"),
          "threads": ("all", "1"), "grad": ("on", "off"), "allocator": ("a", "b", "c")}  # fmt: skip
SPACE = Space(LEVELS, lambda recipe: "", cost=lambda recipe: 2 if "compile" in recipe.levels else 1)
GAINS = {"precision=bf16": 0.8, "precision=fp16": 0.6, "compile=default": 0.4, "layout=on": 0.3, "threads=1": -0.6,
         "grad=off": 0.05, "allocator=b": 0.02, "allocator=c": -0.02}  # fmt: skip
BEST = Recipe.parse("precision=bf16 compile=default layout=on grad=off")
BUNDLES = [
    Recipe.parse(text) for text in ("precision=bf16 layout=on", "precision=fp16 grad=off", "allocator=b grad=off")
]


def truth(recipe: Recipe) -> float:
    return sum(GAINS.get(f"{name}={level}", 0.0) for name, level in recipe.levels.items())


def session() -> Recorded:
    return Recorded(lambda recipe: 100 * math.exp(-truth(recipe)))


class Says:
    """Foresight that says the same whatever is measured."""

    def __init__(self, gain, spread: float = 0.1, seconds=lambda recipe: 5.0) -> None:
        self.gain, self.spread, self.seconds = gain, spread, seconds

    @property
    def ideas(self) -> Sequence[Recipe]:
        return [BEST, Recipe.parse("precision=fp16 threads=1"), Recipe.parse("precision=bf16 allocator=b")]

    def forecast(self, recipes: Sequence[Recipe], trials: Sequence[Trial]) -> list[Forecast]:
        return [Forecast(self.gain(recipe), self.spread, 1.0, self.seconds(recipe)) for recipe in recipes]


def test_right_foresight_saves_trials_and_finds_the_same() -> None:
    plain, told = session(), session()
    without, guide = auto(SPACE, plain), Guide(Says(truth))
    found = auto(SPACE, told, guide=guide)
    assert without is not None
    assert found is not None
    assert truth(found.recipe) >= truth(without.recipe) - 0.03
    assert {"precision": "bf16", "compile": "default", "layout": "on"}.items() <= found.recipe.levels.items()
    assert guide.is_reliable
    assert len(told.trials) < 0.8 * len(plain.trials)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda recipe: -truth(recipe),
        lambda recipe: 0.5 if "threads" in recipe.levels else -0.5,
        lambda recipe: 0.0,
        lambda recipe: 2.0,
        lambda recipe: -1.0 if "allocator" not in recipe.levels else 0.3,
    ],
)
@pytest.mark.parametrize("spread", [0.01, 0.3])
def test_a_wrong_atlas_costs_time_never_the_result(wrong, spread: float) -> None:
    without = auto(SPACE, session())
    found = auto(SPACE, session(), guide=Guide(Says(wrong, spread)))
    assert without is not None
    assert found is not None
    assert truth(found.recipe) >= truth(without.recipe) - 1e-9


@pytest.mark.parametrize("spread", [0.02, 0.2])
@pytest.mark.parametrize("name", ["precision=bf16", "layout=on", "grad=off"])
def test_a_lie_about_one_level_that_is_cheap_to_try_is_found_out(name: str, spread: float) -> None:
    """Right about everything else, and sure that this one makes it slower."""

    def lie(recipe: Recipe) -> float:
        told = {f"{key}={level}" for key, level in recipe.levels.items()}
        return truth(recipe) - (GAINS[name] + 0.5 if name in told else 0.0)

    without = auto(SPACE, session())
    found = auto(SPACE, session(), guide=Guide(Says(lie, spread)))
    assert without is not None
    assert found is not None
    assert truth(found.recipe) >= truth(without.recipe) - 1e-9


def test_every_level_that_is_cheap_to_try_runs_whatever_is_foreseen() -> None:
    told = session()
    auto(SPACE, told, guide=Guide(Says(lambda recipe: truth(recipe) if recipe == BEST else -0.9)))
    tried = {level for recipe in told.trials for level in recipe.levels.items()}
    cheap = {(name, level) for name, levels in LEVELS.items() for level in levels[1:] if name != "compile"}
    assert tried >= cheap


@pytest.mark.parametrize(("spread", "tried"), [(0.05, False), (0.8, True)])
def test_what_takes_long_to_start_is_left_out_where_it_is_surely_slower(spread: float, tried: bool) -> None:
    """It is slower, and what is foreseen of all else is right."""
    gain = lambda recipe: truth(recipe) - 1.2 * ("compile" in recipe.levels)  # noqa: E731
    told = Recorded(lambda recipe: 100 * math.exp(-gain(recipe)))
    found = auto(SPACE, told, guide=Guide(Says(gain, spread)))
    assert found is not None
    assert "compile" not in found.recipe.levels
    assert any("compile" in recipe.levels for recipe in told.trials) == tried


def test_bundles_are_raced_first_whatever_is_foreseen() -> None:
    told = session()
    auto(replace(SPACE, bundles=BUNDLES), told, guide=Guide(Says(lambda recipe: -0.9, 0.05)))
    assert {recipe for recipe in told.races[0] if recipe.levels} == set(BUNDLES)


def test_what_takes_a_minute_must_promise_more() -> None:
    told = session()
    guide = Guide(Says(truth, seconds=lambda recipe: 600.0 if "compile" in recipe.levels else 5.0))
    auto(SPACE, told, guide=guide)
    first = next(race for race in told.races if any(recipe.levels for recipe in race))
    assert not any("compile" in recipe.levels for recipe in first)
    quick = session()
    auto(SPACE, quick, guide=Guide(Says(truth)))
    assert any("compile" in recipe.levels for recipe in quick.races[0])


def test_it_says_what_it_expected_and_what_it_found() -> None:
    lines: list[str] = []
    guide = Guide(Says(truth), lines.append)
    auto(SPACE, session(), guide=guide)
    assert any("expected" in line and "found" in line for line in lines)
    assert guide.summary()[0].startswith(f"The atlas foresaw {len(guide.foreseen)} recipes:")
    wrong = Guide(Says(lambda recipe: 2.0, 0.01), lines.append)
    auto(SPACE, session(), guide=wrong)
    assert "It was wrong too often" in wrong.summary()[0]
    assert "the atlas was wrong about this model: searching as without it" in lines
    without_hope = Guide(Says(lambda recipe: -truth(recipe), 0.01), lines.append)
    auto(SPACE, session(), guide=without_hope)
    assert "the atlas expects that nothing helps here: searching as without it" in lines
    back = Guide(Says(truth))
    measured = session().measure([Recipe(), BEST])
    back.look_back(measured)
    assert [one.recipe for one in back.foreseen] == [BEST]
    assert back.foreseen[0].held


def test_a_search_that_goes_on_asks_the_same() -> None:
    first = session()
    auto(SPACE, first, guide=Guide(Says(truth)))
    again = session()
    again.trials = dict(first.trials)
    auto(SPACE, again, guide=Guide(Says(truth)))
    assert again.races == first.races
    assert again.trials.keys() == first.trials.keys()


def test_improvement_counts_what_may_be_gained_alone() -> None:
    sure, unsure = Forecast(0.0, 0.01, 1.0, 1.0), Forecast(0.0, 0.5, 1.0, 1.0)
    assert sure.improvement(0.0) < 0.005 < unsure.improvement(0.0)
    assert Forecast(0.5, 0.01, 0.5, 1.0).improvement(0.0) == pytest.approx(0.5 * (0.5 - math.log(1.01)), rel=1e-3)
    assert unsure.chance(-10.0) == pytest.approx(1.0)
