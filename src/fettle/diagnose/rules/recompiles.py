"""The rule `recompiles`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import short, unfused


def look(seen: Evidence) -> Finding | None:
    """Compiling again and again, until it gives up."""
    health = seen.compile
    if health is None or not (health.recompiles or health.limits):
        return None
    count = sum(item.count for item in health.recompiles)
    lines = [f"{r.function} at {short(r.file)}:{r.line}: {r.guard}" for r in health.recompiles[:6]]
    says = f"torch.compile compiles {count} more time{'s' if count > 1 else ''} for these batches."
    if health.limits:
        says = "torch.compile reached its recompile limit: from then on it silently runs eagerly."
        lines = [f"{hit.function} at {short(hit.file)}:{hit.line}, limit {hit.limit}" for hit in health.limits] + lines
    if health.specialised:
        lines += [f"compiled for one number: {s.name} = {', '.join(s.values[:4])}" for s in health.specialised[:3]]
        advice = "pass changing numbers as tensors: each new value compiles again"
    else:
        advice = "mark changing sizes dynamic, and keep Python numbers out of the graph"
    shapes = any(item.kind == "shape" for item in health.recompiles) and not health.specialised
    return Finding(
        "recompiles",
        says,
        bound=unfused(seen),
        where=tuple(f"{short(r.file)}:{r.line}" for r in health.recompiles[:6]),
        evidence=tuple(lines),
        count=count,
        advice=advice,
        levels={"compile": "default", "shapes": "dynamic"} if shapes else {},
        formula="(call - products) / call, where the model is compiled",
        before="model = torch.compile(model)",
        after="model = torch.compile(model, dynamic=True)",
        opportunity=not seen.compiled,  # no fault of a model that nobody compiles
    )
