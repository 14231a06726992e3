"""Which implementation computes attention."""

from typing import Any

import torch

from fettle.kernels import DECOMPOSED_ATTENTION
from fettle.techniques._attention_rewrite import REWRITE
from fettle.techniques._base import Bundle, Code, Facts, Level, Recipe, Technique, register
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


def windowed_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **more: Any
) -> tuple[torch.Tensor, Any]:
    """transformers' SDPA for some queries at a time, with the keys between the first and the last that their mask
    shows; a graph cannot look there, and has all keys. Queries [rows, heads, tokens, size]; the answer is [rows,
    tokens, heads, size]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as attend

    size, tokens = 256, query.shape[2]
    whole = tokens <= size or torch.compiler.is_compiling() or getattr(attention_mask, "dtype", None) != torch.bool
    if whole or any(more.get(name) is not None for name in ("position_bias", "cache")):
        return attend(module, query, key, value, attention_mask, **more)
    found = []
    for start in range(0, tokens, size):
        mask = attention_mask[:, :, start : start + size]
        shown = mask.flatten(0, 2).view(torch.uint8).amax(0).nonzero()  # `any` takes eight times as long
        keys = slice(int(shown[0]), int(shown[-1]) + 1) if len(shown) else slice(None)
        queries, mask = query[:, :, start : start + size], mask[..., keys]
        found.append(attend(module, queries, key[:, :, keys], value[:, :, keys], mask, **more)[0])
    return torch.cat(found, 1), None


def set_windowed_attention(model: Any) -> None:
    """Register it with transformers, under masks as for SDPA, and switch to it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register("windowed", windowed_attention)
    AttentionMaskInterface.register("windowed", sdpa_mask)
    set_attention(model, "windowed")


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
        manual = manual or facts.uncalled
        bias = _biased(facts)
        found = [
            Level("as-is", "as given"),
            Level("sdpa", "attention written out by hand becomes scaled_dot_product_attention", manual),
            Level("tiled", "a bias by row and column is added tile by tile, and never written out", bias["tiled"]),
            Level("flex", "torch's FlexAttention, compiled, adds a bias by row and column", bias["flex"]),
            Level("fused", "a bias by row and column is added inside one kernel, and never written out", bias["fused"]),
        ]
        no_window = "no layer has a sliding window, or no input is longer than 256 tokens" * (not facts.has_window)
        if not no_window and "sdpa" not in facts.hf_attention:
            no_window = "this model cannot be switched to sdpa here"
        text = "layers with a sliding window take some tokens at a time, with those that their mask shows"
        found.append(Level("windowed", text, no_window))
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
        return usual[0] if usual else "sdpa" if facts.manual_attention and not facts.uncalled else self.default

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        runtime = recipe.levels.get("runtime", "torch")
        if runtime != "torch" and level in _MADE:
            return f"runtime={runtime} {_MADE[level][1]}"
        if level == "windowed":
            graphs = {"runtime": "torch", "compile": "off", "cuda_graphs": "off"}
            made = [name for name, usual in graphs.items() if recipe.levels.get(name, usual) != usual]
            made += ["kv_cache"] * (recipe.levels.get("kv_cache") == "static-prompts")
            if made:
                return f"{made[0]}={recipe.levels[made[0]]} makes a graph, which cannot look up what a mask shows"
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

    def unpackaged(self, level: str, recipe: Recipe, facts: Facts) -> str:
        why = f"a stored model is a graph, which cannot look up what a mask shows. {self.tune_without()}"
        return why if level == "windowed" else ""

    def bundles(self, facts: Facts) -> list[Bundle]:
        return [Bundle(50, {"attention": "windowed"})] if facts.has_window else []

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if level in _MADE:
            helpers: tuple[Any, ...] = (*DECOMPOSED, *(DECOMPOSED_ATTENTION if level == "fused" else ()))
            return Code(helpers=helpers, prepare=(f"change_attention(model, {_MADE[level][0]})",))
        if level == "sdpa":
            invoke = "call(model, *args, **kwargs)" if facts.custom_call else "model(*args, **kwargs)"
            lines = ("args, kwargs = spread(batches[0])", f"rewrite_attention(model, lambda: {invoke})")
            return Code(helpers=(spread, *REWRITE), prepare=lines)
        if level == "windowed":
            helpers = (windowed_attention, set_attention, set_windowed_attention)
            return Code(helpers=helpers, prepare=("set_windowed_attention(model)",))
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
