"""The real session, race and statistics on a machine whose truth is known: from recipes to the surprise."""

import math
from dataclasses import replace

import pytest

from fettle.estimates import student
from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.studies import designs
from fettle.studies.analysis import analyse
from fettle.studies.outcome import MEMORY, TIME, Measured, table_of
from tests.tuning.simulated import World, made_up_space, session_in

NAMES = ("mode", "grad", "precision", "channels_last")


def time_ms(recipe: Recipe) -> float:
    """channels_last costs a fifth in float32, and brings 1.6x in bfloat16."""
    low, last = recipe.levels.get("precision") == "bf16", recipe.levels.get("channels_last") == "on"
    return 20.0 / (2.0 if low else 1.0) / ((1.6 if low else 0.8) if last else 1.0)


def test_every_combination_has_the_same_rounds_and_the_surprise_comes_out(monkeypatch, tmp_path):
    world = World(time_ms, seed=3)
    world.install(monkeypatch)
    space, facts = made_up_space()
    space = replace(space, choices={name: space.choices[name][:2] for name in NAMES})
    session = session_in(world, tmp_path, None, facts)
    session.rules = replace(session.rules, equal_rounds=7)
    cells = designs.cells("factorial", space, Recipe())
    assert len(cells) == 9  # eval mode is in each but the first
    for begin in range(0, len(cells), 4):
        session.measure(cells[begin : begin + 4])
    trials = [session.standings.known[recipe] for recipe in cells]
    assert {trial.rounds for trial in trials} == {7}
    table = table_of([Measured("made up", {}, space.choices, trials)], {})
    time = analyse(table)[0]
    assert time.checks is not None
    assert time.surprises[0].kind == "needs"
    assert time.surprises[0].text.startswith("channels_last=on needs precision=bf16: worth 0.")
    assert time.dominant[0] == "precision"
    ratio = {effect.label: effect for effect in time.effects}["precision=bf16 × channels_last=on"].ratio
    assert ratio.low < 2.0 < ratio.high
    assert not table.notes
    busy = [replace(trials[0], is_quiet=False), *trials[1:]]
    assert "1 of 9 experiments" in table_of([Measured("made up", {}, space.choices, busy)], {}).notes[0]


def test_without_equal_rounds_the_race_ends_when_the_leader_is_certain(monkeypatch, tmp_path):
    world = World(time_ms, seed=3)
    world.install(monkeypatch)
    _, facts = made_up_space()
    session = session_in(world, tmp_path, None, facts)
    cells = [Recipe.parse(text) for text in ("baseline", "precision=bf16 channels_last=on", "channels_last=on")]
    trials = session.measure(cells)
    assert all(trial.rounds < 7 for trial in trials)


def test_the_error_of_a_time_is_the_same_whatever_the_level_of_its_interval():
    given, faster = Trial(Recipe(), "measured", time_ms=2.0), Recipe({"precision": "bf16"})

    def error(confidence: float) -> float:
        half = student(math.inf, 1 - confidence) * 0.1
        ratio = Interval(2.0, 2.0 * math.exp(-half), 2.0 * math.exp(half))
        trials = [given, Trial(faster, "measured", time_ms=1.0, speedup=ratio)]
        choices = {"precision": ("fp32", "bf16")}
        table = table_of([Measured("net", {}, choices, trials, confidence=confidence)], {})
        return table.experiments[1].errors[TIME]

    assert [error(0.8), error(0.95), error(0.99)] == [pytest.approx(0.1)] * 3


def test_a_recipe_whose_time_no_slice_shows_has_none():
    """What a call took in all, beside whatever had the machine, is no time of the recipe's."""
    given = Trial(Recipe(), "measured", time_ms=2.0)
    crowded = Trial(Recipe({"precision": "bf16"}), "measured", time_ms=600.0, is_quiet=False, peak_bytes=1 << 20)
    rows = table_of([Measured("net", {}, {"precision": ("fp32", "bf16")}, [given, crowded])], {}).experiments
    assert [row.value(TIME) for row in rows] == [2.0, None]
    assert rows[1].value(MEMORY) == 1.0
    assert "others had the machine" in rows[1].reason
