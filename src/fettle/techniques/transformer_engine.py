"""Linear layers and layer norms of NVIDIA's TransformerEngine, in the model's own type or multiplied in float8."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from fettle.techniques._base import BOTH, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._linear import is_conv1d, linear_of_conv1d

_PACKAGE = "transformer_engine"
_LINEAR_OF_TORCH = ("quantize", "sparsity", "fused_linear", "tensor_parallel", "weights")
"""Techniques that look for torch's own linear layers."""


def to_transformer_engine(model: torch.nn.Module) -> None:
    """Put TransformerEngine's layers, with the same parameters, in the place of torch's. Linear layers whose sizes are
    no multiples of 16 stay, as float8 takes no others."""
    import logging

    import transformer_engine.pytorch as te

    linear_of_conv1d(model)
    made: dict[Any, Any] = {}
    layer: Any
    sizes: Any
    more: Any
    for parent in list(model.modules()):
        for name, layer in list(parent._modules.items()):
            if layer is None or layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
                continue
            if layer not in made:
                if type(layer) is torch.nn.Linear and layer.in_features % 16 == layer.out_features % 16 == 0:
                    kind, sizes = te.Linear, (layer.in_features, layer.out_features)
                    more = {"bias": layer.bias is not None}
                elif type(layer) is torch.nn.LayerNorm and layer.bias is not None and len(layer.normalized_shape) == 1:
                    kind, sizes, more = te.LayerNorm, layer.normalized_shape, {"eps": layer.eps}
                else:
                    continue
                new = kind(*sizes, **more, params_dtype=layer.weight.dtype, device=layer.weight.device)
                new.weight = layer.weight
                if layer.bias is not None:
                    new.bias = layer.bias
                made[layer] = new.train(layer.training)
            setattr(parent, name, made[layer])
    if not made:
        raise RuntimeError("TransformerEngine: found no linear layer of multiples of 16, and no layer norm")
    logging.getLogger("optimized").info("TransformerEngine: %d layers", len(made))


def in_float8() -> Any:
    """A context in which TransformerEngine's layers multiply in float8, with scales of the tensors at hand: those of
    the steps before are not kept up to date in inference."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    autocast = getattr(te, "autocast", None) or te.fp8_autocast  # as it was called before 2.9
    return autocast(True, False, Float8CurrentScaling())


@register
class TransformerEngine(Technique):
    name = "transformer_engine"
    order = 505
    modes = BOTH
    rung = 4
    title = "TransformerEngine"
    default = "off"
    of_module = True
    packages = (_PACKAGE,)
    remarks: ClassVar[Mapping[str, str]] = {
        "float8": "Its linear layers take a multiple of 8 rows (16 in training), those of one call together, and no "
        "other number."
    }

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if facts.device != "cuda" or facts.amd:
            why_not = "it is for NVIDIA's GPUs"
        elif not facts.num_linear:
            why_not = "the model has no linear layer"
        elif tuple(map(int, re.findall(r"\d+", facts.packages.get(_PACKAGE, "0.0"))[:2])) < (2, 2):
            why_not = (
                "TransformerEngine 2.2 or later is not installed: "
                "pip install --no-build-isolation 'transformer_engine[pytorch]'"
            )
        old = "" if facts.cuda_capability >= (8, 9) else "float8 needs a GPU of compute capability 8.9"
        return [
            Level("off", "as given"),
            Level("on", "TransformerEngine's linear layers and layer norms", why_not),
            Level("float8", "the same, products in float8", why_not or old),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if recipe.levels.get("runtime", "torch") != "torch":
            return "another runtime, or an exported graph, has its own layers"
        if "tensor" in recipe.levels.get("parallel", ""):
            return "torch's tensor parallelism splits torch's own layers"
        if level == "float8" and recipe.levels.get("checkpoint") in ("blocks", "selective"):
            return "the backward pass would compute again without float8"
        others = [name for name in _LINEAR_OF_TORCH if name in recipe.levels]
        return f"{others[0]}={recipe.levels[others[0]]} is for torch's own linear layers" if others else ""

    def unpackaged(self, level: str, recipe: Recipe, facts: Facts) -> str:
        return f"an exported model has no layers of TransformerEngine. {self.tune_without()}"

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        # In training, weights that are turned round are so before the optimizer is given them.
        turned = ("linear_of_conv1d(model)",) if facts.mode == "training" else ()
        helpers = (is_conv1d, linear_of_conv1d, to_transformer_engine)
        layers = Code(helpers=helpers, setup=turned, prepare=("to_transformer_engine(model)",))
        if level == "on":
            return layers
        return replace(layers, helpers=(*layers.helpers, in_float8), contexts=("in_float8()",))
