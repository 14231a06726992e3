"""Which kernel scaled_dot_product_attention runs. Left alone, torch picks by its own order of preference.

It need not be the fastest: on a CPU the backward pass of flash attention in bfloat16 takes longer than in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fettle.techniques._base import BOTH, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques.runtime import computes_in_torch

_BACKENDS = {
    "flash": ("FLASH_ATTENTION", "flash attention"),
    "cudnn": ("CUDNN_ATTENTION", "cuDNN attention"),
    "efficient": ("EFFICIENT_ATTENTION", "memory-efficient attention"),
    "math": ("MATH", "plain products and a softmax"),
}


def xformers_attention() -> Any:
    """A context in which xFormers computes scaled_dot_product_attention, but for calls with a mask or grouped heads."""
    import contextlib

    from xformers import ops

    functional: Any = torch.nn.functional
    torchs = functional.scaled_dot_product_attention
    torchs = getattr(torchs, "of_torch", torchs)  # where another call is under way

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
        scale: float | None = None, **others: Any,
    ) -> Any:  # fmt: skip
        if attn_mask is not None or query.dim() != 4 or len(query) != len(key) or query.shape[1] != key.shape[1]:
            return torchs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **others)
        if torch.is_autocast_enabled("cuda"):  # which converts what torch's own is given
            query, key, value = (one.to(torch.get_autocast_dtype("cuda")) for one in (query, key, value))
        rows_first = (one.transpose(1, 2) for one in (query, key, value))
        bias = ops.LowerTriangularMask() if is_causal else None
        return ops.memory_efficient_attention(*rows_first, attn_bias=bias, p=dropout_p, scale=scale).transpose(1, 2)

    attend.of_torch = torchs  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def replaced() -> Any:
        functional.scaled_dot_product_attention = attend
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = torchs

    return replaced()


@register
class SdpaBackend(Technique):
    name = "sdpa_backend"
    order = 410
    modes = BOTH
    title = "SDPA kernel"
    default = "auto"
    of_module = True
    packages = ("xformers",)

    def levels(self, facts: Facts) -> list[Level]:
        uses = facts.uses_sdpa or facts.manual_attention or "sdpa" in facts.hf_attention
        unused = "" if uses else "the model does not use scaled_dot_product_attention"
        gpu = "" if facts.device == "cuda" else "on a CPU there are flash and math only"
        missing = "" if "xformers" in facts.packages else "xFormers is not installed: pip install xformers"
        return [Level("auto", "torch chooses")] + [
            Level(
                name,
                summary,
                unused or ("" if name in ("flash", "math") else gpu or facts.not_nvidia * (name == "cudnn")),
            )
            for name, (_, summary) in _BACKENDS.items()
        ] + [Level("xformers", "xFormers' memory-efficient attention", unused or gpu or missing)]  # fmt: skip

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
        if level == "xformers" and recipe.levels.get("runtime", "torch") != "torch":
            return "an exported graph has torch's own attention"
        if level == "xformers" and recipe.levels.get("ragged") == "packed":
            return "ragged=packed tells rows apart where torch's attention is called"
        if recipe.levels.get("checkpoint") in ("blocks", "selective"):
            return "the backward pass would compute again with what torch chooses"
        return ""

    def unpackaged(self, level: str, recipe: Recipe, facts: Facts) -> str:
        why = f"an exported model has torch's own attention. {self.tune_without('auto,flash,efficient')}"
        return why if level == "xformers" else ""

    def packages_of(self, level: str) -> Sequence[str]:
        return self.packages if level == "xformers" else ()

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if level == "xformers":
            return Code(helpers=(xformers_attention,), contexts=("xformers_attention()",))
        return Code(
            setup=("from torch.nn.attention import SDPBackend, sdpa_kernel",),
            contexts=(f"sdpa_kernel(SDPBackend.{_BACKENDS[level][0]})",),
        )
