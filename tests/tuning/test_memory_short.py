"""Recipes whose processes do not fit into memory together run in races of their own, and are compared all the same."""

from dataclasses import replace

import pytest
from simulated import World, made_up_space, session_in

from fettle.measure import _candidates
from fettle.recipe import Recipe


def test_recipes_that_do_not_fit_into_memory_together_are_tied_by_the_model_as_given(tmp_path, monkeypatch):
    world = World(lambda recipe: 10.0 if not recipe.levels else 5.0 if "precision" in recipe.levels else 2.0)
    world.install(monkeypatch)
    monkeypatch.setattr(_candidates, "_memory_is_short", lambda running: True)
    _, facts = made_up_space()
    opened = session_in(world, tmp_path, 600.0, facts)
    recipes = [Recipe.parse(text) for text in ("precision=bf16", "runtime=onnxruntime", "compile=default")]
    opened.measure([Recipe()])
    opened.race_unknown(recipes)
    fit = opened.standings.fit
    assert fit is not None
    found = [fit.speedup(recipe) for recipe in recipes]
    assert all(one is not None for one in found)
    assert [round(one.estimate) for one in found if one is not None] == [2, 5, 5]
    assert fit.log_ratio(recipes[0], recipes[2]) is not None


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """A session in a world with memory for three processes."""
    world = World(lambda recipe: 10.0 / (1 + len(recipe.levels)))
    world.install(monkeypatch)
    session = session_in(world, tmp_path, 600.0, made_up_space()[1])
    session.measure([Recipe()])
    world.room = 3
    return session


def test_a_recipe_that_runs_out_of_memory_beside_others_is_tried_with_the_model_as_given_alone(opened):
    recipes = [Recipe.parse(text) for text in ("precision=bf16", "grad=no_grad", "compile=default", "matmul=medium")]
    assert [trial.status for trial in opened.measure(recipes)] == ["measured"] * 4


def test_a_further_process_for_which_there_is_no_memory_fails_no_recipe(opened):
    rules = replace(opened.rules, replicates=3, replicate_s=600.0)
    trials = opened.run([Recipe(), Recipe.parse("precision=bf16")], rules)
    assert [trial.status for trial in trials] == ["measured"] * 2
