"""What the watch on operators sees of small programs: growth, batches, repeated work, and pauses."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from fettle.diagnose import RULES, Evidence
from fettle.diagnose.collect import collect
from fettle.diagnose.collectors import recording
from fettle.diagnose.collectors.operators import operations, repeated_share, watched
from fettle.diagnose.diagnosis import _budget
from fettle.diagnose.evidence import Batches
from fettle.techniques import Facts
from fettle.workload import Workload


def grown(model: Callable[..., Any], *batch: torch.Tensor) -> float:
    return max(op.growth for op in operations(Workload(model, [batch]), "cpu", calls=1))


def test_only_broadcasting_counts_as_growth() -> None:
    x = torch.ones(512, 4)
    assert grown(lambda x: x[:, None] - x[None], x) == 512
    picture = torch.ones(1, 16, 64, 64)
    assert grown(lambda x: F.interpolate(x, scale_factor=4.0, mode="bilinear"), picture) == 0
    assert grown(lambda x: F.grid_sample(x, torch.zeros(1, 256, 256, 2), align_corners=False), picture) == 0
    assert grown(lambda x: F.unfold(x, 9), torch.ones(1, 4, 64, 64)) == 0


def batches(model: Any, *inputs: Any) -> Batches:
    """What the outermost modules, attributes of the model, were given in one call."""
    watch, _ = watched(Workload(model, [inputs]), "cpu", calls=1)
    return Batches(watch.batches_run, watch.batches_seen_before)


class Calls:
    """A program that is no module, and calls its modules."""

    def __init__(self, how: Callable[..., Any], *modules: nn.Module) -> None:
        self.held, self.how = nn.ModuleList(modules), how

    def __call__(self, x: torch.Tensor) -> Any:
        return self.how(self.held, x)


class Prompted(nn.Module):
    def forward(self, x: torch.Tensor, prompt: torch.Tensor, number: int = 0) -> torch.Tensor:
        return x + prompt + number


def test_a_batch_is_known_by_its_module_and_by_all_that_this_is_given() -> None:
    x, prompt = torch.ones(2, 4), torch.ones(4)
    ensemble = Calls(lambda parts, x: [part(x) for part in parts], *(nn.Linear(4, 4) for _ in range(4)))
    assert batches(ensemble, x) == Batches(4, 0)
    by_keyword = Calls(lambda parts, x: [parts[0](x, prompt=i * prompt) for i in range(4)], Prompted())
    assert batches(by_keyword, x) == Batches(4, 0)
    by_number = Calls(lambda parts, x: [parts[0](x, prompt, i) for i in range(4)], Prompted())
    assert batches(by_number, x) == Batches(4, 0)
    again = Calls(lambda parts, x: [parts[0](x, prompt=prompt) for _ in range(4)], Prompted())
    assert batches(again, x) == Batches(4, 3)


def test_batches_sorted_by_length_repeat_nothing() -> None:
    layer = nn.Linear(4, 4)
    lengths = [1, 2, 4, 5, 7, 8, 9, 12]
    rows = operations(Workload(lambda x: [layer(x[:n]) for n in lengths], [torch.ones(12, 4)]), "cpu", calls=1)
    assert max(row.repeated for row in rows) == 0
    rows = operations(Workload(lambda x: [layer(x[:n]) for n in range(3, 13)], [torch.ones(12, 4)]), "cpu", calls=1)
    assert max(row.repeated for row in rows) == pytest.approx(1 - 12 / sum(range(3, 13)))
    assert repeated_share([10, 10, 20, 20, 30, 40, 50, 60, 70, 80, 80]) == pytest.approx(1 - 160 / 470)


def test_work_between_operators_is_told_by_the_line_after_it() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        time.sleep(0.02)
        z = y * 2
        time.sleep(0.01)
        return z

    watch, _ = watched(Workload(model, [torch.ones(4)]), "cpu", calls=3)
    line = f"test_operators.py:{model.__code__.co_firstlineno + 3}"
    seen = watch.pauses()
    assert seen[line] >= 0.02
    assert seen["the end of the call"] >= 0.01


def test_python_between_operators_is_not_their_host_work() -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(24))).eval()

    def model(x: torch.Tensor) -> torch.Tensor:
        words = [sum(ord(letter) for letter in str(i * 7919)) for i in range(10_000)]
        return layers(x + len(words))

    seen = collect(Workload(model, [torch.ones(4, 8)]), 0.0)
    line = f"test_operators.py:{model.__code__.co_firstlineno + 2}"
    assert max(seen.pauses, key=lambda end: seen.pauses[end]) == line
    # How long it takes is another thing on each machine, so it is set here.
    steady = [replace(op, seconds=1e-6 * op.calls) for op in seen.operations]
    pinned = Evidence(seen.facts, wall_s=0.01, operations=steady, pauses={line: 0.008})
    assert pinned.other_work_s == pytest.approx(0.008)
    assert pinned.unexplained_s == pytest.approx(pinned.outside_s - 0.008 - 10e-6 * sum(op.calls for op in steady))
    found = RULES["other-work"](pinned)
    assert found is not None
    assert found.where == (f"before {line}",)
    assert RULES["host-bound"](pinned) is None
    assert RULES["host-bound"](replace(pinned, pauses={})) is not None
    assert replace(pinned, slept_s=0.008).other_work_s == 0


def branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x + 1, (x,))


@pytest.mark.filterwarnings("ignore:flex_attention called")
def test_an_operator_that_runs_others_is_one_row_that_takes_their_time() -> None:
    (row,) = [row for row in operations(Workload(branches, [torch.ones(4, 4)]), "cpu", calls=1) if "cond" in row.name]
    assert (row.name, row.group, row.calls) == ("aten.cond", "other", 1)
    q = torch.randn(1, 2, 128, 16)
    rows = operations(Workload(lambda q: flex_attention(q, q, q), [q]), "cpu", calls=1)
    (row,) = [row for row in rows if "flex_attention" in row.name]
    assert row.group == "matrix"
    assert row.flops == 2 * 2 * 2 * 128 * 128 * 16  # two products for each of two heads


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize("look", ["operators", "recording"])
def test_what_is_compiled_runs_compiled_while_it_is_watched_and_afterwards(look: str) -> None:
    torch._dynamo.reset()
    ran = []

    def backend(graph: Any, examples: Any) -> Any:
        return lambda *inputs: (ran.append(graph), graph(*inputs))[1]

    model, x = torch.compile(Doubled(), backend=backend), torch.ones(4)
    model(x)
    if look == "operators":
        assert [row.name for row in operations(Workload(model, [x]), "cpu", calls=1)] == ["aten.mul"]
    else:
        assert recording._operators(lambda: model(x)) == 1
    model(x)
    assert len(ran) == 3


def test_time_that_may_be_of_compiled_code_is_not_the_hosts() -> None:
    compiled = Evidence(Facts(), wall_s=0.01, compiled=True)
    assert (compiled.outside_s, compiled.host_s, compiled.other_work_s) == (0.01, 0.0, 0.0)
    assert list(_budget(compiled)) == ["compiled code, and outside operators: Python, autograd, dispatch, waiting"]
    assert replace(compiled, compiled=False).host_s == 0.01


def test_a_module_that_torch_has_written_is_nobodys_line() -> None:
    code = compile("def call(x): return x + 1", "/tmp/torchinductor_me/ab/cabc.py", "exec")
    written: dict[str, Any] = {"__name__": "torch._inductor.codecache.cabc"}
    exec(code, written)  # as torch does it
    (row,) = operations(Workload(lambda x: written["call"](x), [torch.ones(4)]), "cpu", calls=1)
    assert row.line.startswith("test_operators.py:")


def test_batches_that_are_nested_are_looked_at() -> None:
    rows = torch.nested.nested_tensor([torch.ones(3, 8), torch.ones(5, 8)], layout=torch.jagged)
    groups = {row.name: row.group for row in operations(Workload(nn.Linear(8, 8), [rows]), "cpu", calls=1)}
    assert groups["aten.linear"] == "matrix"


def test_products_of_integers_are_products() -> None:
    x = torch.ones(32, 32, dtype=torch.int8)
    (row,) = operations(Workload(torch._int_mm, [(x, x)]), "cpu", calls=1)
    assert row.group == "matrix"


def test_what_one_call_in_three_runs_is_no_part_of_a_call() -> None:
    calls = []

    def model(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x.exp() if len(calls) == 1 else x + 1 if len(calls) == 2 else x

    assert operations(Workload(model, [torch.ones(4)]), "cpu", calls=3) == []


def test_a_call_that_fails_leaves_no_hook_behind() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    net = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no"):
        watched(Workload(net, [torch.ones(4)], call=lambda net, x: model(net(x))), "cpu")
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


def test_the_older_weight_norm_is_removed_in_its_own_way() -> None:
    def found(norm: Callable[[nn.Module], nn.Module]) -> str:
        net = nn.Sequential(*(norm(nn.Linear(8, 8)) for _ in range(4))).eval()
        steady = [replace(op, seconds=1e-6 * op.calls) for op in operations(Workload(net, [torch.ones(1, 8)]), "cpu")]
        finding = RULES["parametrised"](Evidence(Facts(), 1e-6 * sum(op.calls for op in steady), steady))
        assert finding is not None
        return finding.advice

    assert "remove_parametrizations" in found(nn.utils.parametrizations.weight_norm)
    with pytest.warns(FutureWarning, match="weight_norm"):
        assert "remove_weight_norm" in found(nn.utils.weight_norm)
