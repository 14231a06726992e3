"""What follows from the trials of a study for recipes that were not tried."""

from functools import partial

from fettle import Recipe
from fettle.measure import Accuracy, Interval, Slice, Trial
from fettle.result import Limits
from fettle.search import Space, holds
from fettle.tuning.model import Races
from fettle.tuning.standings import Standings

EXPORT = "RuntimeError: torch.export cannot take this model: UserError: it branches on data"


def standings(**failures):
    found = Standings("latency", Limits(), Races())
    for recipe, reason in failures.items():
        recipe = Recipe.parse(recipe.replace("_is_", "="))
        found.known[recipe] = Trial(recipe, "failed", reason)
    return found


def test_what_two_levels_failed_of_is_not_tried_with_a_third():
    once = standings(runtime_is_openvino=EXPORT)
    assert once.foreseen_failure(Recipe.parse("runtime=aoti")) == ""  # another level may export another graph
    twice = standings(runtime_is_openvino=EXPORT, runtime_is_aoti=EXPORT)
    for third in ("precision=bf16 runtime=openvino-int8", "runtime=onnxruntime"):
        assert twice.foreseen_failure(Recipe.parse(third)) == EXPORT
    for other in ("precision=bf16", "runtime[encoder]=aoti"):
        assert twice.foreseen_failure(Recipe.parse(other)) == ""


def test_failures_of_other_causes_say_nothing_of_others():
    found = standings(runtime_is_openvino="RuntimeError: out of memory", runtime_is_aoti=EXPORT)
    assert found.foreseen_failure(Recipe.parse("runtime=openvino-bf16")) == ""
    rule = "RuntimeError: No conversion rule for operation aten.x"
    found = standings(runtime_is_openvino=rule, **{"runtime_is_openvino-bf16": rule})
    for level in ("openvino-int8", "openvino-stateful"):
        assert found.foreseen_failure(Recipe.parse(f"runtime={level}")) == rule
    assert found.foreseen_failure(Recipe.parse("runtime=aoti")) == ""


def test_a_larger_batch_that_does_more_a_second_answers_later():
    """Speed-ups are per row: a batch of eight that takes four times as long is twice as fast, and the latency is four
    times as great."""
    given = Trial(Recipe(), "measured", speedup=Interval(1.0, 1.0, 1.0), accuracy=Accuracy(finite=True))
    eight = Trial(Recipe({"batch": "x8"}), "measured", speedup=Interval(2.0, 1.9, 2.1))
    for goal, best in (("throughput", eight), ("latency", given)):
        found = Standings(goal, Limits(max_error=None), Races(), known={one.recipe: one for one in (given, eight)})
        assert found.best() is best


def test_what_an_earlier_run_tried_and_this_one_may_not_does_not_win():
    space = Space(
        {"precision": ("fp32", "bf16"), "runtime": ("torch",)}, lambda recipe: "", required=Recipe({"mode": "eval"})
    )
    given, allowed, other, bare = (
        Trial(Recipe.parse(text), "measured", speedup=Interval(speed, speed, speed), accuracy=Accuracy(finite=True))
        for text, speed in (("baseline", 1.0), ("mode=eval precision=bf16", 2.0), ("mode=eval runtime=openvino", 4.0),
                            ("precision=bf16", 3.0))
    )  # fmt: skip
    space.choices["mode"] = ("as-given", "eval")
    known = {one.recipe: one for one in (given, allowed, other, bare)}
    found = Standings("throughput", Limits(max_error=None), Races(), known=known)
    assert found.best() is other
    found.allowed = partial(holds, space)
    assert found.best() is allowed
    assert found.finalists() == [allowed]
    del known[allowed.recipe]
    assert found.best() is given


def test_slow_recipes_are_ended_only_where_none_of_them_may_win():
    slices = [Slice("a", number, ms) for number, ms in enumerate((9.0, 11.0))]
    given = Trial(Recipe(), "measured", speedup=Interval(1.0, 1.0, 1.0), slices=slices, peak_bytes=9,
                  accuracy=Accuracy(finite=True))  # fmt: skip

    def longest_ms(goal="latency", memory=None, known=(given,)):
        limits = Limits(max_error=None, max_memory_bytes=memory)
        return Standings(goal, limits, Races(), known={one.recipe: one for one in known}).longest_ms

    assert longest_ms() == 55.0  # five times its slowest slice
    assert longest_ms("memory") is None
    assert longest_ms(memory=8) is None  # what keeps the limit may be slower
    assert longest_ms(known=()) is None
