"""cuDNN measures its convolution algorithms at the first call of each shape and keeps the fastest."""

from fettle.techniques._base import BOTH, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques.runtime import computes_in_torch


@register
class CudnnBenchmark(Technique):
    name = "cudnn_benchmark"
    order = 310
    modes = BOTH
    title = "cuDNN benchmark"
    default = "off"

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.convolves else "the model has no convolution"
        if facts.device != "cuda":
            why_not = "cuDNN runs on CUDA devices only"
        return [
            Level("off", "heuristics choose"),
            Level("on", "convolution algorithms are measured, once a shape", why_not),
        ]

    def usual(self, facts: Facts) -> str:
        return "on" if facts.device == "cuda" and facts.convolves else self.default

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        return "" if computes_in_torch(recipe) else "another runtime chooses its own convolutions"

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(setup=("torch.backends.cudnn.benchmark = True",))
