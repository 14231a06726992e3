"""The planted programs and their mended twins run, and give the same answers where mending must not change them."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fettle.workload import workload_from

FOLDER = Path(__file__).parents[2] / "bench" / "diagnosis_cases"
# Random weights drawn in the call, dropout, other precision, other batches: not the same answers, or none.
DIFFERENT = {
    "train_mode_in_inference",
    "recompile_counter",
    "graph_break_item",
    "graph_break_branch",
    "recompile_shapes",
    "recompile_limit",
    "recompile_type",
    "padding",
    "double_weights",
}


def module(kind: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"cases_{kind}", FOLDER / f"{kind}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


CASES = [(path.stem, name) for path in sorted(FOLDER.glob("*.py")) for name in module(path.stem).CASES]


@pytest.fixture(autouse=True)
def settings_put_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.autograd.set_detect_anomaly(False)
    torch._dynamo.reset()


def test_there_are_enough() -> None:
    assert sum(kind != "healthy" for kind, _ in CASES) >= 40
    assert sum(kind == "healthy" for kind, _ in CASES) == 10


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_case_runs_and_its_twin_agrees(kind: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = module(kind)
    answers = []
    for factory in [getattr(file, name)] + ([getattr(file, f"{name}_fixed")] if kind != "healthy" else []):
        torch.manual_seed(0)
        work = workload_from(factory(), name)
        answers.append(work.run(work.model, work.inputs[0]))
    if len(answers) == 2 and isinstance(answers[0], torch.Tensor) and name not in DIFFERENT:
        # a cast through half, and sums in another order, are allowed their rounding
        torch.testing.assert_close(answers[0], answers[1], rtol=1e-2, atol=1e-2, check_dtype=False)
