"""Weights in 8 or 4 bits: a step of decoding reads a quarter or an eighth of the memory.

With activations as they are, torch's own kernels multiply packed weights as they are read. They are made for a few
rows; a prompt has many, and for it the weights are unpacked for one ordinary product. With activations rounded to 8
bits too, each token by its own scale, a product is one of integers, which for a prompt as well takes half the time of
one in bfloat16. Where 8 bits are too coarse for a token, two numbers of 8 bits hold 16: the product has two rows for
one then, and the weights are still read once.

On CPUs with VNNI a kernel of our own (`fettle.kernels.block_products`) has both in blocks of 32 with a scale each: it
reads weights as fast as memory gives them, and an outlier spoils its block alone. Where 4 bits are too coarse for the
whole model, as many layers have them as the limit on the divergence allows, and the others 8.
"""

import textwrap
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
import torch

from fettle.kernels import BLOCK_PRODUCTS, block_products, packed_blocks, unpacked_blocks
from fettle.techniques._base import Bundle, Code, Facts, Learned, Level, Recipe, Technique, register
from fettle.techniques._chosen_layers import chosen_layers, layer_groups
from fettle.techniques._few_bits import few_bits, four_bits_part, packable
from fettle.techniques._linear import is_conv1d, linear_of_conv1d
from fettle.techniques.fused_linear import FUSED, fused
from fettle.techniques.runtime import STATEFUL, STATEFUL_WEIGHTS
from fettle.workload import spread


class Unpacked(torch.Tensor):
    """The weight of a `FewBits` layer as a model sees it that looks at it itself: what it is like costs nothing, and it
    is unpacked for each operator that computes with it."""

    @staticmethod
    def __new__(cls, layer: Any) -> Any:
        like = layer.like
        return torch.Tensor._make_wrapper_subclass(
            cls, (layer.size, layer.inputs), dtype=like.dtype, device=like.device
        )

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def plain(value: Any) -> Any:
            return value.layer.whole(value) if isinstance(value, cls) else value

        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class FewBits(torch.nn.Module):
    """A linear layer whose weight [out, in] is held in 8 bits with a scale for each row, or in 4 with a scale and a
    zero for each `group` of inputs in a row. With `parts` what comes in is rounded, token by token, to so many numbers
    of 8 bits."""

    def __init__(self, weight: torch.Tensor, bias: Any, bits: int, parts: int = 0, group: int = 32) -> None:
        super().__init__()
        self.bits, self.group, self.parts = bits, group, parts
        self.size, self.inputs = weight.shape
        self.bias, self.most, kind = bias, 16, weight.dtype
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
            codes = ((groups - zero[..., None]) / step[..., None] + 8).round().clamp(0, 15).flatten(1).to(torch.int32)
            packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
            # Rows that lie together, by the width of this CPU's registers; 0: in another order
            self.block = next((n for n in (64, 32) if torch.equal(self.codes(packed, n), codes)), 0)
            scales = torch.stack([step, zero], -1).transpose(0, 1).contiguous()
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales.to(kind))
        self.packed: torch.Tensor
        self.scales: torch.Tensor

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """The product of a few rows [rows, in] with the packed weights."""
        scales = self.scales.to(rows.dtype)
        if self.bits == 8:
            return torch.ops.aten._weight_int8pack_mm(rows, self.packed, scales)  # type: ignore[no-any-return]
        wide = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, self.group, scales)
        return wide[:, : self.size]  # type: ignore[no-any-return]

    @staticmethod
    def codes(packed: torch.Tensor, block: int) -> torch.Tensor:
        """The 4 bits of each weight [out, in], where `block` rows lie together: of each input those of the first half
        in the low bits, those of the other half in the high ones."""
        pairs = packed.reshape(len(packed) // block, -1, block // 2)
        return torch.cat([pairs & 15, pairs >> 4], -1).transpose(1, 2).reshape(len(packed), -1)

    @property
    def like(self) -> torch.Tensor:
        """Of the type and on the device of the weights."""
        return self.scales

    @property
    def weight(self) -> torch.Tensor:
        """The weights [out, in], for a model that looks at them itself."""
        return self.whole(self.like) if torch.compiler.is_compiling() else Unpacked(self)

    def whole(self, like: torch.Tensor) -> torch.Tensor:
        """The weights [out, in] as ordinary numbers of the type of `like`."""
        if self.bits == 8:
            return self.packed.to(like.dtype) * self.scales.to(like.dtype)[:, None]
        if not self.block:
            return self.multiply(torch.eye(self.inputs, dtype=like.dtype, device=like.device)).T
        step, zero = self.scales.to(like.dtype).permute(2, 1, 0)[..., None]
        groups = self.codes(self.packed, self.block).to(like.dtype).reshape(*step.shape[:2], self.group)
        weights: torch.Tensor = ((groups - 8) * step + zero).flatten(1)
        return weights[: self.size]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.parts:
            wide = rows.float()
            step = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
            coarse = (wide / step).round()
            if self.parts == 1:
                sums = torch._int_mm(coarse.to(torch.int8), self.packed.T).float()
            else:
                fine = ((wide / step - coarse) * 254).round().clamp(-127, 127)
                both = torch._int_mm(torch.cat([coarse, fine]).to(torch.int8), self.packed.T).float()
                sums = both[: len(rows)] + both[len(rows) :] / 254
            found = sums * step * self.scales.float()
        elif len(rows) <= self.most:
            found = self.multiply(rows.contiguous())
        elif self.bits == 8:  # whole numbers up to 127 are exact in 16 bits
            found = torch.nn.functional.linear(rows, self.packed.to(rows.dtype)) * self.scales.to(rows.dtype)
        else:
            found = torch.nn.functional.linear(rows, self.whole(rows))
        found = found if self.bias is None else found + self.bias
        return found.to(x.dtype).reshape(*x.shape[:-1], self.size)


class InBlocks(torch.nn.Module):
    """A linear layer whose weight [out, in] is held in 8 or 4 bits in blocks of 32 inputs, as is what comes in."""

    def __init__(self, weight: torch.Tensor, bias: Any, bits: int) -> None:
        super().__init__()
        block_products()
        self.bias = bias
        self.size, self.inputs = weight.shape
        packed, scales = packed_blocks(weight, bits)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("like", weight.new_empty(0))
        self.packed: torch.Tensor
        self.scales: torch.Tensor
        self.like: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """The weights [out, in], for a model that looks at them itself."""
        return self.whole(self.like) if torch.compiler.is_compiling() else Unpacked(self)

    def whole(self, like: torch.Tensor) -> torch.Tensor:
        """The weights [out, in] as ordinary numbers of the type of `like`."""
        return unpacked_blocks(self.packed, self.scales, self.size).to(like.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        rows = rows.float() if rows.dtype == torch.float16 else rows
        found: torch.Tensor = torch.ops.block_products.multiply(rows, self.packed, self.scales, self.size)
        found = found if self.bias is None else found + self.bias
        return found.to(x.dtype).reshape(*x.shape[:-1], self.size)


IN_PART = "int4-part"
_NAMES = Annotated[
    list[Annotated[str, msgspec.Meta(pattern=r"^[\w.-]+$", max_length=512)]], msgspec.Meta(max_length=1 << 16)
]
"""Layers by their names in the model."""
_SHARE = 0.8
"""Of the limit on the divergence: texts that layers were chosen on flatter the choice, and others judge it."""
_MOST_TOKENS = 64
"""That are written after each prompt to choose by."""


@register
class Weights(Technique):
    name = "weights"
    order = 495
    title = "weights in few bits"
    default = "as-given"
    calibrated = frozenset({IN_PART})
    compiles = frozenset({"int8-blocks", "int4-blocks", IN_PART})
    learns = Learned("int4_layers", calibrated, _NAMES)
    remarks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        sorted(compiles),
        "Its kernel in C++ is compiled when it is first used on a machine, which needs a C++ compiler.",
    )

    def levels(self, facts: Facts) -> list[Level]:
        why_not = facts.no_text
        if facts.generates and not facts.is_module:
            why_not = "the model is not a module, so its weights are out of reach"
        elif facts.generates and facts.device != "cpu":
            why_not = "it is for CPUs: quantize has levels for a GPU"
        no_kernel = why_not or ("" if facts.has_block_products else "its kernel is for CPUs with AVX2 or AVX-512 VNNI")
        no_data = "" if facts.calibration_batches else "no prompts to choose layers by: give at least two"
        return [
            Level("as-given", "as given"),
            Level("int8", "linear layers in 8 bits, a scale for each output", why_not),
            Level("int8-dynamic", "the same, and each token that comes in rounded to 8 bits", why_not),
            Level(
                "int8-16", "weights in 8 bits, and each token that comes in rounded to 16, two numbers of 8", why_not
            ),
            Level("int4", "linear layers in 4 bits, a scale and a zero for 32 inputs; the head in 8", why_not),
            Level("int8-blocks", "linear layers and what comes in in 8 bits, a scale for 32 inputs each", no_kernel),
            Level("int4-blocks", "the same with weights in 4 bits, the head's in 8", no_kernel),
            Level(IN_PART, "the same with 4 bits in as many layers as the limit allows, else 8", no_kernel or no_data),
        ]

    def level_cost(self, level: str) -> int:
        return 2 if level == IN_PART else self.cost

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if recipe.levels.get("quantize", "none") != "none":
            return "quantize holds the weights in few bits already"
        if recipe.levels.get("runtime") == STATEFUL:
            if level not in STATEFUL_WEIGHTS:
                return f"OpenVINO has no such products: {', '.join(STATEFUL_WEIGHTS)}"
            return "" if "nncf" in facts.packages else "nncf is not installed: it is in the extra openvino"
        if recipe.levels.get("runtime", "torch") != "torch":
            return "its layers are torch's own"
        plain = facts.dtype == "float32" and recipe.levels.get("precision") != "bf16"
        if level in ("int8", "int4") and plain:
            return "torch's kernels for packed weights are slow in float32: needs precision=bf16"
        return ""

    def unpackaged(self, level: str, recipe: Recipe, facts: Facts) -> str:
        others = {**recipe.without(self.name, "grad").levels}
        if level in self.compiles and others in ({}, {"compile": "default"}):
            return ""
        beside = f"not beside {Recipe(others)}; " if level in self.compiles else ""
        able = ",".join([self.default, *sorted(self.compiles)])
        return (
            f"{beside}tune with `fettle tune TARGET --technique weights={able} --technique runtime=torch "
            "--technique compile=off`"
        )

    def bundles(self, facts: Facts) -> list[Bundle]:
        if not facts.generates:
            return []
        if facts.has_block_products:
            static = {"kv_cache": "static"} if facts.keeps == "static" else {}
            found = [Bundle(7, {"weights": "int8-blocks", **static})]
            compiled = [
                Bundle(place, {"weights": level, "kv_cache": "static-compiled"})
                for place, level in ((8, "int8-blocks"), (9, "int4-blocks"), (65, IN_PART))
            ]
            return [*found, *compiled] if static else found
        half = {"precision": "bf16"} if facts.dtype == "float32" else {}
        levels = {"int8-dynamic": 15, "int8-16": 20, "int8": 40, "int4": 50}
        found = [Bundle(place, {"weights": level, **half}) for level, place in levels.items()]
        if facts.keeps != "static":
            return found
        compiled = [
            Bundle(place + 10, {"weights": level, "kv_cache": "static-compiled", **half})
            for level, place in levels.items()
        ]
        return [*(Bundle(one.place, {**one.levels, "kv_cache": "static"}) for one in found[:2]), *compiled]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if recipe.levels.get("runtime") == STATEFUL:
            return Code()  # the runtime's own
        given = {
            "int8": "FewBits, 8", "int8-dynamic": "FewBits, 8, 1", "int8-16": "FewBits, 8, 2", "int4": "FewBits, 4",
            "int8-blocks": "InBlocks, 8", "int4-blocks": "InBlocks, 4", IN_PART: "InBlocks, 4, only=only",
        }[level]  # fmt: skip
        blocks = given.startswith("InBlocks")
        layers = (*BLOCK_PRODUCTS, InBlocks) if blocks else (FewBits,)
        helpers: tuple[Any, ...] = (is_conv1d, linear_of_conv1d, Unpacked, *layers, packable, few_bits)
        only: tuple[str, ...] = ()
        if level == IN_PART and (names := facts.learned.get("int4_layers")):
            listed = textwrap.wrap(", ".join(map(repr, names)), 110, break_long_words=False, break_on_hyphens=False)
            only = ("only = [", *(f"    {line}" for line in listed), "]")
        elif level == IN_PART:
            tokens, limit = min(facts.new_tokens, _MOST_TOKENS), round(_SHARE * facts.max_error, 6)
            helpers = (*helpers, spread, layer_groups, chosen_layers, four_bits_part)
            only = (f"only = four_bits_part(model, batches, InBlocks, {tokens}, {limit})",)
        if blocks and facts.fed_alike:
            helpers, only = (*FUSED, *helpers), (*only, *fused(facts))
        return Code(helpers=helpers, prepare=(*only, f"few_bits(model, {given})"))
