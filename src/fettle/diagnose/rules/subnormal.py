"""The rule `subnormal`."""

from __future__ import annotations

from fettle.diagnose.evidence import MATRIX, POINTWISE, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about


def look(seen: Evidence) -> Finding | None:
    """Weights so small that the CPU handles them in microcode."""
    if seen.weights.subnormal < 0.01:
        return None
    ops = [op for op in seen.operations if op.group in (MATRIX, POINTWISE)]
    return about(
        seen,
        "subnormal",
        f"{seen.weights.subnormal:.0%} of the weights are subnormal, which CPUs handle slowly.",
        ops,
        "torch.set_flush_denormal(True), or set such weights to zero",
        formula="time of products and element-wise work / call",
        before="y = model(x)",
        after="torch.set_flush_denormal(True)\ny = model(x)",
    )
