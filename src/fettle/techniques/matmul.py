"""Precision of float32 products inside the libraries. On a CPU, medium means bfloat16 inside oneDNN, which converts on
its way through: no cast is an operation of its own, and weights and activations stay float32. On a GPU torch takes both
levels for TF32."""

from fettle.techniques._base import BOTH, Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques.precision import computes_in_bf16
from fettle.techniques.runtime import computes_in_torch


@register
class Matmul(Technique):
    name = "matmul"
    order = 300
    modes = BOTH
    title = "precision inside float32 products"
    default = "highest"
    changes_memory = False

    def levels(self, facts: Facts) -> list[Level]:
        why_not = ""
        if facts.dtype != "float32":
            why_not = f"the weights are {facts.dtype}, so no float32 product is made"
        elif facts.not_nvidia:
            why_not = facts.not_nvidia
        elif facts.device == "cuda" and facts.cuda_capability < (8, 0):
            why_not = "TF32 needs compute capability 8.0"
        elif not computes_in_bf16(facts):
            why_not = "this CPU has no bfloat16 instructions"
        high = "TF32 on a GPU has it" if facts.device == "cpu" else ""
        medium = "TF32, as high," if facts.device == "cuda" else "bfloat16"
        return [
            Level("highest", "as given"),
            Level("medium", f"{medium} inside float32 products", why_not),
            Level("high", "TF32 inside float32 products", why_not or high),
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        precision = recipe.levels.get("precision", "")
        if precision in ("bf16", "fp16"):
            return f"precision={precision} leaves no float32 product"
        return "" if computes_in_torch(recipe) else "another runtime does not read torch's settings"

    def bundles(self, facts: Facts) -> list[Bundle]:
        if facts.mode == "inference" or not computes_in_bf16(facts):
            return []
        return [Bundle(80, {"matmul": "medium", "compile": "default"}), Bundle(90, {"matmul": "medium"})]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        setting = f'torch.set_float32_matmul_precision("{level}")'
        if facts.device == "cpu" and facts.convolves:  # the setting above is of matrix products alone there
            return Code(setup=(setting, 'torch.backends.mkldnn.conv.fp32_precision = "bf16"'))
        return Code(setup=(setting,))
