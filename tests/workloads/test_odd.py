"""Workloads of unusual form: they build, run, and show every leaf."""

from pathlib import Path

import pytest
import torch

from fettle.errors import UsageError
from fettle.workload import Workload, find_target, fingerprint, leaves

FOLDER = Path(__file__).resolve().parent / "odd"
INPUTS = {"dataclasses_io": [".left", ".right"]}
OUTPUTS = {
    "dataclasses_io": [".score", ".parts[0]", ".parts[1]"],
    "control_flow": ["output"],
    "tied_weights": ["output"],
    "changing_buffer": ["output"],
    "nondeterministic": ["output"],
    "nested_dicts": [
        ".heads.box[0]",
        ".heads.box[1]",
        ".heads.label.logits",
        ".levels[0]",
        ".levels[1].0",
        ".rows",
        ".note",
    ],
    "several_shapes": ["output"],
}


def build(name: str) -> Workload:
    return find_target(str(FOLDER / f"{name}.py")).load()


def test_every_file_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*OUTPUTS, "on_cuda"}


@pytest.mark.parametrize("name", OUTPUTS)
def test_runs_and_shows_its_leaves(name: str) -> None:
    made = build(name)
    for batch in [*made.inputs, *made.check_inputs]:
        assert [path for path, _ in leaves(batch)] == INPUTS.get(name, ["output"])
        found = list(leaves(made.run(made.model.eval(), batch)))
        assert [path for path, _ in found] == OUTPUTS[name]
        assert all(torch.isfinite(leaf).all() for _, leaf in found if isinstance(leaf, torch.Tensor))


@pytest.mark.parametrize("name", OUTPUTS)
def test_is_built_the_same_twice(name: str) -> None:
    assert fingerprint(build(name)) == fingerprint(build(name))


def test_control_flow_takes_another_number_of_steps_on_each_batch() -> None:
    made = build("control_flow")
    steps = []
    made.model.step.register_forward_hook(lambda *_: steps.append(1))
    counts = []
    for batch in made.inputs:
        steps.clear()
        made.run(made.model, batch)
        counts.append(len(steps))
    assert len(set(counts)) > 1


def test_the_oddities_are_real() -> None:
    tied = build("tied_weights").model
    assert tied.head.weight is tied.embed.weight
    for name in ("changing_buffer", "nondeterministic"):
        made = build(name)
        first, second = (made.run(made.model.eval(), made.inputs[0]) for _ in range(2))
        assert not torch.equal(first, second)
    assert len({batch.shape for batch in build("several_shapes").inputs}) > 1


def test_a_model_on_a_missing_gpu_is_one_line() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=r"^the factory .*on_cuda\.py:workload raised [^\n]*$"):
        build("on_cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_model_on_the_gpu_runs_there() -> None:
    made = build("on_cuda")
    assert all(leaf.is_cuda for _, leaf in leaves(made.run(made.model, made.inputs[0])))
    assert fingerprint(made) == fingerprint(build("on_cuda"))
