"""Convolutions with the channels innermost in memory."""

from typing import Any

import torch

from fettle.techniques._base import BOTH, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques.runtime import computes_in_torch
from fettle.workload import map_tensors


def channels_last(tree: Any) -> Any:
    """Lay out every floating 4-D tensor of a tree with the channels innermost."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        wanted = tensor.dim() == 4 and tensor.is_floating_point()
        return tensor.contiguous(memory_format=torch.channels_last) if wanted else tensor

    return map_tensors(change, tree)


@register
class ChannelsLast(Technique):
    name = "channels_last"
    order = 510
    modes = BOTH
    rung = 3
    title = "channels last"
    default = "off"
    of_module = True

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if not facts.is_module:
            why_not = "the model is a plain callable"
        elif facts.num_conv == 0:
            why_not = "the model has no 2-D convolution"
        elif facts.num_4d_inputs and facts.mode == "inference":
            why_not = facts.no_copies
        return [Level("off", "as given"), Level("on", "torch.channels_last for weights and 4-D inputs", why_not)]

    def usual(self, facts: Facts) -> str:
        return "on" if facts.num_conv else self.default

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        return "" if computes_in_torch(recipe) else "another runtime chooses its own layout"

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        # `model.to(memory_format=...)` raises where a 3-D convolution has weights beside these.
        prepare, helpers = ["model._apply(channels_last)"], (map_tensors, channels_last)
        if facts.mode == "training":
            if recipe.levels.get("precision") == "bf16-master":  # else each step copies from one layout to the other
                prepare += ["for master in parameters:", "    master.data = channels_last(master.data)"]
            batch = ("batch = channels_last(batch)",) if facts.num_4d_inputs else ()
            return Code(helpers=helpers, prepare=tuple(prepare), batch=batch)
        inputs = ("args, kwargs = channels_last(args), channels_last(kwargs)",) if facts.num_4d_inputs else ()
        return Code(helpers=helpers, prepare=tuple(prepare), inputs=inputs)
