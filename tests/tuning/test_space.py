"""Which recipes a study may try, beyond what the catalogue's own rules say."""

import pytest

from fettle.recipe import Recipe
from fettle.techniques import Facts, bundles, idle
from fettle.tuning.space import space_for

FACTS = Facts(num_linear=12, packages={"openvino": "1", "nncf": "1"}, calibration_batches=2, cpu_flags=("avx512_bf16",))


@pytest.mark.parametrize("runtime", ["openvino", "openvino-bf16", "onnxruntime"])
def test_a_level_that_changes_nothing_is_not_tried_beside_what_makes_it_idle(runtime):
    assert idle(Recipe({"grad": "no_grad", "runtime": runtime})) == ["grad"]
    assert not idle(Recipe({"runtime": runtime}))


def test_autograd_matters_to_what_torch_runs():
    for levels in ({}, {"runtime": "aoti"}, {"runtime": "tensorrt"}, {"compile": "default"}):
        assert not idle(Recipe({"grad": "no_grad", **levels}))


def test_a_space_has_no_idle_levels_but_those_that_were_asked_for():
    recipe = Recipe({"grad": "no_grad", "runtime": "openvino-bf16"})
    free, _ = space_for(FACTS, {})
    assert free.conflict(recipe) == "grad=no_grad changes nothing beside the rest"
    assert not free.conflict(recipe.without("grad"))
    assert Recipe({"runtime": "openvino-bf16"}) in free.bundles
    pinned, _ = space_for(FACTS, {"grad": ["no_grad"]})
    assert not pinned.conflict(recipe)
    assert any(bundle == recipe for bundle in pinned.bundles)


def test_no_bundle_has_an_idle_level():
    for facts in (FACTS, Facts(device="cuda", num_linear=12, packages={"torch_tensorrt": "1"})):
        assert not any(idle(bundle) for bundle in bundles(facts))
