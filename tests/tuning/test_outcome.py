"""Which of the trials a result is made of."""

import math
from dataclasses import replace

import pytest

from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.techniques import Facts
from fettle.tuning import Options, Session
from fettle.tuning._outcome import _beside, _remarks
from fettle.workload import Target

WINNER = Trial(Recipe({"precision": "bf16"}), "measured", time_ms=5.0, speedup=Interval(2.0, 1.9, 2.1))
GIVEN = Trial(Recipe(), "measured", time_ms=10.0)


def test_the_baseline_beside_the_winner_is_of_its_race():
    assert _beside(WINNER, [GIVEN, WINNER]) is GIVEN
    assert _beside(WINNER, []) is None  # never measured again
    assert _beside(None, [GIVEN, WINNER]) is None


def test_a_baseline_that_died_in_the_final_race_is_not_shown_as_its_time():
    assert _beside(WINNER, [Trial(Recipe(), "failed", "killed", time_ms=math.nan), WINNER]) is None


def test_what_a_level_of_the_winner_means_for_its_user_is_said_once(tmp_path):
    session = Session(Target("made/up.py:workload"), Options(output=tmp_path), lambda event: None)
    session.facts = Facts()
    won = replace(WINNER, recipe=Recipe.parse("runtime[a]=openvino runtime[b]=openvino-bf16 threads=1"))
    (said,) = filter(None, _remarks(session, won))
    assert said.startswith("Inputs of another shape are converted when they first come")
    assert _remarks(session, None) == []
    session.facts = Facts(new_tokens=3)
    assert _remarks(session, won) == []


@pytest.mark.parametrize(("goal", "seconds"), [("energy", 0.5), ("throughput", 0.08)])
def test_slices_outlast_the_period_of_an_energy_counter(goal, seconds, tmp_path):
    session = Session(
        Target("made/up.py:workload"), Options(goal=goal, budget_s=None, output=tmp_path), lambda event: None
    )
    assert session.rules.slice_s == seconds
