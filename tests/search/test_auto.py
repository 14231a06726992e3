"""Properties of the default design on landscapes drawn at random."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import Recorded

from fettle.measure import FAR, Trial
from fettle.recipe import Recipe
from fettle.search import Space, auto


def landscape(seed, interactions=True, faults=True):
    """A space with exclusions, needs and expensive levels, and a time for each recipe."""
    rng = random.Random(seed)
    choices = {f"t{i}": ("off", *(f"l{j}" for j in range(rng.randint(1, 3)))) for i in range(rng.randint(2, 7))}
    names = list(choices)
    apart = {tuple(rng.sample(names, 2)) for _ in range(rng.randint(0, 2))} if interactions else set()
    needs = {}
    if len(names) > 3 and rng.random() < 0.5:
        needs = {names[-1]: {names[0]: "l0"}}
        apart = {pair for pair in apart if set(pair) != {names[-1], names[0]}}
    expensive = {name for name in names if rng.random() < 0.4}
    main = {(n, level): rng.gauss(0.1, 0.3) for n in names for level in choices[n][1:]}
    pair = {(a, b): rng.gauss(0, 0.2) for a in main for b in main if a[0] < b[0]} if interactions else {}
    broken = {item for item in main if faults and rng.random() < 0.1}
    wrong = {item for item in main if faults and rng.random() < 0.1}

    def conflict(recipe):
        if any(a in recipe.levels and b in recipe.levels for a, b in apart):
            return "they exclude each other"
        return next(
            (
                "needs another"
                for n, need in needs.items()
                if n in recipe.levels and not need.keys() <= recipe.levels.keys()
            ),
            "",
        )

    def time_ms(recipe):
        levels = list(recipe.levels.items())
        if broken & set(levels):
            return None
        gain = sum(main[item] for item in levels) + sum(pair.get((a, b), 0.0) for a in levels for b in levels)
        return 100 * math.exp(-gain) * (-1 if wrong & set(levels) else 1)

    space = Space(choices, conflict, needs, cost=lambda recipe: 2 if expensive & recipe.levels.keys() else 1)
    return space, time_ms


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_only_valid_recipes_each_once_and_the_answer_may_win(seed):
    space, time_ms = landscape(seed)
    session = Recorded(time_ms)
    found = auto(space, session)
    assert not [recipe for recipe in session.asked if space.conflict(recipe)]
    assert len(session.asked) == len(set(session.asked))
    assert found is not None
    assert found.ok
    assert session.score(found) == min(map(session.score, session.trials.values()))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_no_cheap_neighbour_is_better(seed):
    """Neighbours that start in seconds are all tried unless they hold what made another recipe inaccurate."""
    space, time_ms = landscape(seed)
    session = Recorded(time_ms)
    found = auto(space, session)
    for name, levels in space.choices.items():
        for level in levels:
            levels_there = {**found.recipe.levels, name: level}
            recipe = Recipe({n: v for n, v in levels_there.items() if v != "off"})
            time = time_ms(recipe)
            if not space.conflict(recipe) and space.cost(recipe) == 1 and time and time > 0:
                assert found.time_ms <= time


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_where_gains_add_up_the_optimum_is_found(seed):
    space, time_ms = landscape(seed, interactions=False, faults=False)
    session = Recorded(time_ms)
    found = auto(space, session)
    each = (min((time_ms(Recipe({n: v})) / 100 for v in levels[1:]), default=1) for n, levels in space.choices.items())
    if not space.needs:
        assert math.isclose(found.time_ms, 100 * math.prod(min(1, one) for one in each))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 12))
def test_a_study_that_was_cut_short_ends_as_if_it_had_not_been(seed, budget):
    space, time_ms = landscape(seed)
    whole = Recorded(time_ms)
    expected = auto(space, whole)
    session = Recorded(time_ms, budget=budget)
    auto(space, session)
    assert len(session.trials) <= budget
    session.budget = 10**6
    resumed = auto(space, session)
    assert resumed == expected
    assert session.trials.keys() == whole.trials.keys()


def test_nothing_to_try_is_the_baseline():
    found = auto(Space({}, lambda recipe: ""), Recorded(lambda recipe: 5.0))
    assert found is not None
    assert found.recipe == Recipe()


def test_nothing_that_may_win_is_none():
    assert auto(Space({"a": ("off", "on")}, lambda recipe: ""), Recorded(lambda recipe: -5.0)) is None


def test_noise_does_not_displace_the_simpler_recipe():
    space = Space({"a": ("off", "on")}, lambda recipe: "")
    found = auto(space, Recorded(lambda recipe: 99.0 if recipe.levels else 100.0, spread=0.03))
    assert found is not None
    assert found.recipe == Recipe()


def test_inaccurate_levels_are_not_composed():
    space = Space({"a": ("off", "on"), "b": ("off", "on"), "c": ("off", "on")}, lambda recipe: "")
    session = Recorded(lambda recipe: -1.0 if "a" in recipe.levels else 100.0 / (1 + len(recipe.levels)))
    auto(space, session)
    assert [recipe for recipe in session.asked if "a" in recipe.levels] == [Recipe({"a": "on"})]


def test_a_bundle_acquits_a_level_that_was_inaccurate_alone():
    bundle = Recipe({"a": "on", "b": "on"})
    space = Space({"a": ("off", "on"), "b": ("off", "on"), "c": ("off", "on")}, lambda recipe: "", bundles=[bundle])
    session = Recorded(lambda recipe: -1.0 if recipe == Recipe({"a": "on"}) else 100.0 / (1 + len(recipe.levels)))
    found = auto(space, session)
    assert found is not None
    assert found.recipe == Recipe({"a": "on", "b": "on", "c": "on"})


def test_a_diagnosis_goes_first():
    space = Space({"a": ("off", "on"), "b": ("off", "on")}, lambda recipe: "", cost=lambda recipe: 3)
    session = Recorded(lambda recipe: 100.0)
    auto(space, session, first=["b"])
    assert session.asked[1] == Recipe({"b": "on"})


def test_a_level_that_was_ended_as_too_slow_is_tried_once():
    class Ending(Recorded):
        def _run(self, recipe):
            trial = super()._run(recipe)
            slow = trial.time_ms > FAR * self.base_ms
            return Trial(recipe, "failed", reason="too slow", too_slow=True) if slow else trial

    gain = {"emulated": -2.3, "a": 0.4, "b": 0.2}
    space = Space(dict.fromkeys(gain, ("off", "on")), lambda recipe: "")
    session = Ending(lambda recipe: 100 * math.exp(-sum(gain[name] for name in recipe.levels)))
    found = auto(space, session)
    assert found is not None
    assert found.recipe == Recipe({"a": "on", "b": "on"})
    assert sum("emulated" in recipe.levels for recipe in session.asked) == 1


def test_ten_techniques_take_few_trials():
    """Like ResNet-50 on a CPU: layout and 16 bits multiply, freezing needs a compile, another runtime excludes all."""
    gain = {"precision": 0.55, "channels_last": 0.2, "grad": 0.08, "compile": 0.3, "freeze": 0.5, "runtime": 0.9}
    choices = {
        "threads": ("given", "1"), "matmul": ("given", "medium"), "grad": ("given", "inference_mode"),
        "precision": ("given", "bf16", "autocast-bf16"), "channels_last": ("given", "on"),
        "attention": ("given", "sdpa"), "compile": ("given", "default", "max-autotune"), "freeze": ("given", "on"),
        "quant": ("given", "int8"), "runtime": ("given", "openvino"),
    }  # fmt: skip

    def conflict(recipe):
        if "runtime" in recipe.levels and len(recipe.levels) > 1:
            return "the runtime replaces the rest"
        return "needs compile" if "freeze" in recipe.levels and "compile" not in recipe.levels else ""

    def time_ms(recipe):
        total = sum(gain.get(name, -0.1) for name in recipe.levels)
        return 400 * math.exp(-total - 0.7 * ({"precision", "channels_last"} <= recipe.levels.keys()))

    expensive = {"compile", "freeze", "quant", "runtime"}
    needs = {"freeze": {"compile": "default"}}
    space = Space(choices, conflict, needs, cost=lambda recipe: 2 if expensive & recipe.levels.keys() else 1)
    session = Recorded(time_ms)
    found = auto(space, session)
    assert found is not None
    assert {"precision", "channels_last", "grad", "compile", "freeze"} == set(found.recipe.levels)
    assert len(session.trials) <= 25
