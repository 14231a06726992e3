"""Combinations that are known to work well together, so that a search need not find them one step at a time."""

from fettle.recipe import Recipe
from fettle.techniques._base import Facts

_FROZEN = {"compile": "default", "freeze": "on"}


def bundles(facts: Facts) -> list[Recipe]:
    """Four to eight recipes without conflict on these facts, those that promise most for their cost first."""
    if facts.mode == "training":
        return _possible(_training(facts), facts)
    base = {"grad": "inference_mode", **({"mode": "eval"} if facts.training else {})}
    candidates = _cuda(facts) if facts.device == "cuda" else _cpu(facts)
    return _possible([{**base, **levels} for levels in candidates], facts)


def _possible(candidates: list[dict[str, str]], facts: Facts) -> list[Recipe]:
    from fettle.techniques import conflict, idle, normal

    found: list[Recipe] = []
    for levels in candidates:
        recipe = normal(Recipe(levels))
        recipe = recipe.without(*idle(recipe))
        if recipe not in found and not conflict(recipe, facts):
            found.append(recipe)
    return found[:8]


def _training(facts: Facts) -> list[dict[str, str]]:
    base = {"channels_last": "on"} if facts.num_conv else {}
    base |= {"optimizer": "fused"} if "fused" in facts.optimizer_levels else {}
    if facts.device == "cuda" and facts.num_conv:
        base |= {"cudnn_benchmark": "on"}
    native = facts.device != "cpu" or bool({"amx_bf16", "avx512_bf16"} & set(facts.cpu_flags))
    half = {**base, "precision": "autocast-bf16"} if native else base
    compiled = {**half, "compile": "default"}
    masters = {**base, "precision": "bf16-master"}
    products = {"convolution": "products"} if facts.device == "cpu" and native and facts.num_conv else {}
    plain = {"sdpa_backend": "math"} if facts.device == "cpu" and native and facts.uses_sdpa else {}
    if facts.ranks > 1:  # each strategy as it is, then the usual first choice with what makes a step fast
        kinds = ("ddp", "zero1", "zero2", "zero3", "hsdp")
        return [*({"parallel": kind} for kind in kinds), {**half, "parallel": "ddp"}, {**compiled, "parallel": "ddp"},
                {**base, "parallel": "zero3", "policy": "bf16"}]  # fmt: skip
    inside = {**base, "matmul": "medium"}
    kept = {"allocator": "tcmalloc" if "tcmalloc" in facts.libraries else "keep"} if facts.device == "cpu" else {}
    return [
        half,
        *([{**masters, **products, **kept}] if native and kept else []),
        *([{**masters, **products, **plain}] if products or plain else []),
        *([{**masters, **products, "optimizer": "compiled", **kept}] if products else []),
        *([masters, {**masters, "compile": "default", **kept}] if native else []),
        compiled,
        *([{**inside, "compile": "default"}, inside] if native else []),
        *([{**compiled, "region": "blocks"}] if facts.block_classes else []),
        base,
        {**compiled, "checkpoint": "budget-0.5"},
    ]


def _cpu(facts: Facts) -> list[dict[str, str]]:
    layout = {"channels_last": "on"} if facts.num_conv else {}
    attention = {"attention": "sdpa"} if facts.manual_attention else {}
    bf16 = {**layout, **attention, "precision": "bf16"}
    convolutional = facts.num_conv > facts.num_linear
    compiled = {**bf16, **_FROZEN}
    int8 = [{"quantize": "int8-static", **layout, **_FROZEN}] if convolutional else []
    int8 += [{**compiled, "quantize": "int8-dynamic"}] if facts.num_linear > 8 and not convolutional else []
    # Worth a minute of choosing where products are what takes the time
    part = [{"runtime": "openvino-int8-part"}] if facts.num_linear + facts.num_conv > 8 else []
    has_bf16 = {"amx_bf16", "avx512_bf16"} & set(facts.cpu_flags)
    if not has_bf16:  # 16 bits are emulated, and slow
        return [
            {"runtime": "openvino"},
            {**layout, **attention, **_FROZEN},
            *int8,
            {"runtime": "openvino-int8"},
            *part,
            {**layout, **attention},
            {"runtime": "onnxruntime"},
            {"quantize": "int8-dynamic", **_FROZEN},
        ]
    # Residual sums are what a transformer has; the level says so itself where a model's are in bfloat16 already.
    sums = [{"runtime": "openvino-bf16-sums"}] if facts.uses_sdpa or facts.manual_attention else []
    # One of each kind first: where time is short, what is left out is like something that was tried.
    return [
        {"runtime": "openvino-bf16"},
        *part,
        compiled,
        *sums,
        {"runtime": "openvino-int8"},
        {"runtime": "openvino-bf16", "streams": "per-core"},
        *int8,
        bf16,
        {**layout, **attention, "precision": "autocast-bf16", **_FROZEN},
        {**bf16, "compile": "max-autotune", "freeze": "on"},
        {**layout, **attention, **_FROZEN},
        {**bf16, "runtime": "aoti", "freeze": "on"},
    ]


def _cuda(facts: Facts) -> list[dict[str, str]]:
    half = "bf16" if facts.cuda_capability >= (8, 0) else "fp16"
    base = {"precision": half} if facts.dtype == "float32" else {}
    if facts.num_conv:
        base |= {"channels_last": "on", "cudnn_benchmark": "on"}
    if facts.manual_attention:
        base |= {"attention": "sdpa"}
    return [
        {**base, "compile": "max-autotune"},
        {**base, "compile": "reduce-overhead"},
        {**base, "compile": "default"},
        {**base, "cuda_graphs": "on"},
        {**base, "compile": "max-autotune", "freeze": "on"},
        {**base, "compile": "max-autotune", "quantize": "float8-dynamic"},
        {**base, "runtime": "tensorrt"},
        base,
    ]
