"""The rule `weight-memory`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """Half of the weights' memory could be freed."""
    if seen.facts.dtype != "float32" or seen.weights.bytes < 256 << 20:
        return None
    return Finding(
        "weight-memory",
        "The weights are stored in 32 bits.",
        bound_bytes=seen.weights.bytes // 2,
        evidence=(f"{seen.weights.bytes >> 20} MiB of weights",),
        levels={"precision": "bf16"},
        advice="store them in bfloat16: half the memory, and half the time to load",
        formula="half of the weights' bytes",
        before="model = Net()",
        after="model = Net().bfloat16()",
        opportunity=True,
    )
