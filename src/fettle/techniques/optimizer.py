"""How the optimizer goes over the parameters: one by one, in groups of tensors, in one fused kernel, or compiled.

An update is bound by memory. Compiled, it goes over it less often, and rounds float32 masters to weights as it does.
"""

from typing import Any

import torch

from fettle.techniques._base import TRAINING, Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._catalogue import keeps_memory
from fettle.techniques.convolution import products


def implement(optimizer: torch.optim.Optimizer, *, foreach: bool, fused: bool) -> None:
    """Choose an optimizer's implementation before its first step."""
    for group in [optimizer.defaults, *optimizer.param_groups]:
        group["foreach"] = foreach
        if "fused" in group:
            group["fused"] = fused
    if "fused" in optimizer.defaults:  # what the constructor sets: fused steps alone unscale a GradScaler's gradients
        optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
        optimizer._need_device_dtype_check_for_fused = fused  # type: ignore[attr-defined]


def compile_update(optimizer: Any, weights: Any = (), masters: Any = ()) -> None:
    """Compile an optimizer's step; with 16-bit `weights` of float32 `masters`, the rounding to them, too.

    The optimizer's hooks stay outside of what is compiled. The first step makes the optimizer's state and is not
    compiled. A learning rate that is a number becomes part of the compiled code: one that changes must be a tensor.
    """
    import inspect
    import types

    plain = inspect.unwrap(type(optimizer).step)  # its wrappers call the hooks and break the graph, for no_grad

    def update() -> None:
        plain(optimizer)
        for weight, master in zip(weights, masters, strict=True):
            weight.copy_(master)

    compiled, has_state = torch.compile(update), False  # which not every optimizer shows: plain SGD needs none

    def step(_: Any) -> None:
        nonlocal has_state
        for weight, master in zip(weights, masters, strict=True):  # inside, torch.compile would end its graph here
            master.grad = None if weight.grad is None else weight.grad.to(master.dtype)
        with torch.no_grad():
            (compiled if has_state else update)()
        has_state = True
        for master in masters:
            master.grad = None

    optimizer.step = types.MethodType(torch.optim.Optimizer.profile_hook_step(step), optimizer)


@register
class OptimizerKind(Technique):
    name = "optimizer"
    order = 700
    modes = TRAINING
    rung = 6
    title = "optimizer implementation"
    default = "as-given"
    changes_memory = False
    compiles = frozenset({"compiled"})

    def levels(self, facts: Facts) -> list[Level]:
        def lacks(name: str) -> str:
            return "" if name in facts.optimizer_levels else f"{facts.optimizer or 'the optimizer'} has no {name}"

        return [
            Level("as-given", "as the factory makes it"),
            Level("fused", "one kernel for all of the update", lacks("fused")),
            Level("foreach", "each operation on all parameters at once", lacks("foreach")),
            Level("compiled", "the update by torch.compile, the rounding of float32 masters in it", lacks("foreach")),
            Level("for-loop", "one parameter after the other: least memory", lacks("foreach")),
        ]

    def level_cost(self, level: str) -> int:
        return 2 if level == "compiled" else 1

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level != "compiled":
            return ""
        if recipe.levels.get("parallel", "single") != "single":
            return "shards and buckets of a parallel strategy are not compiled with the update"
        if recipe.levels.get("precision") == "autocast-fp16":
            return "a GradScaler leaves steps out, which a compiled update cannot"
        return ""

    def usual(self, facts: Facts) -> str:
        return "fused" if "fused" in facts.optimizer_levels else self.default

    def bundles(self, facts: Facts) -> list[Bundle]:
        masters = {"precision": "bf16-master", "optimizer": "compiled"}
        by_products = products(facts)
        return [Bundle(40, {**masters, **by_products, **keeps_memory(facts)})] if by_products else []

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if level == "compiled":
            masters = ", weights, parameters" if recipe.levels.get("precision") == "bf16-master" else ""
            lines = ("implement(optimizer, foreach=True, fused=False)", f"compile_update(optimizer{masters})")
            return Code(helpers=(implement, compile_update), optimizer=lines)
        line = f"implement(optimizer, foreach={level == 'foreach'}, fused={level == 'fused'})"
        return Code(helpers=(implement,), optimizer=(line,))
