"""torch.compile, and what goes with it: frozen weights, dynamic or static shapes, repeated blocks only.

Everything is compiled in place (`nn.Module.compile`), so that a workload which calls `model.generate` or keeps
references to submodules runs the compiled code too. That compiles nothing where the forward is of torch's own class
(`nn.Sequential`, `nn.TransformerEncoderLayer`), which Dynamo passes over, and says nothing (torch 2.13): there the
module's forward is compiled.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fettle.techniques._base import BOTH, Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._catalogue import keeps_memory
from fettle.techniques._ranks import forward_of_torch, repeated_blocks
from fettle.techniques.precision import autocast, computes_in_bf16
from fettle.workload import map_tensors


def compile_blocks(model: torch.nn.Module, **options: Any) -> None:
    """Compile the repeated blocks of a model one by one. Those of a class share their code, which is compiled once."""
    blocks = repeated_blocks(model)
    for block in blocks:
        if forward_of_torch(block):
            block.forward = torch.compile(block.forward, **options)
        else:
            block.compile(**options)
    if not blocks:
        raise RuntimeError("regional compilation found no repeated blocks")


class During:
    """A context in which a setting of torch has another value. `config.patch` of torch 2.11 takes one thread only."""

    def __init__(self, config: Any, name: str, value: Any) -> None:
        self.config, self.name, self.value, self.before = config, name, value, getattr(config, name)

    def __enter__(self) -> None:
        setattr(self.config, self.name, self.value)

    def __exit__(self, *_: Any) -> None:
        setattr(self.config, self.name, self.before)


SCRIPTED = "the model is TorchScript, which torch.compile does not take"
FROZEN = {"compile": "default", "freeze": "on"}
# No option of the compile call: tracing asks for it too, and with the option alone the weights stay inputs of the graph
# (torch 2.13, torch._dynamo.utils.is_parameter_freezing). Nor for good: other models of the process would be frozen,
# too, and answer with the weights of their first call ever after.
FREEZING = ("from torch._inductor import config as inductor", 'frozen = During(inductor, "freezing", True)')


@register
class Compile(Technique):
    name = "compile"
    order = 610
    modes = BOTH
    title = "torch.compile"
    default = "off"
    of_module = True
    cost = 2
    compiles = frozenset({"default", "reduce-overhead", "max-autotune"})
    records = frozenset({"reduce-overhead", "max-autotune"})
    remarks: ClassVar[Mapping[str, str]] = dict.fromkeys(
        sorted(compiles),
        "Inputs of another shape are compiled when they first come, which takes about as long as the first start.",
    )

    def levels(self, facts: Facts) -> list[Level]:
        cannot = SCRIPTED if facts.is_scripted else ""
        no_graphs = "" if facts.device == "cuda" else "it means CUDA graphs, and the work is not on a CUDA device"
        return [
            Level("off", "eager, as given"),
            Level("default", "torch.compile, its defaults", cannot),
            Level("reduce-overhead", "CUDA graphs, so that a launch costs less", cannot or no_graphs),
            Level("max-autotune", "tries several kernels for each product and convolution", cannot),
        ]

    def level_cost(self, level: str) -> int:
        return 3 if level == "max-autotune" else 2

    def bundles(self, facts: Facts) -> list[Bundle]:
        if facts.mode == "training":
            masters = {"precision": "bf16-master", "compile": "default", **keeps_memory(facts)}
            compiled = Bundle(70, {**autocast(facts), "compile": "default"})
            return [Bundle(60, masters), compiled] if computes_in_bf16(facts) else [compiled]
        if facts.device == "cuda":
            alone = ("reduce-overhead", "max-autotune", "default")  # the second compiles for minutes
            found = [Bundle(place, {"compile": level}) for place, level in zip((10, 20, 30), alone, strict=True)]
            return [*found, Bundle(50, {"compile": "max-autotune", "freeze": "on"})]
        if not facts.has_bf16:
            return [Bundle(20, FROZEN)]
        return [
            Bundle(30, {"precision": "bf16", **FROZEN}),
            Bundle(90, {"precision": "autocast-bf16", **FROZEN}),
            Bundle(100, {"precision": "bf16", "compile": "max-autotune", "freeze": "on"}),
            Bundle(110, FROZEN),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        runtime = recipe.levels.get("runtime", "torch")
        return "" if runtime == "torch" else f"runtime={runtime} replaces the compiled model"

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        shapes, inductor = recipe.levels.get("shapes", "auto"), mode_options(level)
        if recipe.levels.get("quantize") == "int8-static":
            shapes = "static"  # for any size at once torch 2.13 cannot compile it, or its answers are wrong
        options = [] if shapes == "auto" else [f"dynamic={shapes == 'dynamic'}"]
        if inductor:  # a mode is a bundle of options, and torch takes one or the other
            options.append(f"options={inductor}")
        helpers: tuple[Any, ...] = ()
        if recipe.levels.get("region") == "blocks":
            helpers = (repeated_blocks, forward_of_torch, compile_blocks)
            line = f"compile_blocks({', '.join(['model', *options])})"
        elif not facts.is_module:
            line = f"model = torch.compile({', '.join(['model', *options])})"
        elif facts.forward_of_torch:
            line = f"model.forward = torch.compile({', '.join(['model.forward', *options])})"
        else:
            line = f"model.compile({', '.join(options)})"
        outputs: tuple[str, ...] = ()
        if inductor.get("triton.cudagraphs") and facts.device == "cuda" and facts.mode == "inference":
            helpers = (*helpers, map_tensors)
            outputs = ("output = map_tensors(torch.clone, output)  # the next call writes into the same memory",)
        if shapes != "static":
            return Code(helpers=helpers, prepare=(line,), outputs=outputs)
        many = 'many = During(torch._dynamo.config, "recompile_limit", 64)  # the ninth shape would be left uncompiled'
        helpers = (*helpers, During)
        return Code(helpers=helpers, setup=(many,), prepare=(line,), contexts=("many",), outputs=outputs)


def mode_options(level: str) -> dict[str, object]:
    """The inductor options that a mode of torch.compile stands for, as torch lists them."""
    return dict(torch._inductor.list_mode_options(level))


@register
class Freeze(Technique):
    name = "freeze"
    order = 620
    title = "frozen weights"
    default = "off"
    of_module = True
    needs: ClassVar[Mapping[str, str]] = {"compile": "default", "grad": "inference_mode"}
    cost = 2

    def levels(self, facts: Facts) -> list[Level]:
        why_not = SCRIPTED if facts.is_scripted else "" if facts.is_module else "the model is a plain callable"
        return [Level("off", "as given"), Level("on", "weights become constants of the compiled graph", why_not)]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if recipe.levels.get("compile", "off") == "off" and recipe.levels.get("runtime") != "aoti":
            return "freezing happens inside a compile: needs compile"
        if recipe.levels.get("grad", "grad") == "grad":
            return "frozen weights have no gradients: needs grad=inference_mode or no_grad"
        return ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(helpers=(During,), setup=FREEZING, contexts=("frozen",))


class _Within(Technique):
    """A setting of the compile call: its lines are `Compile.code`'s."""

    modes = BOTH
    of_module = True
    needs: ClassVar[Mapping[str, str]] = {"compile": "default"}
    cost = 2

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        return "needs compile" if recipe.levels.get("compile", "off") == "off" else ""


@register
class Shapes(_Within):
    name = "shapes"
    order = 630
    title = "compiled shapes"
    default = "auto"

    def levels(self, facts: Facts) -> list[Level]:
        one = "the batches all have one shape" if facts.num_input_shapes == 1 and not facts.custom_call else ""
        one = SCRIPTED if facts.is_scripted else one
        return [
            Level("auto", "static first, dynamic once a second shape comes"),
            Level("static", "one compiled graph for each shape", one),
            Level("dynamic", "one compiled graph for all shapes", one),
        ]

    def why_not(self, level: str, facts: Facts) -> str:
        return "" if level in self.every_level() else super().why_not(level, facts)  # of one shape merely pointless


@register
class Region(_Within):
    name = "region"
    order = 640
    title = "compiled region"
    default = "whole"

    def levels(self, facts: Facts) -> list[Level]:
        why_not = SCRIPTED if facts.is_scripted else "" if facts.block_classes else "the model has no repeated block"
        return [
            Level("whole", "the whole model"),
            Level("blocks", "each repeated block by itself: compiles sooner, survives graph breaks outside", why_not),
        ]

    def bundles(self, facts: Facts) -> list[Bundle]:
        if facts.mode == "inference" or not facts.block_classes:
            return []
        return [Bundle(100, {**autocast(facts), "compile": "default", "region": "blocks"})]
