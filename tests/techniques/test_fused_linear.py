"""Linear layers that are given the same tensor become one product."""

import copy
import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fettle.recipe import Recipe
from fettle.techniques import Facts, conflict, load, probe_facts, source
from fettle.techniques.fused_linear import FusedSibling
from fettle.workload import Workload


class Mix(nn.Module):
    """Attention with fewer heads of keys and values than of queries, and a bias on some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 8, bias=False), nn.Linear(16, 8)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.a, self.b, self.c))
        k, v = (one.repeat_interleave(2, 1) for one in (k, v))
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(found.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.gate, self.up, self.down = Mix(), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x)
        return x + self.down(self.gate(x).sigmoid() * self.up(x))  # type: ignore[no-any-return]


class Across(nn.Module):
    """Keys and values of another tensor than the queries', at times of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor, apart: bool = False) -> torch.Tensor:
        keys = self.k(y)
        return nn.functional.scaled_dot_product_attention(self.q(x), keys, self.v(y + 1 if apart else y))


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        first = self.a(x)
        return first + self.b(x.add_(1))  # type: ignore[no-any-return]


class Adapted(nn.Linear):
    """It computes more than its weight."""


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3))).eval()


X = torch.randn(2, 5, 16)
ALIKE = (("*.mix", "a", "b", "c"), ("*", "gate", "up"))


def alike(model: nn.Module, *batch: Any) -> tuple[tuple[str, ...], ...]:
    return probe_facts(Workload(model, [batch])).fed_alike


def fused(model: nn.Module, *batch: Any, more: str = "") -> Any:
    """The model with the lines for a GPU, which a CPU runs as well."""
    recipe = Recipe.parse(f"fused_linear=on {more}")
    facts = replace(probe_facts(Workload(model, [batch])), device="cuda")
    assert not conflict(recipe, facts)
    return load(source(recipe, facts), str(recipe))(model, [batch])


def test_it_is_found_by_what_they_are_given() -> None:
    assert alike(blocks(), X) == ALIKE
    assert alike(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), X) == ()
    assert alike(Written(), torch.randn(3, 8)) == ()
    assert alike(Across(), torch.randn(1, 3, 8), torch.randn(1, 4, 8)) == ()  # the queries' layer is called in between
    assert "no linear layers were found" in conflict(Recipe({"fused_linear": "on"}), Facts())


def hooked(model: Any) -> None:
    model[1].mix.b.register_forward_hook(lambda *_: None)


def normalised(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model[1].mix.b)


def tied(model: Any) -> None:
    model[1].mix.b.weight = model[0].mix.c.weight


def adapted(model: Any) -> None:
    model[1].mix.b = Adapted(16, 8)


def replaced(model: Any) -> None:
    model[1].mix.b.forward = functools.partial(nn.Linear.forward, model[1].mix.b)


@pytest.mark.parametrize("change", [hooked, normalised, tied, adapted, replaced])
def test_a_layer_that_is_more_than_its_weight_stays_as_it_is(change: Any) -> None:
    model = blocks()
    change(model)
    layer, wanted = model[1].mix.b, model(X)
    names = {name: set(others) for name, *others in alike(model, X)}
    assert names["1.mix"] == {"a", "c"}
    torch.testing.assert_close(fused(model, X)(X), wanted)
    assert model[1].mix.b is layer


@pytest.mark.parametrize("more", ["", "grad=inference_mode", "precision=bf16"])
def test_the_answers_are_the_same(more: str) -> None:
    model = blocks()
    wanted, linear = model(X), []
    run = fused(model, X, more=more)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda *_: linear.append(1))
    close = {"atol": 0.05, "rtol": 0.05} if "bf16" in more else {}
    torch.testing.assert_close(run(X), wanted, **close)
    assert len(linear) == 3 * 4
    again = copy.deepcopy(model)
    assert again[0].mix.b.first is again[0].mix.a
    assert [name for name in model.state_dict() if name.startswith("0.mix")] == [
        "0.mix.a.fused.weight", "0.mix.a.fused.bias", "0.mix.out.weight", "0.mix.out.bias",
    ]  # fmt: skip
    given = blocks()[0].mix
    assert model[0].mix.b.bias is None
    for one, other in ((model[0].mix.b.weight, given.b.weight), (model[0].mix.c.bias, given.c.bias)):
        torch.testing.assert_close(one, other.to(one.dtype))
    assert all(layer.first.kept is None for layer in model.modules() if isinstance(layer, FusedSibling))


def test_another_tensor_than_in_the_sample_is_another_product() -> None:
    class Turns(Across):
        def forward(self, x: torch.Tensor, y: torch.Tensor, apart: bool = False) -> torch.Tensor:
            q, k = self.q(x), self.k(y)
            return nn.functional.scaled_dot_product_attention(q, k, self.v(y + 1 if apart else y))

    model, x, y = Turns(), torch.randn(1, 3, 8), torch.randn(1, 4, 8)
    assert alike(model, x, y) == (("", "k", "v"),)
    wanted = [model(x, y, apart) for apart in (False, True, False)]
    run = fused(model, x, y)
    for apart, answer in zip((False, True, False), wanted, strict=True):
        torch.testing.assert_close(run(x, y, apart), answer)


def test_it_is_one_graph() -> None:
    model, graphs = blocks()[:1], []
    wanted = model(X)
    fused(model, X)

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(sum(node.target is torch._C._nn.linear for node in graph.graph.nodes))
        return graph

    run = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(run(X), wanted)
    assert graphs == [4]


def test_what_it_can_stand_beside() -> None:
    facts = Facts(device="cuda", cuda_capability=(9, 0), fed_alike=ALIKE, packages={"torch_tensorrt": "2.9"})
    assert "its own products" in conflict(Recipe.parse("fused_linear=on runtime=tensorrt"), facts)
    assert not conflict(Recipe.parse("fused_linear=on runtime=exported grad=inference_mode"), facts)
    assert "it is for GPUs" in conflict(Recipe({"fused_linear": "on"}), replace(facts, device="cpu"))
    with pytest.raises(RuntimeError, match="found none of those that were given the same tensor"):
        load(source(Recipe({"fused_linear": "on"}), facts), "fused")(nn.Linear(2, 2), [])
