"""What is told of levels for GPUs before they are tried, and what their lines do that a CPU shows as well."""

import contextlib
import copy
import functools
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fettle.recipe import Recipe
from fettle.techniques import CATALOGUE, Facts, _host, _probe, bundles, conflict, find, load, source
from fettle.techniques.quantize import quantize_linear, rows_of_linear
from fettle.techniques.sparsity import sparsify
from fettle.workload import Workload
from tests.techniques.test_devices import on_gpu

GPU = Facts(device="cuda", cuda_capability=(9, 0), uses_sdpa=True, num_linear=3, packages={"torchao": "0.18.0"})


def test_attention_kernels_of_16_bit_numbers_are_not_offered_in_float32() -> None:
    for level in ("flash", "cudnn"):
        assert "16-bit" in conflict(Recipe.parse(f"sdpa_backend={level}"), GPU)
        assert conflict(Recipe.parse(f"sdpa_backend={level} precision=bf16"), GPU) == ""
        assert conflict(Recipe.parse(f"sdpa_backend={level}"), Facts(**{**vars(GPU), "dtype": "float16"})) == ""
    assert conflict(Recipe.parse("sdpa_backend=efficient"), GPU) == ""


def test_fsdp_is_offered_bfloat16_where_the_gpu_computes_in_it() -> None:
    recipe = Recipe.parse("parallel=zero3 mixed_precision=bf16")
    here = replace(GPU, mode="training", ranks=2, samples=4)
    assert conflict(recipe, here) == ""
    assert "capability 8.0" in conflict(recipe, replace(here, cuda_capability=(7, 5)))


def test_a_function_works_where_its_inputs_lie_that_are_not_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probe, "_machine", lambda device: {"device": device})
    found = _probe.probe_facts(Workload(lambda x, lengths, mask: x, [(on_gpu(2, 3), torch.ones(2), torch.ones(2))]))
    assert found.device == "cuda"


def test_onnxruntime_on_a_gpu_is_another_package() -> None:
    packages = {"onnx": "1", "onnxscript": "1", "onnxruntime": "1"}
    recipe = Recipe.parse("runtime=onnxruntime")
    assert "onnxruntime-gpu" in conflict(recipe, Facts(**{**vars(GPU), "packages": packages}))
    assert conflict(recipe, Facts(packages=packages)) == ""
    packages = {"onnx": "1", "onnxscript": "1", "onnxruntime-gpu": "1"}
    assert conflict(recipe, Facts(**{**vars(GPU), "packages": packages})) == ""


def test_an_exported_graph_is_for_gpus() -> None:
    recipe = Recipe.parse("grad=inference_mode runtime=exported")
    assert conflict(recipe, GPU) == ""
    assert "for GPUs" in conflict(recipe, Facts())
    assert "triton.cudagraphs" in source(recipe, GPU)


def test_int8_leaves_layers_alone_that_are_given_few_rows() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.head = nn.Linear(32, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.wide(x).mean(1))

    net, batches = Net().eval(), [torch.randn(16, 5, 32)]
    assert {name: rows_of_linear(net, batches)[getattr(net, name)] for name in ("wide", "head")} == {
        "wide": 80,
        "head": 16,
    }
    plain = type(net.head.weight)
    quantize_linear(net, "Int8DynamicActivationInt8WeightConfig", "int8-dynamic", batches)
    assert type(net.head.weight) is plain
    assert type(net.wide.weight.data) is not torch.Tensor
    recipe = Recipe.parse("compile=default grad=inference_mode quantize=int8-dynamic")
    assert ', "int8-dynamic", batches)' in source(recipe, GPU)
    assert ', "int8-dynamic")' in source(recipe, Facts(num_linear=3, packages={"torchao": "0.18.0"}))


@pytest.mark.parametrize(("level", "dense"), [("2:4", []), ("2:4-mlp", ["qkv", "proj"])])
def test_sparsity_of_the_mlps_leaves_attention_as_it_is(
    level: str, dense: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"qkv": (64, 192), "proj": (64, 64), "gate": (64, 128), "up": (64, 128), "down": (128, 64)}
    block = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()}).to(torch.bfloat16)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda weight: weight)
    recipe = Recipe.parse(f"sparsity={level} precision=bf16 grad=inference_mode")
    assert conflict(recipe, GPU) == ""
    (line,) = find("sparsity").code(level, recipe, GPU).prepare
    exec(line, {"sparsify": sparsify, "model": block})
    whole = [name for name, layer in block.items() if (layer.weight == 0).float().mean() < 0.4]
    assert whole == dense


def test_xformers_computes_what_sdpa_would_and_leaves_masks_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = torch.nn.functional
    torchs, calls = functional.scaled_dot_product_attention, []

    def rows_first(query: Any, key: Any, value: Any, attn_bias: Any, p: float, scale: float | None) -> torch.Tensor:
        calls.append(attn_bias)
        heads_first = (one.transpose(1, 2) for one in (query, key, value))
        return torchs(*heads_first, dropout_p=p, is_causal=attn_bias is not None, scale=scale).transpose(1, 2)

    ops = SimpleNamespace(LowerTriangularMask=lambda: "causal", memory_efficient_attention=rows_first)
    monkeypatch.setitem(sys.modules, "xformers", SimpleNamespace(ops=ops))
    recipe, installed = Recipe.parse("sdpa_backend=xformers"), replace(GPU, packages={"xformers": "0.0.33"})
    assert conflict(recipe, installed) == ""
    assert "tells rows apart" in conflict(Recipe.parse(f"{recipe} ragged=packed"), installed)
    assert "pip install xformers" in conflict(recipe, GPU)
    found: dict[str, Any] = {}
    exec(compile(source(recipe, installed), "optimized.py", "exec"), found)
    x, mask = torch.rand(2, 3, 5, 8), torch.rand(5, 5) > 0.1
    with found["xformers_attention"]():
        for options in ({}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": mask}):
            torch.testing.assert_close(functional.scaled_dot_product_attention(x, x, x, **options),
                                       torchs(x, x, x, **options))  # fmt: skip
        functional.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True)
        assert calls == [None, "causal", None]
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
        assert functional.scaled_dot_product_attention(x, x, x.bfloat16()).dtype == torch.bfloat16
    assert functional.scaled_dot_product_attention is torchs


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for TransformerEngine, and how its context was entered."""

    class Linear(nn.Linear):
        def __init__(self, inputs: int, outputs: int, bias: bool, params_dtype: torch.dtype, device: Any) -> None:
            super().__init__(inputs, outputs, bias, dtype=params_dtype, device=device)

    class LayerNorm(nn.LayerNorm):
        def __init__(self, size: int, eps: float, params_dtype: torch.dtype, device: Any) -> None:
            super().__init__(size, eps, dtype=params_dtype, device=device)

    entered: list[Any] = []

    @contextlib.contextmanager
    def fp8_autocast(enabled: bool, calibrating: bool, recipe: Any) -> Iterator[None]:
        entered.append((enabled, calibrating, recipe))
        yield

    engine = SimpleNamespace(Linear=Linear, LayerNorm=LayerNorm, fp8_autocast=fp8_autocast)
    monkeypatch.setitem(sys.modules, "transformer_engine", SimpleNamespace(pytorch=engine))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", engine)
    scaling = SimpleNamespace(Float8CurrentScaling=lambda: "current")
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", scaling)
    engine.entered = entered
    return engine


ENGINE = replace(GPU, packages={"transformer_engine": "2.9.0"})


def test_transformer_engines_layers_have_the_models_own_parameters(engine: SimpleNamespace) -> None:
    facts = ENGINE
    recipe = Recipe.parse("transformer_engine=float8")
    assert conflict(recipe, facts) == ""
    assert "pip install" in conflict(recipe, replace(facts, packages={"transformer_engine": "2.1.0"}))
    assert conflict(recipe, replace(facts, packages={"transformer_engine": "2.10rc1"})) == ""
    assert "8.9" in conflict(recipe, replace(facts, cuda_capability=(8, 0)))
    training = replace(facts, mode="training")
    assert "without float8" in conflict(Recipe.parse(f"{recipe} checkpoint=blocks"), training)
    assert "torch's own linear layers" in conflict(Recipe.parse(f"{recipe} sparsity=2:4 precision=bf16"), facts)
    net = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 10), nn.LayerNorm(10, bias=False)).eval()
    before, x = dict(net.named_parameters()), torch.rand(8, 32)
    expected = net(x)
    fast = load(source(recipe, facts), "optimized")(net, [x])
    torch.testing.assert_close(fast(x), expected)
    assert [type(layer) for layer in net] == [engine.Linear, engine.LayerNorm, nn.Linear, nn.LayerNorm]
    assert all(one is before[name] for name, one in net.named_parameters())
    assert engine.entered == [(True, False, "current")]


def test_transformer_engines_layers_in_the_place_of_gpt_2s_are_trained(engine: SimpleNamespace) -> None:
    class Conv1D(nn.Module):
        __module__ = "transformers.pytorch_utils"

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(32, 48)), nn.Parameter(torch.zeros(48))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x, self.weight)

    torch.manual_seed(0)
    as_given, x = nn.Sequential(Conv1D(), nn.LayerNorm(48)), torch.rand(8, 32)
    net = copy.deepcopy(as_given)
    for model, recipe in ((as_given, Recipe()), (net, Recipe.parse("transformer_engine=on"))):
        train = load(source(recipe, replace(ENGINE, mode="training")), str(recipe))
        steps = train(model, functools.partial(torch.optim.SGD, lr=1.0), lambda model, x: model(x).sin().mean(), [x])
        for _, _ in zip(range(3), steps, strict=False):
            pass
    assert [type(layer) for layer in net] == [engine.Linear, engine.LayerNorm]
    torch.testing.assert_close(net(x), as_given(x))


def test_half_of_the_free_memory_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Any]] = []
    recipe, several, layer = Recipe.parse("allocator=preheat"), replace(GPU, num_input_shapes=2), nn.Linear(2, 2)
    assert "CUDA" in conflict(recipe, Facts())
    offered = {level.name: level.why_not for level in find("allocator").levels(GPU)}
    assert "one shape" in offered["preheat"]
    assert not conflict(recipe, GPU)  # where it is asked for
    layer.weight = nn.Parameter(on_gpu(2, 2))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30 if device == "cuda" else 1 << 28, 1 << 31))
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: asked.append((size * dtype.itemsize, device)))
    for model in (nn.Identity(), layer):
        load(source(recipe, several), "optimized")(model, [torch.zeros(1)])
    assert asked == [(1 << 29, "cuda"), (1 << 27, torch.device("cuda:1"))]


def test_an_amd_gpu_is_offered_what_it_has() -> None:
    """torch's build for AMD calls them CUDA devices; what needs NVIDIA's says whose the GPU is."""
    packages = {"torchao": "0.18", "triton": "3.6", "torch_tensorrt": "2.9", "onnxruntime-gpu": "1.3"}
    amd = replace(
        GPU, cuda_capability=(0, 0), amd="gfx942", decomposed_bias=1, calibration_batches=2, packages=packages
    )
    here = {
        f"{technique.name}={level.name}": level.why_not for technique in CATALOGUE for level in technique.levels(amd)
    }
    theirs = {name for name, why_not in here.items() if "this one is AMD's gfx942" in why_not}
    assert theirs == {"matmul=high", "matmul=medium", "sparsity=2:4", "sparsity=2:4-mlp", "sdpa_backend=cudnn",
                      "allocator=cuda-async", "runtime=tensorrt", "runtime=onnxruntime"}  # fmt: skip
    assert {"precision=bf16", "compile=default", "cuda_graphs=on", "quantize=float8-dynamic", "attention=fused"} <= {
        name for name, why_not in here.items() if not why_not
    }
    older = replace(amd, amd="gfx90a")
    for others in (older, replace(amd, amd="gfx1201")):  # torchao has no float8 for Radeons
        assert "MI300" in {level.name: level.why_not for level in find("quantize").levels(others)}["float8-dynamic"]
    assert find("precision").usual(older) == "bf16"


def test_a_gpu_that_emulates_bfloat16_is_offered_float16() -> None:
    old = replace(GPU, cuda_capability=(7, 5))
    for level in ("bf16", "autocast-bf16"):
        assert "8.0" in conflict(Recipe.parse(f"precision={level}"), old)
    assert find("precision").usual(old) == "fp16"
    assert "TF32" in conflict(Recipe.parse("matmul=high"), old)
    training = bundles(replace(old, mode="training", block_classes=("Block",)))
    assert {recipe.levels.get("precision") for recipe in training} == {None, "autocast-fp16"}


def test_the_architecture_of_an_amd_gpu_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert _host.gpu(True) == {"amd": "gfx942"}
    assert _host.gpu(False) == {}


def test_int8_looks_at_batches_in_the_type_that_the_model_has() -> None:
    net, batches = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8)).eval(), [torch.randn(40, 32)]
    wanted = net(batches[0])
    recipe = Recipe.parse("precision=bf16 quantize=int8-dynamic grad=inference_mode")
    found = load(source(recipe, GPU), str(recipe))(net, batches)(batches[0])
    assert (found - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("name", ["matmul=high", "channels_last=on", "cudnn_benchmark=on", "sdpa_backend=math"])
def test_an_exported_graph_goes_by_the_settings_of_torch_and_tensorrt_does_not(name: str) -> None:
    facts = replace(GPU, num_conv=9, packages={"torch_tensorrt": "2.9"})
    assert conflict(Recipe.parse(f"runtime=exported grad=inference_mode {name}"), facts) == ""
    assert "another runtime" in conflict(Recipe.parse(f"runtime=tensorrt {name}"), facts)


@pytest.mark.parametrize(
    "odd", [{"is_module": False}, {"not_in_16_bits": "so"}, {"changes_inputs": True, "num_4d_inputs": 1, "num_conv": 1}]
)
def test_models_that_cannot_have_what_is_usual_are_tried_without_that(odd: dict[str, Any]) -> None:
    facts = replace(GPU, **odd)
    assert find("precision").usual(facts) == "bf16"
    tried = [recipe for recipe in bundles(facts) if "compile" in recipe.levels]
    assert tried
    assert not any({"precision", "channels_last"} & recipe.levels.keys() for recipe in tried)


def test_parts_of_a_batch_for_openvino_are_offered_where_it_can_run() -> None:
    facts = Facts(samples=8, physical_cores=8)
    for one, says in (
        (replace(GPU, samples=8, physical_cores=8), "the work is on cuda"), (facts, "openvino is not installed"),
        (replace(facts, packages={"openvino": "2026.4"}), ""),
    ):  # fmt: skip
        assert find("streams").why_not("per-core", one).startswith(says)
        assert bool(find("streams").why_not("per-core", one)) is bool(says)


@pytest.mark.parametrize("num_conv", [0, 9])
def test_other_runtimes_are_tried_early(num_conv: int) -> None:
    """With convolutions the usual levels are those of torch's own, which another runtime does not take."""
    facts = replace(GPU, num_conv=num_conv, num_4d_inputs=1, uneven_sdpa=2, packages={"torch_tensorrt": "2.9"})
    assert {"exported", "tensorrt"} <= {recipe.levels.get("runtime") for recipe in bundles(facts)}


def test_what_a_gpu_makes_of_float32_products() -> None:
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    told = {level.name: level.summary for level in find("matmul").levels(GPU)}
    assert told["medium"].startswith("TF32")


def test_a_kernel_of_attention_is_offered_where_it_is_called() -> None:
    manual = replace(GPU, uses_sdpa=False, manual_attention=2, decomposed_bias=2, packages={"triton": "3.5"})
    for attention in ("as-is", "fused"):
        assert "does not call" in conflict(Recipe.parse(f"sdpa_backend=math attention={attention}"), manual)
    assert conflict(Recipe.parse("sdpa_backend=math attention=sdpa"), manual) == ""
    ranks = replace(GPU, mode="training", ranks=2, samples=4)
    assert conflict(Recipe.parse("sdpa_backend=flash parallel=zero3 mixed_precision=bf16"), ranks) == ""


def test_a_device_of_another_kind_is_not_taken_for_a_cpu() -> None:
    facts = Facts(device="xpu", packages={"onnx": "1", "onnxscript": "1", "onnxruntime": "1"})
    assert "the work is on xpu" in conflict(Recipe.parse("runtime=onnxruntime"), facts)


def test_a_part_whose_shapes_change_with_the_input_is_not_recorded() -> None:
    recipe = Recipe.parse("cuda_graphs=on grad=inference_mode")
    assert conflict(recipe, GPU) == ""
    assert "in other shapes" in conflict(recipe, replace(GPU, shapes_vary=True))
