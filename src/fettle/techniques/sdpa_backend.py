"""Which kernel scaled_dot_product_attention runs. Left alone, torch picks by its own order of preference.

It need not be the fastest: on a CPU the backward pass of flash attention in bfloat16 takes longer than in float32.
"""

from fettle.techniques._base import BOTH, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques.runtime import computes_in_torch

_BACKENDS = {
    "flash": ("FLASH_ATTENTION", "flash attention"),
    "cudnn": ("CUDNN_ATTENTION", "cuDNN attention"),
    "efficient": ("EFFICIENT_ATTENTION", "memory-efficient attention"),
    "math": ("MATH", "plain products and a softmax"),
}


@register
class SdpaBackend(Technique):
    name = "sdpa_backend"
    order = 410
    modes = BOTH
    title = "SDPA kernel"
    default = "auto"
    of_module = True

    def levels(self, facts: Facts) -> list[Level]:
        uses = facts.uses_sdpa or facts.manual_attention or "sdpa" in facts.hf_attention
        unused = "" if uses else "the model does not use scaled_dot_product_attention"
        gpu = "" if facts.device == "cuda" else "on a CPU there are flash and math only"
        return [Level("auto", "torch chooses")] + [
            Level(
                name,
                summary,
                unused or ("" if name in ("flash", "math") else gpu or facts.not_nvidia * (name == "cudnn")),
            )
            for name, (_, summary) in _BACKENDS.items()
        ]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        attention = recipe.levels.get("attention", "as-is")
        if attention not in ("sdpa", "hf-sdpa") and (not facts.uses_sdpa or attention.startswith("hf-")):
            return f"attention={attention} does not call scaled_dot_product_attention"
        half = recipe.levels.get("precision", "fp32") != "fp32" or facts.dtype in ("bfloat16", "float16")
        half = half or recipe.levels.get("mixed_precision") == "bf16"
        if facts.device == "cuda" and level in ("flash", "cudnn") and not half:
            return f"{_BACKENDS[level][1]} on a GPU takes 16-bit numbers only"
        if not computes_in_torch(recipe):
            return "another runtime has its own attention"
        return ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        return Code(
            setup=("from torch.nn.attention import SDPBackend, sdpa_kernel",),
            contexts=(f"sdpa_kernel(SDPBackend.{_BACKENDS[level][0]})",),
        )
