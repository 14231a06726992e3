"""Whether autograd records the forward pass."""

from fettle.techniques._base import Code, Facts, Level, Recipe, Technique, register


@register
class Grad(Technique):
    name = "grad"
    order = 330
    rung = 1
    title = "no autograd"
    default = "grad"

    def levels(self, facts: Facts) -> list[Level]:
        return [
            Level("grad", "autograd as the caller has it"),
            Level("inference_mode", "torch.inference_mode(): no graph, no version counters"),
            Level("no_grad", "torch.no_grad(): no graph; outputs may be used in autograd later"),
        ]

    def usual(self, facts: Facts) -> str:
        return "inference_mode"

    def is_idle(self, recipe: Recipe) -> bool:
        # These two record nothing. What TensorRT leaves to torch is still recorded.
        return recipe.levels.get("runtime", "torch").startswith(("openvino", "onnxruntime"))

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(contexts=(f"torch.{level}()",))
