"""The goal and the limits as numbers, and the time that is kept back for the final race."""

import math
import time

import pytest

from fettle.measure import Accuracy, Interval, Startup, Trial
from fettle.recipe import Recipe
from fettle.result import Limits
from fettle.tuning._budget import Budget
from fettle.tuning._final_race import climb
from fettle.tuning.options import options_of
from fettle.tuning.standings import distance, misses_of, score_of


def trial(**facts) -> Trial:
    given = {
        "time_ms": 10.0, "samples": 5, "speedup": Interval(2.0, 1.9, 2.1), "peak_bytes": 1 << 20, "energy_j": None,
        "startup": Startup(1.0, 2.0, 3.0), "accuracy": Accuracy(error=0.01),
    }  # fmt: skip
    return Trial(Recipe({"precision": "bf16"}), "measured", **{**given, **facts})


def test_a_score_is_smaller_for_the_better_trial():
    assert score_of(trial(speedup=Interval(3.0, 2.9, 3.1)), "throughput") < score_of(trial(), "throughput")
    assert score_of(trial(peak_bytes=1), "memory") < score_of(trial(), "memory")
    assert score_of(trial(startup=Startup(0.1, 0.1, 0.1)), "startup") < score_of(trial(), "startup")
    larger = trial(energy_j=6.0, samples=40)  # eight times the rows
    assert score_of(larger, "energy") < score_of(trial(energy_j=1.0), "energy")
    again = trial(startup=Startup(1.0, 4.0, 5.0, "cold", warm_s=0.5))
    assert score_of(again, "startup") > score_of(trial(), "startup")
    assert score_of(again, "warm-startup") < score_of(trial(), "warm-startup")


@pytest.mark.parametrize(
    ("facts", "goal"), [({"speedup": None}, "latency"), ({"peak_bytes": None}, "memory"), ({}, "energy")]
)
def test_what_was_not_measured_never_wins(facts, goal):
    assert score_of(trial(**facts), goal) == math.inf


@pytest.mark.parametrize(
    ("limits", "phrase"),
    [
        (Limits(max_latency_ms=9), "10 ms is above 9 ms"),
        (Limits(max_memory_bytes=1 << 19), "1 MiB is above 0 MiB"),
        (Limits(min_throughput=501), "500 samples a second are below 501"),
        (Limits(max_latency_ms=10, max_memory_bytes=1 << 20, min_throughput=500), ""),
    ],
)
def test_a_limit_that_is_missed_is_named(limits, phrase):
    assert misses_of(trial(), limits) == phrase


def test_an_unknown_time_or_memory_keeps_no_limit():
    assert misses_of(trial(time_ms=math.nan), Limits(max_latency_ms=9))
    assert misses_of(trial(peak_bytes=None), Limits(max_memory_bytes=9))


def test_the_largest_miss_is_the_distance():
    assert distance(trial(), Limits(max_error=0.02)) == 0
    assert distance(trial(), Limits(max_error=0.005, max_latency_ms=9)) == pytest.approx(math.log(2))
    assert distance(trial(accuracy=Accuracy()), Limits(max_error=0.02)) == math.inf


def test_no_budget_is_never_spent():
    free = Budget(None, time.monotonic())
    assert free.deadline([trial()]) == math.inf
    assert free.left_s == math.inf
    assert Budget(1.0, time.monotonic()).left_s <= 1.0


def test_a_ladder_climbs_one_level_at_a_time():
    recipe = Recipe({"compile": "default", "precision": "bf16", "grad": "inference_mode"})
    steps = climb(recipe)
    assert [len(step.levels) for step in steps] == [1, 2, 3]
    assert steps[-1] == recipe


def test_a_metric_decides_alone_unless_an_error_is_asked_for_too():
    assert options_of(None, {}).limits.max_error == 0.02
    assert options_of(None, {"max_metric_drop": 0.01}).limits.max_error is None
    assert options_of(None, {"max_metric_drop": 0.01, "max_error": 0.1}).limits.max_error == 0.1
