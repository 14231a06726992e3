"""Which recipes a study may try, beyond what the catalogue's own rules say."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fettle.measure import WorkerError
from fettle.measure.messages import Peaks, Probe, Probed, Reference
from fettle.recipe import Recipe
from fettle.search import holds
from fettle.techniques import Facts, bundles, idle, machine_facts
from fettle.tuning._probe import Probed as Found
from fettle.tuning._probe import _recalled, plan_memory, probe
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


def test_the_number_of_threads_that_torch_chooses_by_itself_is_no_choice():
    """Nor may a trial that an earlier run made of it win, unless it is asked for."""
    recipe = Recipe({"threads": "2"})
    facts = replace(FACTS, threads=2, physical_cores=2)
    space, left_out = space_for(facts, {})
    assert space.choices["threads"] == ("as-given", "1")
    assert "it is what torch chooses here" in [one.why for one in left_out if one.technique == "threads"]
    assert not holds(space, recipe)
    asked, _ = space_for(facts, {"threads": ["2"]})
    assert holds(asked, recipe)


def test_no_bundle_has_an_idle_level():
    for facts in (FACTS, Facts(device="cuda", num_linear=12, packages={"torch_tensorrt": "1"})):
        assert not any(idle(bundle) for bundle in bundles(facts))


def test_what_only_saves_memory_is_tried_where_memory_counts_or_it_is_named():
    """Keys and values in 8 bits also save time, in OpenVINO."""
    facts, in_torch = Facts(new_tokens=8, prompt_tokens=600, keeps="static"), Recipe({"kv_cache": "int8"})
    in_openvino = in_torch.with_levels(runtime="openvino-stateful")
    space, left_out = space_for(facts, {})
    assert "int8" not in space.choices["kv_cache"]
    assert "static" in space.choices["kv_cache"]
    assert space.choices["prefill"] == ("whole",)
    told = {(item.technique, item.level): item.why for item in left_out}
    assert told["kv_cache", "int8"] == told["prefill", "256"]
    assert told["prefill", "256"] == "it only saves memory, which is neither the goal nor limited"
    able = replace(facts, packages={"openvino": "1", "nncf": "1"})
    space, _ = space_for(able, {})
    assert "kv_cache=int8 only saves memory" in space.conflict(in_torch)
    assert holds(space, in_openvino)
    assert not space.conflict(in_openvino)
    for asked in ({"memory_counts": True}, {"allowed": {"kv_cache": ["as-given", "int8"]}}):
        space, _ = space_for(able, **{"allowed": {}, **asked})
        assert holds(space, in_torch)
        assert not space.conflict(in_torch)
        assert not space.conflict(in_openvino)


@pytest.mark.parametrize(("flags", "tried"), [(("avx2",), False), (("avx2", "avx512f"), True), (("neon",), True)])
def test_bfloat16_is_no_bundle_beside_int8_where_it_takes_twenty_times_as_long(flags, tried):
    facts = Facts(num_linear=12, cpu_flags=flags, packages={"torchao": "0.18.0"})
    found = [one for one in bundles(facts) if one.levels.get("quantize") == "int8-dynamic"]
    assert found
    assert any("precision" in one.levels for one in found) == tried


def test_a_study_that_goes_on_knows_what_was_installed_meanwhile():
    """A level that was left out for a missing package is offered once it is there."""
    part = Facts(part="unet", packages={"openvino": "2025.1"})
    kept = Found(Facts(num_linear=3, parts={"unet": part}), False, {}, (), Reference(dtype="float64", seconds=1.0))
    study: Any = SimpleNamespace(note=lambda key: msgspec.to_builtins(kept))
    facts, here = _recalled(study).facts, machine_facts()
    assert facts.num_linear == 3
    assert facts.packages == facts.parts["unet"].packages == here.packages
    assert facts.libraries == here.libraries


def test_a_training_study_that_goes_on_with_larger_batches_asks_how_large_they_may_be(tmp_path):
    asked = []

    def ask(request, answer, timeout_s):
        asked.append(type(request))
        if isinstance(request, Probe):
            facts = Facts(mode="training", largest_batch=6 if request.allow_batch else 0)
            return Probed(facts=facts, has_metric=False)
        return Peaks(peaks={}) if answer is Peaks else Reference(dtype="float32", seconds=1.0)

    notes: dict[str, Any] = {}
    study: Any = SimpleNamespace(note=notes.get, set_note=notes.__setitem__)
    worker: Any = SimpleNamespace(ask=ask)
    path = tmp_path / "reference.pt"
    path.touch()
    for allowed, most, questions in ((False, 0, 3), (False, 0, 0), (True, 6, 3), (True, 6, 0)):
        asked.clear()
        found = probe(worker, study, path, "made up", allowed, 60.0, -1.0)
        assert (found.facts.largest_batch, len(asked)) == (most, questions)


def test_a_first_look_that_was_too_long_for_one_budget_is_made_under_a_longer_one(tmp_path, monkeypatch):
    asked, notes, path = [], {}, tmp_path / "reference.pt"
    facts = {"facts": Facts(), "has_metric": False}
    given = {Probed: facts, Peaks: {"peaks": {}}, Reference: {"dtype": "float32", "seconds": 1.0}}

    def ask(request, answer, timeout_s):
        asked.append(type(request).__name__)
        path.touch()
        return answer(**given[answer])

    def look(worker):
        asked.append("look")
        return [], {"flops": 1.0}

    monkeypatch.setattr("fettle.tuning._probe._first_look", look)
    study: Any = SimpleNamespace(note=notes.get, set_note=notes.__setitem__)
    worker: Any = SimpleNamespace(ask=ask)
    seen = ["MeasurePeaks", "look"]
    for look_s, questions in ((1e-9, ["Probe", "MeasurePeaks", "WriteReference"]), (0.0, []), (9e9, seen), (9e9, [])):
        asked.clear()
        found = probe(worker, study, path, "made up", False, 60.0, look_s)
        assert asked == questions
        assert bool(found.features) == (look_s > 1)


@pytest.mark.parametrize(("kind", "is_kept"), [("timeout", False), ("error", True)])
def test_a_memory_plan_that_failed_in_passing_is_made_again(kind, is_kept):
    asked, notes, facts = [], {}, Facts(mode="training")

    def ask(request, *_):
        asked.append(request)
        raise WorkerError("out of order", kind)

    study: Any = SimpleNamespace(note=notes.get, set_note=notes.__setitem__)
    worker: Any = SimpleNamespace(ask=ask)
    for _ in range(2):
        plan = plan_memory(worker, study, 2, 1, facts, 1 << 30, lambda text: None)
        assert plan.note == "the memory could not be planned: out of order"
    assert len(asked) == (1 if is_kept else 2)


def test_a_memory_plan_that_failed_under_an_earlier_version_is_made_again():
    asked, facts = [], Facts(mode="training")
    notes = {"ranks": 2, "plan 2 1073741824": {"plan": None, "note": "the memory could not be planned: no answer"}}

    def ask(request, *_):
        asked.append(request)
        raise WorkerError("out of order", "error")

    study: Any = SimpleNamespace(note=notes.get, set_note=notes.__setitem__)
    worker: Any = SimpleNamespace(ask=ask)
    plan_memory(worker, study, 2, 1, facts, 1 << 30, lambda text: None)
    assert asked
