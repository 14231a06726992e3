"""The goal and the limits as numbers, and the time that is kept back for the final race."""

import math
import time
from dataclasses import replace

import pytest

import fettle
from fettle import comparing
from fettle.errors import UsageError
from fettle.generate.speed import Generation
from fettle.measure import Accuracy, Interval, Startup, Trial
from fettle.recipe import Recipe
from fettle.recipe_file import RecipeFile
from fettle.result import Limits
from fettle.tuning import Options, check_options, check_ranks
from fettle.tuning._budget import Budget
from fettle.tuning._final_race import climb
from fettle.tuning.options import options_of
from fettle.tuning.standings import distance, misses_of, score_of
from fettle.workload import Target


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
    assert misses_of(trial(), limits, "throughput") == phrase


@pytest.mark.parametrize(
    ("goal", "limits", "phrase"),
    [
        ("ttft", Limits(max_latency_ms=50), "70 ms a text is above 50 ms"),
        ("tpot", Limits(max_latency_ms=50), "70 ms a text is above 50 ms"),
        ("tpot", Limits(max_latency_ms=70, max_ttft_ms=20, max_tpot_ms=2), ""),
        ("ttft", Limits(max_tpot_ms=1.5), "2 ms per output token are above 1.5 ms"),
        ("tpot", Limits(max_ttft_ms=19), "20 ms to the first token are above 19 ms"),
        ("memory", Limits(max_latency_ms=9), "10 ms is above 9 ms"),
    ],
)
def test_limits_hold_for_whole_texts_and_their_parts_beside_any_goal(goal, limits, phrase):
    check_options(Options(goal=goal, limits=limits))
    made = trial(generation=Generation(ttft_ms=20, tpot_ms=2, text_ms=70))
    assert misses_of(made, limits.of("text"), goal) == phrase
    assert (distance(made, limits.of("text"), goal) > 0) == bool(phrase)
    assert comparing._within(made, limits.of("text"), goal).reason == phrase
    earlier = trial(generation=Generation(ttft_ms=20, tpot_ms=2))
    assert "not known: measure again" in misses_of(earlier, Limits(max_latency_ms=50), "ttft")


def test_an_unknown_time_or_memory_keeps_no_limit():
    assert misses_of(trial(time_ms=math.nan), Limits(max_latency_ms=9), "throughput")
    assert misses_of(trial(peak_bytes=None), Limits(max_memory_bytes=9), "throughput")


def test_the_largest_miss_is_the_distance():
    assert distance(trial(), Limits(max_error=0.02), "throughput") == 0
    assert distance(trial(), Limits(max_error=0.005, max_latency_ms=9), "throughput") == pytest.approx(math.log(2))
    assert distance(trial(accuracy=Accuracy()), Limits(max_error=0.02), "throughput") == math.inf


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


def test_a_model_whose_own_answers_differ_by_more_than_the_limit_is_told_to_have_a_metric():
    limits = Limits(max_error=0.02)
    (said,) = limits.drowned(1.3)
    assert "differ by 1.3 from seed to seed" in said
    assert limits.drowned(0.01) == Limits(max_error=None).drowned(1.3) == []
    assert replace(limits, max_metric_drop=0.1).drowned(1.3) == []


def test_the_error_is_limited_in_the_unit_of_what_is_tuned():
    usual = {"inference": 0.02, "text": 0.01, "training": 1.0}
    for kind, number in usual.items():
        assert Limits().of(kind).max_error == number
        assert type(Limits().of(kind).max_error) is float
        assert Limits(max_error=0.02).of(kind).max_error == 0.02
        assert Limits(max_error=None).of(kind).max_error is None
        assert Limits(max_metric_drop=0.01).of(kind).max_error is None
    assert Limits(exact=True).of("text").max_error is None
    for limits, kind in (({"max_kl": 0.05}, "text"), ({"max_spread": 0.05}, "training")):
        for more in ({}, {"max_metric_drop": 0.01}):
            assert Limits(**limits, **more).of(kind) == Limits(max_error=0.05, **more)
    assert options_of(Options(), {"max_metric_drop": 0.01}).limits.of("training").max_error is None
    assert options_of(None, {"max_spread": 2.0}).limits.of("training").max_error == 2


@pytest.mark.parametrize(
    ("limits", "kind", "words"),
    [
        (Limits(max_kl=0.1), "inference", "`max_kl` is for a fettle.GenerationWorkload"),
        (Limits(max_tpot_ms=9), "training", "`max_tpot_ms` is for a fettle.GenerationWorkload"),
        (Limits(exact=True), "inference", "`exact` is for a fettle.GenerationWorkload"),
        (Limits(max_spread=1), "text", "`max_spread` is for a training loop"),
        (Limits(min_agreement=0.9), "training", "`min_agreement` is for inference"),
        (Limits(max_error=0.1, max_kl=0.1), "text", "`max_error` and `max_kl` are the same limit here"),
    ],
)
def test_a_limit_that_says_nothing_of_a_workload_is_refused(limits, kind, words):
    with pytest.raises(UsageError, match=words):
        limits.of(kind)


def test_limits_that_could_not_be_held_are_refused_before_anything_runs():
    with pytest.raises(UsageError, match="max spread must be above 0"):
        check_options(Options(limits=Limits(max_spread=0)))
    with pytest.raises(UsageError, match="one of several ranks"):
        check_ranks(Options(device_memory_bytes=1 << 30), Target("loop.py:workload", "loop", mode="training"))


def test_comparisons_hold_what_tuning_holds(monkeypatch):
    asked, target = [], Target("work.py:workload", "work")
    monkeypatch.setattr(comparing, "_race", lambda workload, files, options, *more, **others: asked.append(options))
    fettle.bench(target, "baseline")
    fettle.bench(target, "baseline", limits=Limits(max_metric_drop=0.01))
    assert [options.limits.of("training").max_error for options in asked] == [1.0, None]
    for evidence in (
        {}, {"goal": "tpot", "limits": {"max_latency_ms": 9.0, "for people": "a word"}}, {"limits": {"max_error": 2.0}}
    ):  # fmt: skip
        fettle.check(target, RecipeFile(levels={}, evidence=evidence))
    assert [options.limits for options in asked[2:]] == [
        Limits(), Limits(max_error=None, max_latency_ms=9.0), Limits(max_error=2.0)
    ]  # fmt: skip
    slow = comparing._within(trial(), Limits(max_latency_ms=9), "throughput")
    assert (slow.status, slow.reason) == ("rejected", "10 ms is above 9 ms")
    assert comparing._within(trial(), Limits(max_latency_ms=10), "throughput").ok
