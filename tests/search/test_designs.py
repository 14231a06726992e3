"""The other designs, and what every design must keep."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from recorded import Recorded
from test_auto import landscape

from fettle.recipe import Recipe
from fettle.search import DESIGNS, Space, combinations_of, is_sampled, moved, removals, steps
from fettle.search.designs import _columns, _spread

LEVELS = {"a": 0.5, "b": 1.25, "c": 0.8}


def time_ms(recipe):
    if "d" in recipe.levels:
        return None
    return 100 * float(np.prod([LEVELS[name] for name in recipe.levels]))


SPACE = Space(dict.fromkeys("abcd", ("off", "on")), lambda recipe: "")


@pytest.mark.parametrize("name", DESIGNS)
@pytest.mark.parametrize("seed", range(6))
def test_every_design_keeps_the_rules(name, seed):
    space, times = landscape(seed)
    session = Recorded(times)
    found = DESIGNS[name](space, session)
    assert found is not None
    assert found.ok
    assert not [recipe for recipe in session.asked if space.conflict(recipe)]
    assert DESIGNS[name](space, Recorded(times, budget=1)) is not None


def test_ladder_shows_every_rung_and_leaves_out_what_does_not_help():
    shown = [(step.label, step.trial.status, step.kept) for step in steps(SPACE, Recorded(time_ms))]
    assert shown == [
        ("as given", "measured", True), ("a=on", "measured", True), ("b=on", "measured", False),
        ("c=on", "measured", True), ("d=on", "failed", False),
    ]  # fmt: skip


def test_a_ladder_shows_what_cannot_stand_on_the_rungs_below_with_the_reason():
    space = Space(SPACE.choices, lambda recipe: "c: not beside a" if {"a", "c"} <= recipe.levels.keys() else "",
                  required=Recipe({"b": "on"}))  # fmt: skip
    session = Recorded(time_ms)
    shown = {step.label: (step.trial.status, step.trial.reason, step.kept) for step in steps(space, session)}
    assert list(shown) == ["as given", "b=on", "a=on", "c=on", "d=on"]
    assert shown["c=on"] == ("failed", "c: not beside a", False)
    idle = replace(space, is_idle=lambda recipe: "c" in recipe.levels)
    assert "c=on" not in [step.label for step in steps(idle, Recorded(time_ms))]
    assert not [recipe for recipe in session.asked if space.conflict(recipe)]


def test_ablation_says_what_is_worth_its_place():
    shown = removals(SPACE, Recorded(time_ms), Recipe.parse("a=on b=on"))
    assert [(step.label, step.kept) for step in shown] == [
        ("a=on b=on", True),
        ("without a", True),
        ("without b", False),
    ]


def test_factorial_has_every_valid_combination():
    assert len(combinations_of(SPACE)) == 16


def test_of_a_large_space_every_combination_that_can_work_is_found():
    choices = {**{f"t{i}": ("off", "on") for i in range(16)}, "needs": ("off", "on")}

    def conflict(recipe):
        alone = len(recipe.levels.keys() - {"needs"}) < 2 and ("needs" not in recipe.levels or "t0" in recipe.levels)
        return "" if alone else "no"

    space = Space(choices, conflict, {"needs": {"t0": "on"}})
    assert not is_sampled(space)
    assert len(combinations_of(space, 10**6)) == 1 + 16 + 1
    assert is_sampled(Space(choices, lambda recipe: ""))


def test_a_space_that_is_too_large_to_list_is_not_listed_to_find_that_out():
    switches = {f"t{i}": ("off", "on") for i in range(14)}
    space = Space({**switches, "wide": tuple(map(str, range(46)))}, lambda recipe: "")
    tracemalloc.start()
    try:
        assert is_sampled(space)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 * 2**20


def test_interactions_of_a_large_space_are_not_written_out():
    space = Space({f"t{i}": ("off", "on") for i in range(11)}, lambda recipe: "")
    recipes = combinations_of(space, 10**6)
    tracemalloc.start()
    try:
        mains, pairs = _columns(space, recipes)
        _spread((mains, pairs), 8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert mains.shape == (2**11, 11)
    assert pairs.sum() == 55
    assert peak < (1 + 11 + 55) * mains[:, 0].size * mains.itemsize


def test_a_fraction_is_balanced_and_the_same_each_time():
    space = Space({f"t{i}": ("off", "on") for i in range(8)}, lambda recipe: "")
    recipes = combinations_of(space, most=32)
    assert recipes == combinations_of(space, most=32)
    assert len(set(recipes)) == 32
    signs = np.array([[1 if name in recipe.levels else -1 for name in space.choices] for recipe in recipes])
    assert np.abs(signs.sum(axis=0)).max() <= 4
    assert np.linalg.cond(np.column_stack([np.ones(32), signs])) < 2


def test_a_fraction_takes_the_row_that_is_known_least(monkeypatch):
    """What is known of all rows is brought up to date, not computed anew for each that is chosen."""
    mains = np.random.default_rng(0).choice([-1.0, 1.0], size=(60, 6))
    pairs = np.triu(np.ones((6, 6), dtype=bool), 1)
    pairs[0, 1] = False  # levels of one technique
    written_out = [mains[:, one] * mains[:, two] for one, two in np.argwhere(pairs)]
    matrix = np.column_stack([np.ones(60), mains, *written_out])
    precision = np.array([1e-3] * 7 + [1.0] * 14)
    products, outer = [], np.outer
    monkeypatch.setattr(np, "outer", lambda *given: (products.append(1), outer(*given))[1])
    chosen = _spread((mains, pairs), 30)
    assert len(products) == len(set(chosen)) == 30
    for count, row in enumerate(chosen):
        known = np.linalg.inv(np.diag(precision) + matrix[chosen[:count]].T @ matrix[chosen[:count]])
        variance = ((matrix @ known) * matrix).sum(axis=1)
        variance[chosen[:count]] = -np.inf
        assert variance[row] == pytest.approx(variance.max(), rel=1e-6)


def test_valid_combinations_are_found_where_hardly_any_is():
    """As in a pipeline: of 12 techniques of nine levels no more than three may be set."""
    space = Space({f"t{i}": ("off", *"abcdefgh") for i in range(12)}, lambda recipe: "full" * (len(recipe.levels) > 3))
    recipes = combinations_of(space, most=40)
    assert len(set(recipes)) == 40
    assert not any(space.conflict(recipe) for recipe in recipes)
    assert {name for recipe in recipes for name in recipe.levels} == set(space.choices)


@pytest.mark.parametrize("seed", range(3))
def test_what_did_not_fit_at_once_is_asked_for_again(seed):
    """A session that keeps much time back takes one recipe at a time: the search is the same, only in smaller races."""

    class Cautious(Recorded):
        def measure(self, recipes):
            new = next((recipe for recipe in recipes if recipe not in self.trials), None)
            return super().measure([recipe for recipe in recipes if recipe in self.trials or recipe is new])

    space, times = landscape(seed)
    bold, cautious = Recorded(times), Cautious(times)
    assert DESIGNS["auto"](space, bold) == DESIGNS["auto"](space, cautious)
    assert bold.trials.keys() == cautious.trials.keys()


def test_a_level_does_not_bring_one_that_is_not_allowed():
    space = Space(
        {"compile": ("off", "max-autotune"), "freeze": ("off", "on")},
        lambda recipe: "",
        {"freeze": {"compile": "default"}},
    )
    assert moved(space, Recipe(), "freeze", "on") is None
    assert moved(space, Recipe({"compile": "max-autotune"}), "freeze", "on") == Recipe(
        {"compile": "max-autotune", "freeze": "on"}
    )
