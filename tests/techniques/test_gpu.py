"""The levels that need a CUDA device, each against the model as given. Not run where there is none."""

import copy
import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fettle.recipe import Recipe
from fettle.techniques import CATALOGUE, bundles, canonical, conflict, load, probe_facts, source
from fettle.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def lost_with_its_process() -> Iterator[None]:
    """A device that a level has run into an error is lost to its process: another one makes the other tests."""
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        raise


class Net(nn.Module):
    """A convolution, layers wide enough for 2:4 sparsity and float8, attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(8, 128, 4, stride=4)
        self.qkv, self.out, self.head = nn.Linear(128, 384), nn.Linear(128, 128), nn.Linear(128, 64)
        self.up, self.down = nn.Linear(128, 256), nn.Linear(256, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return self.head(x.mean(1))


def workload() -> Workload:
    torch.manual_seed(0)
    model = Net().cuda().eval()
    return Workload(model, [torch.randn(16, 8, 64, 64, device="cuda") for _ in range(4)])


def recipes() -> list[Recipe]:
    if not torch.cuda.is_available():
        return []
    facts = probe_facts(workload())
    found = [Recipe({"grad": "inference_mode", **bundle.levels}) for bundle in bundles(facts)]
    for technique in CATALOGUE:
        for level in technique.levels(facts):
            levels = {"grad": "inference_mode", **technique.needs, technique.name: level.name}
            if not level.why_not:
                found.append(Recipe(levels))
    return [r for r in dict.fromkeys(canonical(r) for r in found) if not conflict(r, facts)]


@pytest.mark.parametrize("recipe", recipes(), ids=str)
def test_a_level_keeps_the_answers_on_every_batch(recipe: Recipe) -> None:
    work = workload()
    reference = copy.deepcopy(work.model).double()
    run = load(source(recipe, probe_facts(work)), str(recipe))(work.model, work.inputs[:2])
    pruned = "sparsity" in recipe.levels  # half of the weights are gone: the answers may move, but not to nonsense
    for batch in [*work.inputs, work.inputs[0]]:
        with torch.no_grad():
            wanted = reference(batch.double())
        error = torch.linalg.norm(run(batch).double() - wanted) / torch.linalg.norm(wanted)
        assert torch.isfinite(error)
        assert error < (1.5 if pruned else 0.08)


def test_the_clock_waits_for_the_device() -> None:
    from fettle.measure._clock import Clock

    a = torch.randn(4096, 4096, device="cuda")
    clock = Clock("cuda")
    one = min(clock.time_ns(lambda: a @ a) for _ in range(5))
    ten = min(clock.time_ns(lambda: [a @ a for _ in range(10)]) for _ in range(5))
    assert ten > 4 * one


def test_answers_that_are_kept_stay_what_they_were() -> None:
    for text in ("cuda_graphs=on precision=autocast-bf16", "compile=reduce-overhead"):
        work = workload()
        reference = copy.deepcopy(work.model)
        lines = source(Recipe.parse(f"{text} grad=inference_mode"), probe_facts(work))
        run = load(lines, text)(work.model, work.inputs)
        kept = [run(batch) for batch in work.inputs for _ in range(3)]
        with torch.no_grad():
            wanted = [reference(batch) for batch in work.inputs for _ in range(3)]
        for found, right in zip(kept, wanted, strict=True):
            torch.testing.assert_close(found, right, rtol=0.05, atol=0.05)
