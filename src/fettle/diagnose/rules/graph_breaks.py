"""The rule `graph-breaks`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import short, unfused


def look(seen: Evidence) -> Finding | None:
    """Places where torch.compile falls back to Python."""
    health = seen.compile
    if health is None or not (health.breaks or health.errors):
        return None
    lines = [f"{short(b.file)}:{b.line}: {b.reason} ({b.count}x)" for b in health.breaks[:6]]
    lines += [f"not compiled: {error}" for error in health.errors[:3]]
    where = list(dict.fromkeys(f"{short(b.file)}:{b.line}" for b in health.breaks))
    places = len(where)
    says = f"torch.compile breaks the model into pieces at {places} place{'s' if places > 1 else ''}."
    return Finding(
        "graph-breaks",
        says if places else "torch.compile cannot compile the model.",
        bound=unfused(seen),
        where=tuple(where[:6]),
        evidence=tuple(lines),
        count=max(sum(b.count for b in health.breaks), 1),
        advice="rewrite those lines as tensor operations, or compile the repeated blocks only",
        formula="(call - products) / call, where the model is compiled",
        before="print(x.sum())\nx = x + 1",
        after="x = x + 1",
        opportunity=not seen.compiled,  # no fault of a model that nobody compiles
    )
