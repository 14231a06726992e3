"""What a start takes in a made-up world: cold where a recipe's first process ran, warm in every other."""

import os
from dataclasses import replace

import pytest
from simulated import World, made_up_space, session_in, study

from fettle.recipe import Recipe
from fettle.search import auto
from fettle.tuning import _probe
from fettle.tuning._outcome import pick_winner
from fettle.tuning.session import Session

COLD_S, WARM = 20.0, 0.4
"""What a first process compiles, and the share of it that another still needs (`simulated.World`)."""


def session(tmp_path, monkeypatch):
    world = World(lambda recipe: 2.0 if "runtime" in recipe.levels else 14.0,
                  lambda recipe: COLD_S if "runtime" in recipe.levels else 1.0)  # fmt: skip
    world.install(monkeypatch)
    space, facts = made_up_space()
    return world, space, session_in(world, tmp_path, 600.0, facts)


def test_a_winner_whose_first_start_was_cold_is_not_said_to_start_warm(tmp_path, monkeypatch):
    world, space, opened = session(tmp_path, monkeypatch)
    last = study(world, opened, space, auto)
    winner, _ = pick_winner(opened, last.trials)
    assert winner.recipe.levels["runtime"]
    assert winner.startup.cache == "cold"
    assert winner.startup.total_s == pytest.approx(COLD_S + 0.1)
    assert winner.startup.warm_s == pytest.approx(WARM * COLD_S + 0.1)


def test_a_process_that_is_held_is_no_second_start(tmp_path, monkeypatch):
    _, _, opened = session(tmp_path, monkeypatch)
    recipe = Recipe.parse("runtime=onnxruntime")
    opened.measure([Recipe()])
    opened.race_unknown([recipe])
    (again, *_) = [one for one in opened.run([Recipe(), recipe], opened.rules, opened.held) if one.recipe == recipe]
    assert again.startup == opened.standings.known[recipe].startup
    assert again.startup.warm_s != again.startup.warm_s
    (fresh, *_) = [one for one in opened.run([Recipe(), recipe], opened.rules) if one.recipe == recipe]
    assert fresh.startup.cache == "cold"
    assert fresh.startup.warm_s == pytest.approx(WARM * COLD_S + 0.1)
    assert opened.standings.known[recipe].startup == fresh.startup


def test_a_held_process_that_dies_while_the_others_start_takes_nobody_elses(tmp_path, monkeypatch):
    world, _, opened = session(tmp_path, monkeypatch)
    opened.measure([Recipe()])
    codes = iter([None])  # when it is asked for the first time
    opened.held.runners[Recipe()].worker.wait = lambda timeout_s: next(codes, -9)
    recipe = Recipe.parse("runtime=onnxruntime")
    assert [one.recipe for one in opened.run([Recipe(), recipe], opened.rules, opened.held)] == [Recipe(), recipe]
    assert world.started == ["baseline", str(recipe)]


def test_the_goal_of_a_warm_start_starts_each_recipe_twice(tmp_path, monkeypatch):
    world, _, opened = session(tmp_path, monkeypatch)
    options = replace(opened.options, goal="warm-startup")
    assert Session(opened.target, options, lambda event: None).rules.replicates == 2
    opened.rules = replace(opened.rules, replicates=2, replicate_s=600.0)
    opened.measure([Recipe(), Recipe.parse("runtime=onnxruntime")])
    for trial in opened.standings.known.values():
        assert world.started.count(str(trial.recipe)) == 2
        assert trial.startup.warm_s <= trial.startup.total_s


def test_references_of_models_that_were_edited_long_ago_go(tmp_path):
    used, lately, long_ago = (tmp_path / f"reference-{name}.pt" for name in ("used", "lately", "long-ago"))
    for path in (used, lately, long_ago):
        path.touch()
    for path in (used, long_ago):
        os.utime(path, (0, 0))
    _probe._let_go(used)
    assert {*tmp_path.iterdir()} == {used, lately}
