"""Fewer products for the same answers: rows computed once, projections folded into the side with fewer tokens."""

import pytest
import torch

from fettle.recipe import Recipe
from fettle.techniques import conflict, load, probe_facts, source
from fettle.techniques._algebra import (
    equal_after_reshape,
    fewer_products,
    fold_attention,
    patches_by_products,
    rows_once,
    with_shapes,
)
from fettle.workload import Workload


class Cross(torch.nn.Module):
    """Two tokens of each prompt and 128 of one image look at each other."""

    def __init__(self, repeats: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.repeats = repeats
        self.there = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.back = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.norm = torch.nn.LayerNorm(64)

    def attend(self, layers: torch.nn.ModuleList, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(side).reshape(len(side), -1, 4, 16).transpose(1, 2)
            for layer, side in zip(layers, (one, other, other), strict=False)
        )
        found = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return layers[3](found.transpose(1, 2).reshape(len(found), -1, 64))

    def forward(self, image: torch.Tensor, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        image = image.repeat_interleave(len(prompts), 0) if self.repeats else image
        image = self.norm(image.flatten(2).transpose(1, 2))
        prompts = prompts + self.attend(self.there, prompts, image)
        return prompts, image + self.attend(self.back, image, prompts)


def inputs(images: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(images, 64, 8, 16, generator=made), torch.randn(6, 2, 64, generator=made)


@pytest.mark.parametrize(
    ("before", "after", "equal", "found"),
    [
        ((6, 1, 128, 64), (6, 128, 4, 16), {0}, {0}),
        ((6, 64, 8, 16), (6, 64, 128), {0}, {0}),
        ((1, 6, 4), (6, 1, 4), {1}, {0}),
        ((6, 4), (24,), {0}, None),
        ((6, 4), (2, 3, 4), {0}, None),
        ((2, 3, 1), (2, 3), {1}, {1}),
    ],
)
def test_which_dimensions_are_equal_after_a_reshape(before, after, equal, found):
    assert equal_after_reshape(before, after, equal) == found


def test_repeated_rows_are_computed_once():
    tensors, model = inputs(), Cross()
    traced = with_shapes(torch.export.export(model, tensors).module(check_guards=False), tensors)
    once, smaller = rows_once(traced)
    once = with_shapes(once, tensors)
    rows = {node.meta["val"].shape[0] for node in once.graph.nodes if node.target is torch.ops.aten.layer_norm.default}
    assert smaller >= 6
    assert rows == {1}
    attention = torch.ops.aten.scaled_dot_product_attention.default
    first = next(node for node in once.graph.nodes if node.target is attention)
    assert first.args[0].meta["val"].shape == (1, 4, 12, 16)  # two queries of each of six prompts, of one image
    assert first.args[1].meta["val"].shape == (1, 4, 128, 16)
    for wanted, found in zip(model(*tensors), once(*tensors), strict=True):
        torch.testing.assert_close(found, wanted)


def test_projections_are_applied_to_the_side_with_fewer_tokens():
    tensors, model = inputs(6), Cross(repeats=False)
    traced = with_shapes(torch.export.export(model, tensors).module(check_guards=False), tensors)
    done, left = fold_attention(traced)
    traced = with_shapes(traced, tensors)
    assert done == 2
    assert left < 0.5
    linears = [node for node in traced.graph.nodes if node.target is torch.ops.aten.linear.default]
    assert {node.meta["val"].shape[1] for node in linears} == {2}  # nothing projects the 128 tokens any more
    for wanted, found in zip(model(*tensors), traced(*tensors), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_transposed_convolutions_without_overlap_are_products(bias):
    torch.manual_seed(0)
    apart = torch.nn.ConvTranspose2d(6, 4, (2, 3), stride=(2, 3), bias=bias)
    model = torch.nn.Sequential(apart, torch.nn.GELU(), torch.nn.ConvTranspose2d(4, 3, 3, stride=2))
    tensors = [torch.randn(2, 6, 5, 7)]
    traced = with_shapes(torch.export.export(model, tuple(tensors)).module(check_guards=False), tensors)
    traced = with_shapes(patches_by_products(traced), tensors)
    left = [node for node in traced.graph.nodes if node.target is torch.ops.aten.conv_transpose2d.input]
    assert len(left) == 1  # whose patches overlap
    torch.testing.assert_close(traced(*tensors), model(*tensors), rtol=1e-4, atol=1e-5)


def test_a_model_without_either_is_refused():
    with pytest.raises(RuntimeError, match="0 operators are equal along a batch, 0 projections"):
        fewer_products(torch.nn.Linear(8, 8), [torch.randn(2, 8)])


def test_as_a_recipe():
    model, batch = Cross().eval(), inputs()
    facts = probe_facts(Workload(model, [batch]))
    assert facts.uneven_sdpa == 2
    assert "exported" in conflict(Recipe.parse("algebra=fewer-products"), facts)
    if "openvino" not in facts.packages:
        pytest.skip("OpenVINO is not installed")
    recipe = Recipe.parse("grad=inference_mode runtime=openvino algebra=fewer-products")
    assert not conflict(recipe, facts)
    with torch.no_grad():
        wanted = model(*batch)
    fast = load(source(recipe, facts), "optimized")(model, [batch])
    for one, other in zip(wanted, fast(*batch), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4)
