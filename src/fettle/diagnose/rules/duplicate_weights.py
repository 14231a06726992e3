"""The rule `duplicate-weights`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """The same values stored twice."""
    if seen.weights.duplicate_bytes < 1 << 20:
        return None
    return Finding(
        "duplicate-weights",
        "Parameters are stored twice with the same values.",
        bound_bytes=seen.weights.duplicate_bytes,
        evidence=(f"{seen.weights.duplicate_bytes >> 20} MiB of copies",),
        advice="tie them: assign the same parameter to both places",
        formula="bytes of the copies",
        before="head.weight = nn.Parameter(embedding.weight.clone())",
        after="head.weight = embedding.weight",
    )
