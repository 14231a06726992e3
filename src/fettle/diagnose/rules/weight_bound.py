"""The rule `weight-bound`."""

from __future__ import annotations

from fettle.diagnose.evidence import MATRIX, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, taken


def look(seen: Evidence) -> Finding | None:
    """A call with few rows: reading the weights takes as long as the call."""
    bandwidth = seen.peaks.get("copy", 0.0)
    ops = [op for op in seen.operations if op.group == MATRIX and op.flops and op.flops < 16 * op.bytes]
    spent = taken(ops)
    if not bandwidth or seen.rows > 4 or seen.share(spent) < 0.3 or seen.weights.bytes < 32 << 20:
        return None
    return about(
        seen,
        "weight-bound",
        "With so few rows a call mostly reads weights from memory.",
        ops,
        "batch requests together, or store the weights in 8 bits",
        seconds=0.75 * spent,
        levels={"quantize": "int8-weight", "compile": "default", "grad": "inference_mode"},
        more=(f"weights {seen.weights.bytes >> 20} MiB; memory {bandwidth / 1e9:.0f} GB/s",),
        formula="3/4 of the time of products with fewer than 16 FLOPs a byte / call",
        before="y = model(x)",
        after="torchao.quantize_(model, Int8WeightOnlyConfig())\ny = model(x)",
        opportunity=True,
    )
