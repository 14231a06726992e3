"""Weights, and activations too, in 8 bits."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._exported import flatten
from fettle.techniques._linear import is_conv1d, linear_of_conv1d
from fettle.techniques._state_kept import STATE_KEPT, state_kept
from fettle.techniques.compile import FROZEN, SCRIPTED
from fettle.techniques.precision import DTYPES, cast
from fettle.techniques.runtime import AS_GIVEN
from fettle.workload import map_tensors, spread


def rows_of_linear(model: torch.nn.Module, batches: Any) -> dict[torch.nn.Module, int]:
    """The fewest rows, of all that a linear layer is given at once, over the batches."""
    import contextlib

    rows: dict[torch.nn.Module, int] = {}

    def count(layer: torch.nn.Module, args: Any) -> None:
        rows[layer] = min(rows.get(layer, 1 << 62), args[0].numel() // max(1, args[0].shape[-1]))

    with contextlib.ExitStack() as hooks, torch.no_grad(), state_kept(model):
        for layer in model.modules():
            if isinstance(layer, torch.nn.Linear):
                hooks.enter_context(layer.register_forward_pre_hook(count))
        for batch in batches:
            args, kwargs = spread(batch)
            model(*args, **kwargs)
    return rows


def quantize_linear(model: torch.nn.Module, config: str, label: str, batches: Any = ()) -> None:
    """Quantise the linear layers with a config of torchao, given by name; an error when none could be. Those that are
    given 16 rows or fewer in a batch stay as they are, which CUDA's int8 product does not take; and so do those of
    128 x 128 in float8, which torchao takes for weights that are scaled in blocks of that size, and those whose weight
    is computed (weight_norm) or quantised already, where a layer has two names."""
    import logging

    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of CUDA extensions that are not needed here
    from torchao import quantization

    cls = getattr(quantization, config)
    # By default a config also flips compiler flags of the whole process; those are not part of quantising.
    fields = getattr(cls, "__dataclass_fields__", {})
    made = cls(**({"set_inductor_config": False} if "set_inductor_config" in fields else {}))
    linear_of_conv1d(model)
    linear = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    kinds = [type(layer.weight.data) for layer in linear]
    rows = rows_of_linear(model, batches)

    def takes(layer: torch.nn.Module, _: str) -> bool:
        if not isinstance(layer, torch.nn.Linear) or rows.get(layer, 17) <= 16:
            return False
        if type(layer.weight) is not torch.nn.Parameter:
            return False
        return not (config.startswith("Float8") and layer.weight.shape == (128, 128))

    quantization.quantize_(model, made, takes)
    done = sum(type(layer.weight.data) is not kind for layer, kind in zip(linear, kinds, strict=True))
    if done == 0:
        raise RuntimeError(f"{label}: 0 of {len(linear)} layers matched")
    logging.getLogger("optimized").info("%s: %d of %d linear layers", label, done, len(linear))


def open_sizes(model: torch.nn.Module, batches: Any) -> Any:
    """For torch.export: rows, and sizes that differ among the batches, are left open where the model takes others."""
    import inspect

    from torch.utils import _pytree as pytree

    takes = inspect.signature(model.forward)
    given = [takes.bind(*args, **kwargs).arguments for args, kwargs in map(spread, batches)]
    leaves, specs = zip(*(flatten(dict(arguments)) for arguments in given), strict=True)

    def sizes(*each: Any) -> Any:
        if not all(isinstance(one, torch.Tensor) for one in each):
            return None
        differ = [dim for dim in range(each[0].dim()) if dim == 0 or len({one.shape[dim] for one in each}) > 1]
        return dict.fromkeys(differ, torch.export.Dim.AUTO)

    return pytree.tree_unflatten([sizes(*each) for each in zip(*leaves, strict=True)], specs[0])


def with_names(model: torch.nn.Module, kwargs: Any) -> torch.nn.Module:
    """A model with a name for each of these arguments, where it takes any: with ``**others`` torch 2.13 exports no
    sizes that are left open."""
    import inspect

    takes = inspect.signature(model.forward)
    own = [one for one in takes.parameters.values() if one.kind is not one.VAR_KEYWORD]
    if len(own) == len(takes.parameters):
        return model

    def forward(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    others = [name for name in kwargs if name not in takes.parameters]
    own += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in others]
    named: Any = torch.nn.Module()
    named.model, named.training, named.forward = model, model.training, forward
    forward.__signature__ = takes.replace(parameters=own)  # type: ignore[attr-defined]
    return named  # type: ignore[no-any-return]


def quantize_static(model: torch.nn.Module, batches: Any) -> Any:
    """Convolutions and linear layers in int8 with scales measured on `batches`, exported for the x86 compiler."""
    import inspect

    args, kwargs = spread(batches[0])
    named = with_names(model, kwargs)
    takes = inspect.signature(named.forward).parameters
    names = [name for name, one in takes.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    was_none = {name: value is None for name, value in (*zip(names, args, strict=False), *kwargs.items())}

    def refuse_others(_: Any, args: Any, kwargs: Any) -> None:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if (value is None) != was_none.get(
                name, name in takes or value is None
            ):  # the exported model ignores those
                raise RuntimeError(f"int8: {name} must be None where it was in the sample batches, and only there")

    try:
        with torch.no_grad():
            try:
                exported = torch.export.export(named, args, kwargs, dynamic_shapes=open_sizes(named, batches))
            except Exception:
                shapes: Any = torch.export.AdditionalInputs()  # type: ignore[no-untyped-call] # what differs, no more
                for batch in batches:
                    shapes.add(*spread(batch))
                exported = torch.export.export(named, args, kwargs, dynamic_shapes=shapes)
        made = quantize_exported(exported.module(), batches)
        made.register_forward_pre_hook(refuse_others, with_kwargs=True)
        return made
    except Exception as error:
        if not any(said in str(error) for said in ("Constraints violated", "Guard failed")):
            raise
        steps = ", ".join(name for name, layer in model.named_modules() if isinstance(layer, torch.nn.RNNBase))
        which = f"the model with its recurrent layers ({steps})" if steps else "the model"
        raise RuntimeError(f"int8: exported, {which} takes inputs of one size, and the batches differ") from error


def writes_over_inputs(model: Any) -> bool:
    """Whether torch's compiler may add into the floating tensors that an int8 model is given: torch 2.13 adds what a
    linear layer gives to the other term in place, and does not look whether that is the caller's own."""
    users = [user for node in model.graph.nodes if node.op == "placeholder" for user in node.users]
    computed = [user for user in users if isinstance(user.meta.get("val"), torch.Tensor)]  # neither sizes nor guards
    return any("quantize" not in str(user.target) for user in computed)


def copied(tree: Any) -> Any:
    """The same with copies of its floating tensors."""
    return map_tensors(lambda tensor: tensor.clone() if tensor.is_floating_point() else tensor, tree)


def quantize_exported(exported: Any, batches: Any) -> Any:
    """The module of an exported program with its convolutions and linear layers in int8, scales from `batches`."""
    import logging

    logging.getLogger("torchao").setLevel(logging.ERROR)  # as above
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    with torch.no_grad():
        quantizer = x86.X86InductorQuantizer()
        quantizer.set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(exported, quantizer)
        for batch in batches:
            args, kwargs = spread(batch)
            prepared(*args, **kwargs)
        converted = convert_pt2e(prepared)
    move_exported_model_to_eval(converted)
    aten = torch.ops.aten
    heavy = {aten.conv1d.default, aten.conv2d.default, aten.conv2d.padding, aten.conv3d.default,
             aten.linear.default}  # fmt: skip
    layers = [node for node in converted.graph.nodes if node.target in heavy]
    done = sum("dequantize" in str(node.args[0]) for node in layers)
    if done == 0:
        raise RuntimeError(f"int8: 0 of {len(layers)} layers matched")
    logging.getLogger("optimized").info("int8: %d of %d convolutions and linear layers", done, len(layers))
    return converted


_FLOAT8 = ("gfx94", "gfx95")
"""AMD's architectures on which torchao multiplies in float8."""
_CONFIGS = {
    "int8-weight": "Int8WeightOnlyConfig",
    "int8-dynamic": "Int8DynamicActivationInt8WeightConfig",
    "float8-dynamic": "Float8DynamicActivationFloat8WeightConfig",
}


@register
class Quantize(Technique):
    name = "quantize"
    order = 530
    title = "quantisation"
    default = "none"
    of_module = True
    needs: ClassVar[Mapping[str, str]] = {"compile": "default", "grad": "inference_mode"}
    cost = 2
    packages = ("torchao",)
    calibrated = frozenset({"int8-static"})
    remarks: ClassVar[Mapping[str, str]] = {
        "int8-static": "Its model is exported, and takes sizes that no sample batch has only as the number of rows, if "
        "that is more than one in them, and where they differ."
    }

    def levels(self, facts: Facts) -> list[Level]:
        cannot = "" if facts.is_module else "the model is a plain callable"
        cannot = cannot or SCRIPTED * facts.is_scripted
        cannot = cannot or ("" if "torchao" in facts.packages else "torchao is not installed: it is in the extra quant")
        cannot = cannot or "torchao takes no weights in float64" * (facts.dtype == "float64")
        linear = "" if facts.num_linear else "the model has no linear layer"
        has_float8 = facts.cuda_capability >= (8, 9) or facts.amd.startswith(_FLOAT8)
        float8 = "" if has_float8 else "float8 needs a GPU of compute capability 8.9, or AMD's MI300 or later"
        return [
            Level("none", "as given"),
            Level("int8-dynamic", "linear layers: int8 weights, activations scaled at run time", cannot or linear),
            Level("int8-static", "all layers in int8, scales from sample data", cannot or _static(facts)),
            Level("int8-weight", "linear layers: int8 weights only", cannot or linear),
            Level("float8-dynamic", "linear layers in float8", cannot or linear or float8),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        compiled = recipe.levels.get("compile", "off") != "off" or recipe.levels.get("runtime") == "aoti"
        precision = recipe.levels.get("precision", "fp32")
        if not compiled:
            return "eager int8 is slower than float32: needs compile"
        if level == "int8-static":
            if recipe.levels.get("freeze", "off") == "off":
                return "int8 weights are packed when they are frozen: needs freeze=on"
            if precision in ("bf16", "fp16"):
                return f"the layers left in floating point go by autocast, not precision={precision}"
            if recipe.levels.get("region", "whole") == "blocks":
                return "the exported model is one graph, without blocks"
            if recipe.levels.get("shapes", "auto") == "dynamic":
                return "it is compiled for each shape by itself: needs shapes=static or auto"
        return ""

    def unpackaged(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level == "int8-static":
            return self.conflict(level, recipe, facts)
        instead = f"{self.tune_without('int8-static')}, or {self.name}={self.default}"
        return f"it replaces the model's own layers, and an exported model has none. {instead}"

    def bundles(self, facts: Facts) -> list[Bundle]:
        if facts.device == "cuda":
            return [Bundle(60, {"compile": "max-autotune", "quantize": "float8-dynamic"})]
        if facts.generates and facts.has_block_products:
            return []  # the technique weights has faster ones
        dynamic = {**FROZEN, "quantize": "int8-dynamic"}
        # On a CPU that emulates bfloat16 this comes sooner than what computes in it, and once more in float32. One
        # without AVX-512 takes twenty times as long for it as for float32 (bench/atlas).
        found = [] if facts.has_bf16 else [Bundle(80, {**dynamic, **AS_GIVEN})]
        place = 70 if facts.has_bf16 else 30
        if facts.num_conv > facts.num_linear:
            found.append(Bundle(place, {**FROZEN, "quantize": "int8-static", "attention": "as-is"}))
        elif facts.num_linear > 8 and {"avx2", "avx512f"} & set(facts.cpu_flags) != {"avx2"}:
            found.append(Bundle(place, {**dynamic, "precision": "bf16"}))
        return found

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        helpers: tuple[Any, ...]
        if level == "int8-static":
            helpers = (map_tensors, spread, flatten, with_names, open_sizes, quantize_static, quantize_exported)
            return Code(
                helpers=(*helpers, writes_over_inputs, copied),
                prepare=("model = quantize_static(model, batches)", "writes_over = writes_over_inputs(model)"),
                inputs=("if writes_over:", "    args, kwargs = copied(args), copied(kwargs)"),
            )
        helpers = (spread, is_conv1d, linear_of_conv1d, *STATE_KEPT, rows_of_linear, quantize_linear)
        seen, dtype = "", DTYPES.get(recipe.levels.get("precision", "fp32"))
        if facts.device == "cuda" and level == "int8-dynamic" and not facts.custom_call:
            seen = f", cast(batches, {dtype})" if dtype else ", batches"
            helpers = (map_tensors, cast, *helpers) if dtype else helpers
        return Code(helpers=helpers, prepare=(f'quantize_linear(model, "{_CONFIGS[level]}", "{level}"{seen})',))


def _static(facts: Facts) -> str:
    if facts.device != "cpu" or not {"avx2", "avx512f"} & set(facts.cpu_flags):
        return "it is made for x86 CPUs"
    if facts.custom_call:
        return "the workload has a call of its own, and an exported model has only its forward"
    if facts.changes_buffers:
        return "the model changes its own buffers when it is called, and calibrating calls it"
    if facts.uneven_steps:
        return "exported, its recurrent layers take inputs of one size, and the batches differ"
    if not facts.num_linear + facts.num_conv:
        return "the model has no convolution or linear layer"
    return facts.uncalibrated or facts.not_exported
