"""How the optimizer goes over the parameters: one by one, in groups of tensors, or in one fused kernel."""

from typing import ClassVar

import torch

from fettle.recipe import Recipe
from fettle.techniques._base import Code, Facts, Level, Technique


def implement(optimizer: torch.optim.Optimizer, *, foreach: bool, fused: bool) -> None:
    """Choose an optimizer's implementation before its first step."""
    for group in [optimizer.defaults, *optimizer.param_groups]:
        group["foreach"] = foreach
        if "fused" in group:
            group["fused"] = fused
    if fused:  # what the constructor sets: fused steps unscale the gradients of a GradScaler themselves
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]


class OptimizerKind(Technique):
    name = "optimizer"
    modes: ClassVar[frozenset[str]] = frozenset({"training"})
    rung = 6
    title = "optimizer implementation"
    given = "as-given"

    def levels(self, facts: Facts) -> list[Level]:
        def lacks(name: str) -> str:
            return "" if name in facts.optimizer_levels else f"{facts.optimizer or 'the optimizer'} has no {name}"

        return [
            Level("as-given", "as the factory makes it"),
            Level("fused", "one kernel for all of the update", lacks("fused")),
            Level("foreach", "each operation on all parameters at once", lacks("foreach")),
            Level("for-loop", "one parameter after the other: least memory", lacks("foreach")),
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        line = f"implement(optimizer, foreach={level == 'foreach'}, fused={level == 'fused'})"
        return Code(helpers=(implement,), optimizer=(line,))
