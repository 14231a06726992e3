"""Arithmetic in 16 bits: autocast keeps float32 weights, the plain levels convert them."""

from typing import Any

import torch

from fettle.recipe import Recipe
from fettle.techniques._base import Code, Facts, Level, Technique

_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Convert every floating tensor in a tree of tuples, lists, dicts and registered classes."""
    if isinstance(tree, torch.Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if type(tree) is tuple:  # the common shapes of arguments, without the cost of a general tree
        return tuple(cast(item, dtype) for item in tree)
    if type(tree) is dict:
        return {key: cast(item, dtype) for key, item in tree.items()}
    from torch.utils import _pytree as pytree

    return pytree.tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


class Precision(Technique):
    name = "precision"
    rung = 2
    title = "16-bit precision"
    given = "fp32"

    def levels(self, facts: Facts) -> list[Level]:
        whole = "" if facts.is_module else "the model is a plain callable, its weights are out of reach"
        given = "" if facts.dtype == "float32" else f"the weights are {facts.dtype}, not float32"
        fp16 = "" if facts.device != "cpu" or "avx512_fp16" in facts.cpu_flags else "this CPU has no float16 arithmetic"
        return [
            Level("fp32", "as given"),
            Level("bf16", "weights and activations in bfloat16", given or whole),
            Level("autocast-bf16", "float32 weights, bfloat16 where autocast thinks it safe", given),
            Level("fp16", "weights and activations in float16", given or whole or fp16),
            Level("autocast-fp16", "float32 weights, float16 where autocast thinks it safe", given or fp16),
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        dtype = _DTYPES[level.removeprefix("autocast-")]
        if level.startswith("autocast-"):
            return Code(contexts=(f'torch.autocast("{facts.device}", dtype={dtype})',))
        return Code(
            helpers=(cast,),
            prepare=(f"model.to({dtype})",),
            inputs=(f"args, kwargs = cast(args, {dtype}), cast(kwargs, {dtype})",),
            outputs=("output = cast(output, torch.float32)  # the caller sees the type it always saw",),
        )
