"""Run by test_decomposed_attention.py with TRITON_INTERPRET=1, which Triton reads when it is imported: the kernel on a
CPU, block by block. Prints the relative error of each case as JSON."""

import json
import logging
import random
import sys
from typing import Any

import torch
import triton.runtime.interpreter as interpreter
from torch import nn
from triton.runtime.autotuner import Autotuner

from fettle.kernels.decomposed_attention import (
    attention_reference,
    decomposed_attention,
    decomposed_attention_kernels,
    launch_decomposed_attention,
)
from fettle.recipe import Recipe
from fettle.techniques import Facts, load, source
from tests.techniques.test_tiled_attention import Published

multiply = interpreter.InterpreterBuilder.create_dot


def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """Its product takes the bits of bfloat16 for integers (Triton 3.9): it is handed the same numbers as float32."""
    if a.dtype.scalar == interpreter.tl.bfloat16:
        a, b = (self.cast_impl(part, interpreter.tl.float32) for part in (a, b))
    return multiply(self, a, b, *rest)


interpreter.InterpreterBuilder.create_dot = dot
prune = Autotuner.prune_configs
Autotuner.prune_configs = lambda self, arguments: prune(self, arguments)[:1]  # there is no device to time them on


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def inputs(batch: int, heads: int, height: int, width: int, channels: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values as they lie in the product of all three; the parts of the bias in steps of two."""
    tokens = height * width
    mixed = (2 * torch.randn(batch, tokens, 3, heads, channels)).to(dtype)
    rows = torch.randn(batch, heads, tokens, 2 * height).to(dtype)[..., ::2]
    columns = torch.randn(heads, batch, tokens, width).to(dtype).transpose(0, 1)
    return [*mixed.permute(2, 0, 3, 1, 4).unbind(0), rows, columns]


def shapes() -> list[tuple[int, ...]]:
    """Batch, heads, height, width, channels, queries and keys in a block: corners, or so many by chance."""
    found = [
        (1, 1, 1, 1, 16, 16, 16),
        (2, 2, 2, 16, 16, 32, 16),  # nothing is filled up
        (1, 2, 3, 5, 8, 16, 16),  # rows together, and filled up
        (1, 1, 1, 9, 24, 16, 16),  # two parts of the channels, both filled up
        (1, 1, 2, 17, 80, 16, 16),  # a row in two blocks; channels as 64 + 16
        (1, 1, 7, 2, 72, 32, 64),  # fewer keys than a block
    ]
    chance, many = random.Random(0), int(sys.argv[1])
    for _ in range(many):
        size = [chance.randint(1, 3), chance.randint(1, 2), chance.randint(1, 9), chance.randint(1, 36)]
        found.append((*size, chance.randint(1, 100), chance.choice([16, 32]), chance.choice([16, 32])))
    return found[-many:]


def kernel_errors() -> dict[str, float]:
    attend, _ = decomposed_attention_kernels()
    errors = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for *size, block_m, block_n in shapes():
            given = inputs(*size, dtype)
            scale = size[-1] ** -0.5
            got = launch_decomposed_attention(attend, *given, scale, BLOCK_M=block_m, BLOCK_N=block_n)
            assert got.dtype == dtype
            assert torch.isfinite(got).all()
            wanted = attention_reference(*(part.double() for part in given), scale)
            errors[f"{dtype} {size} {block_m} {block_n}"] = error(got, wanted)
    return errors


def model_errors() -> dict[str, float]:
    """The level of the technique as ``optimized.py`` has it, alone, compiled and exported."""
    facts = Facts(device="cuda", decomposed_bias=2, cuda_capability=(9, 0), packages={"triton": "3"})
    recipe = Recipe.parse("attention=fused grad=inference_mode")
    model = nn.Sequential(Published(4), nn.ReLU(), Published(4)).eval().requires_grad_(False)
    image = torch.randn(2, 4, 6, 16)
    wanted = model.double()(image.double())
    model = model.float()
    run = load(source(recipe, facts), str(recipe))(model, [image])
    errors = {"model": error(run(image), wanted)}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    errors["compiled"] = error(compiled(image), wanted)
    exported = torch.export.export(model, (image,))
    assert str(exported.graph).count("optimized.decomposed_attention") == 2
    errors["exported"] = error(exported.module()(image), wanted)
    given = inputs(1, 2, 3, 4, 16, torch.float32)
    torch.library.opcheck(decomposed_attention(), (*given, 0.25), test_utils=("test_schema", "test_faketensor"))
    return errors


if __name__ == "__main__":
    logging.disable()
    torch.manual_seed(0)
    print(json.dumps(kernel_errors() if int(sys.argv[1]) else {**kernel_errors(), **model_errors()}))
