"""Which implementation computes attention."""

from typing import Any

from fettle.kernels import DECOMPOSED_ATTENTION
from fettle.techniques._attention_rewrite import REWRITE
from fettle.techniques._base import Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._tiled_attention import DECOMPOSED
from fettle.workload import spread

_TRITON = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows")
_HF = ("sdpa", "flash_attention_2", "eager")


def set_attention(model: Any, name: str) -> None:
    """Switch the outermost transformers models to an attention implementation."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(name)
    else:
        for child in model.children():
            set_attention(child, name)


@register
class Attention(Technique):
    name = "attention"
    order = 400
    title = "attention"
    default = "as-is"
    before_export = True
    of_module = True
    packages = _TRITON
    compiles = frozenset({"flex", "fused"})

    def levels(self, facts: Facts) -> list[Level]:
        manual = "" if facts.manual_attention else "no attention written out by hand was found that can be rewritten"
        bias = _biased(facts)
        found = [
            Level("as-is", "as given"),
            Level("sdpa", "attention written out by hand becomes scaled_dot_product_attention", manual),
            Level("tiled", "a bias by row and column is added tile by tile, and never written out", bias["tiled"]),
            Level("flex", "torch's FlexAttention, compiled, adds a bias by row and column", bias["flex"]),
            Level("fused", "a bias by row and column is added inside one kernel, and never written out", bias["fused"]),
        ]
        for name in _HF:
            why_not = f"this model cannot be switched to {name} here"
            if not facts.hf_attention:
                why_not = "the model is not from transformers"
            elif facts.hf_attention[0] == name:
                why_not = "it is in use already"
            elif name in facts.hf_attention:
                why_not = ""
            found.append(Level(f"hf-{name}", f"transformers' {name} implementation", why_not))
        return found

    def is_met(self, level: str, facts: Facts) -> bool:
        return bool(facts.hf_attention) and level == f"hf-{facts.hf_attention[0]}"

    def level_cost(self, level: str) -> int:
        return 2 if level == "flex" else self.cost

    def usual(self, facts: Facts) -> str:
        usual = [level for level, why_not in _biased(facts).items() if not why_not and level != "flex"]
        return usual[0] if usual else "sdpa" if facts.manual_attention else self.default

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        runtime = recipe.levels.get("runtime", "torch")
        if runtime != "torch" and level in _MADE:
            return f"runtime={runtime} {_MADE[level][1]}"
        if level == "flex":
            if recipe.levels.get("grad", "grad") == "grad":
                return "FlexAttention is for calls without autograd here: needs grad=inference_mode or no_grad"
            if facts.device == "cpu" and recipe.levels.get("compile", "off") != "off":
                return "on a CPU Inductor cannot compile FlexAttention inside a model, only alone"
        half = recipe.levels.get("precision", "fp32") != "fp32" or facts.dtype in ("bfloat16", "float16")
        if level == "hf-flash_attention_2" and not half:
            return "flash attention computes in 16 bits: needs precision=bf16 or fp16"
        mode = recipe.levels.get("mode", "as-given")
        if level == "sdpa" and facts.training and facts.train_mode_differs and mode == "as-given":
            return "dropout stands between weights and values: needs mode=eval"
        return ""

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if level in _MADE:
            helpers: tuple[Any, ...] = (*DECOMPOSED, *(DECOMPOSED_ATTENTION if level == "fused" else ()))
            return Code(helpers=helpers, prepare=(f"change_attention(model, {_MADE[level][0]})",))
        if level == "sdpa":
            invoke = "call(model, *args, **kwargs)" if facts.custom_call else "model(*args, **kwargs)"
            lines = ("args, kwargs = spread(batches[0])", f"rewrite_attention(model, lambda: {invoke})")
            return Code(helpers=(spread, *REWRITE), prepare=lines)
        return Code(helpers=(set_attention,), prepare=(f'set_attention(model, "{level.removeprefix("hf-")}")',))


_MADE = {
    "tiled": ("torch.compiler.disable(tiled_attention)", "would write out a loop over tiles"),
    "flex": ("by_flex_attention()", "has its own attention"),
    "fused": ("decomposed_attention()", "does not have this kernel"),
}
"""What computes attention with a bias by row and column, and why another runtime does not."""


def _biased(facts: Facts) -> dict[str, str]:
    """Why a bias by row and column cannot be added that way here, by the level; empty where it can."""
    if not facts.decomposed_bias:
        return dict.fromkeys(_MADE, "no attention with a decomposed relative-position bias was found")
    fused = "" if any(name in facts.packages for name in _TRITON) else "Triton is not installed: pip install triton"
    if facts.device != "cuda":
        fused = "the kernel is for GPUs"
    elif not facts.amd and facts.cuda_capability < (8, 0):
        fused = "the kernel is for GPUs of compute capability 8.0 and later"
    tiled = "" if facts.device == "cpu" else "it is for CPUs: a loop over tiles leaves a GPU idle"
    return {"tiled": tiled, "flex": "", "fused": fused}
