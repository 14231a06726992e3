"""2:4 sparsity: the two smallest of every four weights become zero, and the GPU skips them."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from fettle.techniques._base import Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._linear import is_conv1d, linear_of_conv1d


def sparsify(model: torch.nn.Module, only_mlps: bool = False) -> None:
    """Prune every linear layer that the sparse kernels can take to 2:4, by magnitude, and pack it; or only those that
    widen and have a counterpart that narrows again, which is what MLPs consist of."""
    import logging

    linear_of_conv1d(model)
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    if only_mlps:
        sizes = {(layer.in_features, layer.out_features) for layer in layers}
        layers = [
            layer
            for layer in layers
            if layer.in_features != layer.out_features and (layer.out_features, layer.in_features) in sizes
        ]
    done = 0
    for layer in layers:
        weight = layer.weight.detach()
        # the kernels want tiles of 64 rows and columns in 16 bits
        if any(size % 64 for size in weight.shape) or weight.dtype not in (torch.float16, torch.bfloat16):
            continue
        groups = weight.reshape(-1, 4)
        keep = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, groups.abs().topk(2, dim=1).indices, True)
        pruned = (groups * keep).reshape(weight.shape)
        layer.weight = torch.nn.Parameter(torch.sparse.to_sparse_semi_structured(pruned), requires_grad=False)
        layer.register_forward_pre_hook(lambda _, args: (args[0].contiguous(), *args[1:]))  # the kernels take no other
        done += 1
    if done == 0:
        raise RuntimeError(f"2:4 sparsity: 0 of {len(layers)} layers matched")
    logging.getLogger("optimized").info("2:4 sparsity: %d of %d linear layers", done, len(layers))


@register
class Sparsity(Technique):
    name = "sparsity"
    order = 520
    title = "2:4 sparsity"
    default = "none"
    of_module = True
    needs: ClassVar[Mapping[str, str]] = {"precision": "bf16", "grad": "inference_mode"}

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.num_linear else "the model has no linear layer"
        if not facts.is_module:
            why_not = "the model is a plain callable"
        elif facts.not_nvidia:
            why_not = facts.not_nvidia
        elif facts.device != "cuda" or facts.cuda_capability < (8, 0):
            why_not = "sparse matrix units need a GPU of compute capability 8.0"
        return [
            Level("none", "as given"),
            Level("2:4", "half of the weights of linear layers dropped", why_not),
            Level("2:4-mlp", "the same where layers widen and narrow again, as MLPs do: costs less accuracy", why_not),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        half = recipe.levels.get("precision", "fp32") in ("bf16", "fp16") or facts.dtype in ("bfloat16", "float16")
        if not half:
            return "the sparse kernels take 16-bit weights: needs precision=bf16 or fp16"
        if recipe.levels.get("quantize", "none") != "none":
            return "quantised weights cannot be packed as sparse ones"
        return ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        only_mlps = ", only_mlps=True" if level == "2:4-mlp" else ""
        return Code(helpers=(is_conv1d, linear_of_conv1d, sparsify), prepare=(f"sparsify(model{only_mlps})",))
