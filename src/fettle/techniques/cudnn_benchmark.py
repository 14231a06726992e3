"""cuDNN measures its convolution algorithms at the first call of each shape and keeps the fastest."""

from typing import ClassVar

from fettle.recipe import Recipe
from fettle.techniques._base import Code, Facts, Level, Technique


class CudnnBenchmark(Technique):
    name = "cudnn_benchmark"
    modes: ClassVar[frozenset[str]] = frozenset({"inference", "training"})
    title = "cuDNN benchmark"
    given = "off"

    def levels(self, facts: Facts) -> list[Level]:
        why_not = "" if facts.num_conv + facts.num_conv_transpose else "the model has no 2-D convolution"
        if facts.device != "cuda":
            why_not = "cuDNN runs on CUDA devices only"
        return [
            Level("off", "heuristics choose"),
            Level("on", "convolution algorithms are measured, once a shape", why_not),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level == "on" and recipe.levels.get("runtime", "torch") not in ("torch", "aoti"):
            return "another runtime chooses its own convolutions"
        return ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(setup=("torch.backends.cudnn.benchmark = True",))
