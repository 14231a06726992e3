"""A recipe that was measured elsewhere is put to use with a warning."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fettle
from fettle import applying
from fettle.machine import this_machine
from fettle.recipe_file import RecipeFile


def test_another_version_of_the_runtime_of_a_recipe_is_said(monkeypatch):
    here = replace(this_machine(), versions={"torch": "2.13", "openvino": "2026.4"})
    monkeypatch.setattr(applying, "this_machine", lambda: here)
    file = RecipeFile(
        levels={"runtime": "openvino"}, machine={"id": here.id, "versions": {"torch": "2.13", "openvino": "2025.1"}}
    )
    assert applying.foreign(file) == "this recipe was measured with openvino 2025.1 (here 2026.4)"
    file.levels = {"precision": "bf16"}  # which runs by torch
    assert applying.foreign(file) == ""
    file.levels, file.machine = {"runtime": "openvino"}, {"id": here.id}  # of an earlier version
    assert applying.foreign(file) == ""


def test_a_target_is_applied_by_its_name(tmp_path):
    work = tmp_path / "work.py"
    work.write_text("import torch\ndef workload():\n    return torch.nn.Linear(4, 2).eval(), [torch.ones(3, 4)]\n")
    assert fettle.apply(str(work), "grad=inference_mode")(torch.ones(3, 4)).is_inference()
    with pytest.raises(fettle.UsageError, match="brings its own"):
        fettle.apply(work, "grad=inference_mode", [torch.ones(3, 4)])
    loop = Path(__file__).parent / "train" / "tiny_loop.py"
    assert float(next(fettle.apply(f"{loop}:workload", "zero_grad=zeros"))) > 0


def test_inputs_in_the_place_of_a_recipe_are_one_line():
    model, x = torch.nn.Linear(4, 2).eval(), torch.ones(3, 4)
    for function in (fettle.apply, fettle.bench, fettle.check):
        for inputs in ([x], {"input": x}):
            with pytest.raises(fettle.UsageError, match=r"is not a recipe: .* and the inputs after it"):
                function(model, inputs, "grad=inference_mode")


def test_what_a_model_does_not_take_is_one_line(monkeypatch):
    def optimize(model, batches):
        raise RuntimeError("No conversion rule\nfor aten::qr")

    monkeypatch.setattr(applying, "_compiled", lambda *_: optimize)
    with pytest.raises(fettle.UsageError, match=r"bf16 cannot be applied .*: No conversion rule$"):
        fettle.apply(torch.nn.Linear(4, 4), "precision=bf16", [torch.ones(3, 4)])


def test_every_name_is_completed_before_it_was_used():
    assert {*fettle.__all__, "diagnose"} <= {*dir(fettle)}


def test_threads_of_the_process_make_no_machine_another(monkeypatch):
    """A recipe's threads are set before the program starts, as its warning says: then the id is another."""
    here = this_machine()
    monkeypatch.setattr(applying, "this_machine", lambda: replace(here, id="with OMP_NUM_THREADS"))
    then = {
        "id": "without",
        "cpu": here.cpu,
        "cores": here.cores,
        "gpus": [*here.gpus],
        "versions": dict(here.versions),
    }
    file = RecipeFile(levels={"threads": "2"}, machine=then)
    assert applying.foreign(file) == ""
    then["cores"] = here.cores + 1
    file.levels = {"grad": "inference_mode"}
    with pytest.warns(UserWarning, match=r"was measured on .*: measure it again with `fettle check"):
        fettle.apply(torch.nn.Linear(4, 2).eval(), file, [torch.ones(3, 4)])
