"""The kernel without a GPU: run element by element by Triton's interpreter, and compiled for GPUs that are not here."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from fettle.recipe import Recipe
from fettle.techniques import Facts, conflict, find, source
from tests.forking import run_script

pytest.importorskip("triton")
GPU = Facts(device="cuda", decomposed_bias=2, cuda_capability=(9, 0), packages={"triton": "3.5"})


def interpreted(by_chance: int) -> dict[str, float]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code, said, errors = run_script(Path(__file__).with_name("interpreted.py"), environment, str(by_chance))
    if "only 0-dimensional arrays can be converted" in errors:
        pytest.skip("this Triton's interpreter is older than this NumPy")
    assert code == 0, errors
    return json.loads(said.splitlines()[-1])


def limit(case: str) -> float:
    """Ten times what rounding once to the type costs at most."""
    return {"torch.float16": 5e-4, "torch.bfloat16": 4e-3}.get(case.split()[0], 2e-6)


def test_it_computes_what_its_reference_does() -> None:
    errors = interpreted(0)
    assert {name: error for name, error in errors.items() if not error < limit(name)} == {}
    assert {"model", "compiled", "exported"} < errors.keys()
    assert len(errors) == 3 * 6 + 3


@pytest.mark.slow
def test_any_shape() -> None:
    errors = interpreted(20)
    assert {name: error for name, error in errors.items() if not error < limit(name)} == {}
    assert len(errors) > 50


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
@pytest.mark.slow
def test_no_compiler_runs_out_of_registers(target: str, kind: str) -> None:
    from bench import kernels

    for width, channels in kernels.SIZES:
        fitting = 0
        for config in kernels.configs(kind, width):
            used = kernels.resources(target, kernels.compiled(target, kind, width, channels, config))
            assert used["spilled"] == 0, (width, channels, config)
            fitting += used["shared"] <= kernels.SHARED[target][0]
        assert fitting >= 2


def test_one_is_compiled_for_a_gpu_that_is_not_here() -> None:
    from bench import kernels

    config = kernels.configs("bf16", 64)[0]
    kernel = kernels.compiled("sm_90", "bf16", 64, 64, config)
    assert "wgmma" in kernel.asm["ptx"]  # products on tensor cores
    used = kernels.resources("sm_90", kernel)
    assert used["spilled"] == 0
    assert 32 < used["registers"] < 200
    assert 0 < used["shared"] < kernels.SHARED["sm_90"][0]
    assert kernels.occupancy("sm_90", config.num_warps, used["registers"], used["shared"]) >= 8


def test_where_the_level_is_offered() -> None:
    fused = Recipe.parse("attention=fused")
    assert conflict(fused, GPU) == ""
    assert find("attention").usual(GPU) == "fused"
    assert "no attention with a decomposed" in conflict(fused, Facts(device="cuda"))
    assert "for GPUs" in conflict(fused, Facts(decomposed_bias=1))
    assert "8.0 and later" in conflict(fused, Facts(**{**vars(GPU), "cuda_capability": (7, 5)}))
    assert "pip install triton" in conflict(fused, Facts(**{**vars(GPU), "packages": {}}))
    assert "does not have this kernel" in conflict(Recipe.parse("attention=fused runtime=aoti"), GPU)


def test_without_triton_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from fettle.kernels.decomposed_attention import decomposed_attention_kernels

    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="pip install triton"):
        decomposed_attention_kernels()
    text = source(Recipe.parse("attention=fused"), GPU)  # the lines can be written where they cannot run
    assert "fettle" not in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size", [(2, 3, 64, 64, 64), (1, 2, 64, 64, 80), (9, 2, 14, 14, 64), (1, 1, 5, 130, 24)], ids=str
)
def test_on_a_gpu(size: tuple[int, ...], dtype: torch.dtype) -> None:
    from fettle.kernels.decomposed_attention import attention_reference, decomposed_attention

    batch, heads, height, width, channels = size
    tokens = height * width
    torch.manual_seed(0)
    mixed = torch.randn(batch, tokens, 3, heads, channels, device="cuda").to(dtype).permute(2, 0, 3, 1, 4)
    bias = [torch.randn(batch, heads, tokens, length, device="cuda").to(dtype) for length in (height, width)]
    got = decomposed_attention()(*mixed.unbind(0), *bias, channels**-0.5).double()
    wanted = attention_reference(*(part.double() for part in (*mixed.unbind(0), *bias)), channels**-0.5)
    assert (got - wanted).norm() < limit(str(dtype)) * wanted.norm()
