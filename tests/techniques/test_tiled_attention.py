"""Attention with a decomposed relative-position bias: in tiles it is what it was, in a fraction of the memory."""

import copy

import pytest
import torch
from torch import nn

import fettle
from fettle.kernels.decomposed_attention import attention_reference
from fettle.recipe import Recipe
from fettle.techniques import Facts, conflict, find, probe_facts
from fettle.techniques._tiled_attention import relative_positions, tiled_attention, with_decomposed_bias
from fettle.workload import Workload


class Published(nn.Module):
    """As in the code that was published with Segment Anything: a tensor in, a tensor out."""

    def __init__(self, size: int, channels: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (channels // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.rel_pos_h = nn.Parameter(torch.randn(2 * size - 1, channels // heads))
        self.rel_pos_w = nn.Parameter(torch.randn(2 * size - 1, channels // heads))

    def bias(self, query: torch.Tensor, height: int, width: int) -> torch.Tensor:
        square = query.reshape(len(query), height, width, -1)
        rows = torch.einsum("bhwc,hkc->bhwk", square, relative_positions(height, self.rel_pos_h))
        columns = torch.einsum("bhwc,wkc->bhwk", square, relative_positions(width, self.rel_pos_w))
        return (rows[..., None] + columns[..., None, :]).reshape(len(query), height * width, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, height, width, _ = x.shape
        mixed = self.qkv(x).reshape(batch, height * width, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = mixed.flatten(1, 2).unbind(0)
        weights = (query * self.scale) @ key.transpose(-2, -1) + self.bias(query, height, width)
        out = (weights.softmax(-1) @ value).view(batch, self.num_heads, height, width, -1)
        return self.proj(out.permute(0, 2, 3, 1, 4).reshape(batch, height, width, -1))


class Unlike(Published):
    """The same parts, and another sum."""

    def bias(self, query: torch.Tensor, height: int, width: int) -> torch.Tensor:
        return -super().bias(query, height, width)


@pytest.mark.parametrize("tile", [1, 40, 300, 1 << 20])
@pytest.mark.parametrize(("heads", "height", "width"), [(1, 1, 1), (3, 5, 7), (4, 6, 2), (2, 1, 9)])
def test_in_tiles_of_any_size(heads: int, height: int, width: int, tile: int) -> None:
    torch.manual_seed(0)
    tokens = height * width
    sizes = [8, 8, 8, height, width]
    given = [torch.randn(2, heads, tokens, size, requires_grad=True) for size in sizes]
    wanted = attention_reference(*given, 0.3)
    with torch.no_grad():
        torch.testing.assert_close(tiled_attention(*given, 0.3, tile), wanted)
    found = tiled_attention(*given, 0.3, tile)
    torch.testing.assert_close(found, wanted)
    pull = torch.randn_like(found)
    torch.testing.assert_close(torch.autograd.grad(found, given, pull), torch.autograd.grad(wanted, given, pull))


@pytest.mark.parametrize("size", [4, 6])  # 6: the table is for another size
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("bf16", 0.02), ("autocast-bf16", 0.02)])
def test_a_model_computes_what_it_did(size: int, precision: str, limit: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Published(4), nn.ReLU(), Published(4)).eval(), torch.randn(2, size, 4, 16)
    with torch.no_grad():
        wanted = model(x)
    fast = fettle.apply(model, f"attention=tiled precision={precision} grad=inference_mode", [x])
    assert (fast(x) - wanted).norm() < limit * wanted.norm()


@pytest.mark.slow  # a C++ compiler runs for each
@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("bf16", 0.02)])
def test_flex_attention(precision: str, limit: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Published(4, 64, 2), nn.ReLU(), Published(4, 64, 2)).eval(), torch.randn(2, 6, 5, 64)
    with torch.no_grad():
        wanted = model(x)
    fast = fettle.apply(model, f"attention=flex precision={precision} grad=inference_mode", [x])
    assert (fast(x) - wanted).norm() < limit * wanted.norm()


def test_where_flex_attention_is_offered() -> None:
    facts = probe_facts(Workload(Published(4).eval(), [torch.randn(2, 4, 4, 16)]))
    assert conflict(Recipe.parse("attention=flex grad=no_grad"), facts) == ""
    compiled = Recipe.parse("attention=flex grad=no_grad compile=default")
    assert "only alone" in conflict(compiled, facts)
    assert conflict(compiled, Facts(device="cuda", decomposed_bias=1)) == ""
    assert "without autograd" in conflict(Recipe.parse("attention=flex"), facts)
    assert "has its own attention" in conflict(Recipe.parse("attention=flex grad=no_grad runtime=openvino"), facts)
    assert "no attention with a decomposed" in conflict(Recipe.parse("attention=flex grad=no_grad"), Facts())


def test_only_what_computes_the_same_is_found() -> None:
    assert len(with_decomposed_bias(nn.ModuleList([Published(4), Unlike(4), nn.Linear(2, 2)]))) == 1
    facts = probe_facts(Workload(Published(4).eval(), [torch.randn(2, 4, 4, 16)]))
    assert facts.decomposed_bias == 1
    assert find("attention").usual(facts) == "tiled"
    assert "would write out a loop" in conflict(Recipe.parse("attention=tiled runtime=openvino"), facts)
    assert "no attention with a decomposed" in conflict(Recipe.parse("attention=tiled"), Facts())


def test_looking_for_it_leaves_each_part_in_its_mode() -> None:
    model = Published(4).train()
    model.proj.eval()
    assert len(with_decomposed_bias(model)) == 1
    assert model.training
    assert not model.proj.training


def test_transformers_sam() -> None:
    sam = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = sam.SamVisionModel(
        sam.SamVisionConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=96, mlp_dim=32, output_channels=8,
            global_attn_indexes=[1], window_size=4, initializer_range=0.1,
        )
    ).eval()  # fmt: skip
    for name, weight in model.named_parameters():
        if "rel_pos" in name:
            nn.init.normal_(weight)
    image = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        wanted = model(image).last_hidden_state
    fast = fettle.apply(model, "attention=tiled grad=inference_mode", [image])
    torch.testing.assert_close(fast(image).last_hidden_state, wanted, rtol=1e-3, atol=1e-4)


def test_the_scores_of_no_more_than_a_tile_are_held() -> None:
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max(largest, out.numel() if isinstance(out, torch.Tensor) else 0)
            return out

    query, bias = torch.randn(1, 2, 256, 4), torch.randn(1, 2, 256, 16)
    for keeps in (True, False):
        with Watch(), torch.set_grad_enabled(keeps):
            tiled_attention(query, query, query, bias, bias, 0.5, tile=4096)
    assert largest <= 2 * 256 * 16  # the bias by row; written out it is 2 x 256 x 256


def test_a_copy_has_weights_of_its_own_and_a_call_with_more_is_the_modules() -> None:
    class Masked(Published):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x) if mask is None else super().forward(x) * mask

    torch.manual_seed(0)
    model, x = nn.ModuleList([Masked(4)]).eval()[0], torch.randn(2, 4, 4, 16)
    fast = fettle.apply(model, "attention=tiled grad=no_grad", [x])
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        assert not copied(x).any()
    assert fast(x).any()
    assert not fast(x, mask=torch.zeros(1)).any()
