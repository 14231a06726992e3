"""What `torch.compile` made of the model."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._rule import cause, rule, short, unfused
from fettle.units import count_text


@rule("inference", "training")
def graph_breaks(call: Evidence) -> Finding | None:
    """Places where torch.compile falls back to Python."""
    health = call.compile
    if health is None or not (health.breaks or health.errors):
        return None
    lines = [f"{short(b.file)}:{b.line}: {b.reason} ({b.count}x)" for b in health.breaks[:6]]
    lines += [f"not compiled: {error}" for error in health.errors[:3]]
    where = list(dict.fromkeys(f"{short(b.file)}:{b.line}" for b in health.breaks))
    places = len(where)
    says = f"torch.compile breaks the model into pieces at {count_text(places, 'place')}."
    return cause(
        says if places else "torch.compile cannot compile the model.",
        bound=unfused(call),
        where=tuple(where[:6]),
        evidence=tuple(lines),
        count=max(sum(b.count for b in health.breaks), 1),
        advice="rewrite those lines as tensor operations, or compile the repeated blocks only",
        formula="(call - products) / call, where the model is compiled",
        before="print(x.sum())\nx = x + 1",
        after="x = x + 1",
        opportunity=not call.compiled,  # not a fault of a model that is not compiled
    )


@rule("inference", "training")
def recompiles(call: Evidence) -> Finding | None:
    """Compiling again and again, until it gives up."""
    health = call.compile
    if health is None or not (health.recompiles or health.limits):
        return None
    count = sum(item.count for item in health.recompiles)
    lines = [f"{r.function} at {short(r.file)}:{r.line}: {r.guard}" for r in health.recompiles[:6]]
    says = f"torch.compile compiles {count_text(count, 'more time')} for these batches."
    if health.limits:
        says = "torch.compile reached its recompile limit: from then on it silently runs eagerly."
        lines = [f"{hit.function} at {short(hit.file)}:{hit.line}, limit {hit.limit}" for hit in health.limits] + lines
    if health.specialised:
        lines += [f"compiled for one number: {s.name} = {', '.join(s.values[:4])}" for s in health.specialised[:3]]
        advice = "pass changing numbers as tensors: each new value compiles again"
    else:
        advice = "mark changing sizes dynamic, and keep Python numbers out of the graph"
    shapes = any(item.kind == "shape" for item in health.recompiles) and not health.specialised
    return cause(
        says,
        bound=unfused(call),
        where=tuple(f"{short(r.file)}:{r.line}" for r in health.recompiles[:6]),
        evidence=tuple(lines),
        count=count,
        advice=advice,
        levels={"compile": "default", "shapes": "dynamic"} if shapes else {},
        formula="(call - products) / call, where the model is compiled",
        before="model = torch.compile(model)",
        after="model = torch.compile(model, dynamic=True)",
        opportunity=not call.compiled,  # not a fault of a model that is not compiled
    )


@rule("inference", "training")
def compile_cache(call: Evidence) -> Finding | None:
    """Compiled code is thrown away with the process, or with the machine."""
    if call.compile is None:
        return None
    cache = call.compile.cache
    if not cache.enabled:
        return cause(
            "The compile cache is switched off: each start compiles everything again.",
            startup_s=call.compile.compile_s,
            evidence=("the environment switches the cache off",),
            advice="unset TORCHINDUCTOR_FORCE_DISABLE_CACHES and TORCHINDUCTOR_FX_GRAPH_CACHE=0",
            formula="seconds spent compiling",
            before="TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 python serve.py",
            after="python serve.py",
        )
    used = cache.hits or cache.misses or cache.bypasses  # not by a backend without that cache
    if not call.compiled or not used or cache.persists:
        return None
    says = "Compiled code is kept in a temporary folder: a container or a reboot compiles again."
    if cache.bypasses:
        says = f"The compile cache cannot keep {count_text(cache.bypasses, 'graph')}."
    return cause(
        says,
        startup_s=0.0 if cache.hits else call.compile.compile_s,  # found in the cache, it took next to no time
        evidence=(f"{cache.folder}: {cache.hits} hits, {cache.misses} misses, {cache.bypasses} bypassed",),
        advice="TORCHINDUCTOR_CACHE_DIR=a folder that lasts",
        formula="seconds spent compiling, where nothing was found in the cache",
        before="python serve.py",
        after="TORCHINDUCTOR_CACHE_DIR=/var/cache/inductor python serve.py",
        opportunity=True,
    )
