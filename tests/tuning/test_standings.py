"""What follows from the trials of a study for recipes that were not tried."""

from fettle import Recipe
from fettle.measure import Trial
from fettle.result import Limits
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
    assert twice.foreseen_failure(Recipe.parse("precision=bf16 runtime=openvino-int8")) == EXPORT
    for other in ("runtime=onnxruntime", "precision=bf16", "runtime[encoder]=aoti"):
        assert twice.foreseen_failure(Recipe.parse(other)) == ""


def test_failures_of_other_causes_say_nothing_of_others():
    found = standings(runtime_is_openvino="RuntimeError: out of memory", runtime_is_aoti=EXPORT)
    assert found.foreseen_failure(Recipe.parse("runtime=openvino-bf16")) == ""
    rule = "RuntimeError: No conversion rule for operation aten.x"
    found = standings(runtime_is_openvino=rule, **{"runtime_is_openvino-bf16": rule})
    assert found.foreseen_failure(Recipe.parse("runtime=openvino-int8")) == rule
    assert found.foreseen_failure(Recipe.parse("runtime=aoti")) == ""
