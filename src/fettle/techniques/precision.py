"""Arithmetic in 16 bits: autocast keeps float32 weights, the plain levels convert them."""

from dataclasses import replace
from typing import Any

import torch

from fettle.techniques._base import BOTH, Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._catalogue import keeps_memory
from fettle.techniques.convolution import products
from fettle.workload import map_tensors

DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Convert every floating tensor in a tree but those in float64, such as times, whose digits are needed."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return map_tensors(change, tree)


def widen(tree: Any, dtype: torch.dtype) -> Any:
    """Convert every tensor of `dtype` in a tree to float32."""
    return map_tensors(lambda tensor: tensor.float() if tensor.dtype == dtype else tensor, tree)


def gradients_to_masters(weights: list[torch.nn.Parameter], masters: list[torch.nn.Parameter]) -> None:
    """Hand the gradients of 16-bit weights to their float32 masters, and forget them."""
    for weight, master in zip(weights, masters, strict=True):
        # In the master's own layout: a fused optimizer walks through memory and ignores strides.
        master.grad = None if weight.grad is None else torch.empty_like(master).copy_(weight.grad)
        weight.grad = None


@torch.no_grad()
def masters_to_weights(masters: list[torch.nn.Parameter], weights: list[torch.nn.Parameter]) -> None:
    """Round the float32 masters to the 16-bit weights that the model computes with."""
    for weight, master in zip(weights, masters, strict=True):
        weight.copy_(master)


def to_dtype(model: Any, dtype: torch.dtype) -> None:
    """Convert a model's floating tensors. Complex ones, which `model.to` would make real, stay what they are."""
    if any(tensor.is_complex() for tensor in (*model.parameters(), *model.buffers())):
        model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    else:
        model.to(dtype)


def to_16_bits(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert a model's weights; norms with running averages stay in float32, for these change by small amounts."""
    norms = [module for module in model.modules() if isinstance(module, torch.nn.modules.batchnorm._NormBase)]
    before = [tensor.detach().clone() for norm in norms for tensor in (*norm.parameters(), *norm.buffers())]
    # Weights made in inference mode are converted in it only, and torchao's, made outside, only outside.
    with torch.inference_mode(any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers()))):
        to_dtype(model, dtype)
        for norm in norms:
            norm.float()
        kept = (tensor for norm in norms for tensor in (*norm.parameters(), *norm.buffers()))
        for tensor, value in zip(kept, before, strict=True):
            tensor.data.copy_(value)


def computes_in_bf16(facts: Facts) -> bool:
    """Whether bfloat16 is arithmetic here, and not emulated."""
    return facts.has_bf16 if facts.device == "cpu" else not (0, 0) < facts.cuda_capability < (8, 0)


def no_bf16(facts: Facts) -> str:
    """Why bfloat16 cannot be used here; empty where it can. A CPU without it can, slowly."""
    works = facts.device == "cpu" or computes_in_bf16(facts)
    return "" if works else "bfloat16 needs compute capability 8.0"


def _mixed(dtype: str, facts: Facts) -> str:
    """Why outputs could not all have their own type again under `dtype`; empty where they can."""
    others = [kind for kind in facts.output_types if kind != dtype]
    mixed = others and dtype in facts.output_types
    return f"some outputs are {dtype} as given and some {others[0]}: which is which would be lost" if mixed else ""


def autocast(facts: Facts) -> dict[str, str]:
    """The level that is fastest for its care in training, where it is fast at all and weights are not 16 bits yet."""
    if facts.dtype != "float32":
        return {}
    if computes_in_bf16(facts):
        return {"precision": "autocast-bf16"}
    return {} if facts.device == "cpu" else {"precision": "autocast-fp16"}


@register
class Precision(Technique):
    name = "precision"
    order = 500
    modes = BOTH
    rung = 2
    title = "16-bit precision"
    shrinks_states = frozenset({"bf16-master"})
    default = "fp32"
    of_module = True

    def levels(self, facts: Facts) -> list[Level]:
        whole = "" if facts.is_module else "the model is a plain callable, its weights are out of reach"
        whole = whole or facts.not_in_16_bits
        given = "" if facts.dtype == "float32" else f"the weights are {facts.dtype}, not float32"
        bf16 = no_bf16(facts) or _mixed("bfloat16", facts)
        fp16 = "" if facts.device != "cpu" or "avx512_fp16" in facts.cpu_flags else "this CPU has no float16 arithmetic"
        fp16 = fp16 or _mixed("float16", facts)
        other = "" if facts.mode == "inference" else "small updates are lost without float32 weights: see bf16-master"
        masters = "" if facts.mode == "training" else "it is for training"
        if not facts.groups_masters:
            masters = "the optimizer factory does not make the same groups of other parameters that it is given"
        elif facts.moving:
            masters = f"a step changes {facts.moving}, and bfloat16 would lose small changes"
        masters = masters or facts.not_in_16_bits
        copies = facts.no_copies
        return [
            Level("fp32", "as given"),
            Level("bf16", "weights and activations in bfloat16", given or whole or bf16 or other or copies),
            Level("autocast-bf16", "float32 weights, bfloat16 where autocast thinks it safe", given or bf16),
            Level("fp16", "weights and activations in float16", given or whole or fp16 or other or copies),
            Level("autocast-fp16", "float32 weights, float16 where autocast thinks it safe", given or fp16),
            Level(
                "bf16-master", "weights in bfloat16, the optimizer on float32 masters of them", given or bf16 or masters
            ),
        ]

    def is_met(self, level: str, facts: Facts) -> bool:
        return DTYPES.get(level) == f"torch.{facts.dtype}"

    def usual(self, facts: Facts) -> str:
        if facts.mode == "training" or facts.device != "cuda" or facts.dtype != "float32":
            return self.default
        return "bf16" if computes_in_bf16(facts) else "fp16"

    def bundles(self, facts: Facts) -> list[Bundle]:
        if facts.mode == "training":
            return self._training(facts)
        if facts.device == "cuda":
            return [Bundle(80, {})]
        return [Bundle(80, {"precision": "bf16"})] if facts.has_bf16 else [Bundle(60, {})]

    def _training(self, facts: Facts) -> list[Bundle]:
        found = [Bundle(10, autocast(facts)), Bundle(110, {})]
        if computes_in_bf16(facts):
            masters = {"precision": "bf16-master", **products(facts)}
            found.append(Bundle(50, {"precision": "bf16-master"}))
            if facts.device == "cpu":
                math = {"sdpa_backend": "math"} if facts.uses_sdpa else {}
                found += [Bundle(20, {**masters, **keeps_memory(facts)}), Bundle(30, {**masters, **math})]
        return found

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        dtype = DTYPES[level.removeprefix("autocast-").removesuffix("-master")]
        if level == "bf16-master":
            prepare = (
                "weights, parameters = parameters, [torch.nn.Parameter(w.detach().clone()) for w in parameters]",
                f"to_16_bits(model, {dtype})",
            )
            common = (map_tensors, cast, to_dtype, to_16_bits)
            masters = Code(
                helpers=(*common, gradients_to_masters, masters_to_weights),
                prepare=prepare,
                batch=(f"batch = cast(batch, {dtype})",),
                before_step=("gradients_to_masters(weights, parameters)",),
                after_step=("masters_to_weights(parameters, weights)",),
            )
            if recipe.levels.get("optimizer") != "compiled":
                return masters
            # The compiled update copies between weights and masters itself.
            forget = ("for weight in weights:", "    weight.grad = None")
            return replace(masters, helpers=common, before_step=(), after_step=forget, clipped="weights")
        if level == "autocast-fp16" and facts.mode == "training":
            # Small gradients are zero in float16: the loss is scaled up, and the gradients down again.
            return Code(
                contexts=(f'torch.autocast("{facts.device}", dtype={dtype})',),
                optimizer=(f'scaler = torch.amp.GradScaler("{facts.device}")',),
                backward="scaler.scale(value).backward()",
                before_step=("scaler.unscale_(optimizer)",) if facts.max_grad_norm is not None else (),
                step=("scaler.step(optimizer)", "scaler.update()"),
            )
        code = Code()
        if dtype.removeprefix("torch.") not in facts.output_types and facts.mode == "inference":
            widened = (
                f"output = widen(output, {dtype})  # copies what is {dtype}: the caller sees the type it always saw"
            )
            code = Code(helpers=(map_tensors, widen), outputs=(widened,))
        if level.startswith("autocast-"):
            return replace(code, contexts=(f'torch.autocast("{facts.device}", dtype={dtype})',))
        return replace(
            code,
            helpers=(*code.helpers, map_tensors, cast, to_dtype),
            prepare=(f"to_dtype(model, {dtype})",),
            inputs=(f"args, kwargs = cast(args, {dtype}), cast(kwargs, {dtype})",),
        )
