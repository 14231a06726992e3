"""Weights in 8 or 4 bits, activations as they are: a step of decoding reads a quarter or an eighth of the memory.

torch's own kernels multiply packed weights as they are read. They are made for a few rows; a prompt has many, and for
it the weights are unpacked for one ordinary product.
"""

from typing import Any

import torch

from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._generation import NO_TEXT


class FewBits(torch.nn.Module):
    """A linear layer whose weight [out, in] is held in 8 bits with a scale for each row, or in 4 with a scale and a
    zero for each `group` of inputs in a row."""

    def __init__(self, weight: torch.Tensor, bias: Any, bits: int, group: int = 32) -> None:
        super().__init__()
        self.bits, self.group, self.size = bits, group, weight.shape[0]
        self.bias, self.most = bias, 16
        weight = weight.detach().float().contiguous()
        # Scales are rounded to bfloat16 before the weights are rounded to them: a later cast loses nothing.
        if bits == 8:
            scales = (weight.abs().amax(1) / 127).clamp(min=1e-12).bfloat16().float()
            packed = (weight / scales[:, None]).round().clamp(-127, 127).to(torch.int8)
        else:
            weight = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 64))
            groups = weight.reshape(len(weight), -1, group)
            low, high = groups.amin(-1), groups.amax(-1)
            step = ((high - low) / 15).clamp(min=1e-12).bfloat16().float()
            zero = (low + 8 * step).bfloat16().float()
            codes = ((groups - zero[..., None]) / step[..., None] + 8).round().clamp(0, 15)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.flatten(1).to(torch.int32), 1)
            scales = torch.stack([step, zero], -1).transpose(0, 1).contiguous()
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.packed: torch.Tensor
        self.scales: torch.Tensor

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """The product of a few rows [rows, in] with the packed weights."""
        scales = self.scales.to(rows.dtype)
        if self.bits == 8:
            return torch.ops.aten._weight_int8pack_mm(rows, self.packed, scales)  # type: ignore[no-any-return]
        wide = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group, scales)
        return wide[:, : self.size]  # type: ignore[no-any-return]

    def whole(self, like: torch.Tensor) -> torch.Tensor:
        """The weights [out, in] as ordinary numbers."""
        if self.bits == 8:
            return self.packed.to(like.dtype) * self.scales.to(like.dtype)[:, None]
        return self.multiply(torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)).T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        few = len(rows) <= self.most
        found = self.multiply(rows.contiguous()) if few else torch.nn.functional.linear(rows, self.whole(rows))
        found = found if self.bias is None else found + self.bias
        return found.reshape(*x.shape[:-1], self.size)


def few_bits(model: torch.nn.Module, bits: int) -> None:
    """Hold the weights of linear layers in `bits` bits; with 4 the head, which decides, keeps 8."""
    import logging

    ask: Any = getattr(model, "get_output_embeddings", None)
    head = ask() if ask is not None else None
    found = total = 0
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            turned = type(layer).__name__ == "Conv1D"  # transformers' own linear layer, whose weight is [in, out]
            if not isinstance(layer, torch.nn.Linear) and not turned:
                continue
            weight: Any = layer.weight.T if turned else layer.weight
            total += 1
            if weight.shape[1] % 32 == 0 and weight.is_floating_point():
                setattr(parent, name, FewBits(weight, layer.bias, 8 if layer is head else bits))
                found += 1
    if found == 0:
        raise RuntimeError(f"{bits} bits: 0 of {total} layers matched")
    logging.getLogger("optimized").info("%d bits: %d of %d linear layers", bits, found, total)


@register
class Weights(Technique):
    name = "weights"
    order = 495
    title = "weights in few bits"
    default = "as-given"

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.generates else NO_TEXT
        if facts.generates and not facts.is_module:
            why_not = "the model is no module, its weights are out of reach"
        elif facts.generates and facts.device != "cpu":
            why_not = "it is for CPUs: quantize has levels for a GPU"
        return [
            Level("as-given", "as given"),
            Level("int8", "linear layers in 8 bits, a scale for each output", why_not),
            Level("int4", "linear layers in 4 bits, a scale and a zero for 32 inputs; the head in 8", why_not),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level != self.default and recipe.levels.get("quantize", "none") != "none":
            return "quantize holds the weights in few bits already"
        if level != self.default and facts.dtype == "float32" and recipe.levels.get("precision") != "bf16":
            return "torch's kernels for packed weights are slow in float32: needs precision=bf16"
        return ""

    def bundles(self, facts: Facts) -> list[Bundle]:
        if not facts.generates:
            return []
        half = {"precision": "bf16"} if facts.dtype == "float32" else {}
        return [Bundle(place, {"weights": level, **half}) for place, level in ((15, "int8"), (25, "int4"))]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(helpers=(FewBits, few_bits), prepare=(f"few_bits(model, {level.removeprefix('int')})",))
