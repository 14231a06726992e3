"""Whether gradients are dropped after a step or filled with zeros."""

from fettle.techniques._base import TRAINING, Code, Facts, Level, Recipe, Technique, register


@register
class ZeroGrad(Technique):
    name = "zero_grad"
    order = 910
    modes = TRAINING
    rung = 9
    title = "zero_grad"
    default = "none"
    changes_memory = False

    def levels(self, facts: Facts) -> list[Level]:
        return [
            Level("none", "set_to_none=True, torch's default: the next backward pass writes instead of adding"),
            Level("zeros", "set_to_none=False: buffers stay where they are"),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        masters = recipe.levels.get("precision") == "bf16-master"
        return "gradients move to the float32 masters and are dropped there" if masters else ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(zero_grad="optimizer.zero_grad(set_to_none=False)")
