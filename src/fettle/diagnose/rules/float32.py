"""The rule `float32`."""

from __future__ import annotations

from fettle.diagnose.evidence import MATRIX, POINTWISE, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, above_peak, taken


def look(seen: Evidence) -> Finding | None:
    """Products in float32 on a machine whose 16-bit units are faster."""
    ops = [op for op in seen.operations if op.group == MATRIX and op.dtype == "float32"]
    fast, slow = seen.peak_flops("bfloat16"), seen.peak_flops("float32")
    if not ops or fast == float("inf") or fast < 1.3 * slow:
        return None
    pointwise = [op for op in seen.operations if op.group == POINTWISE and op.dtype == "float32"]
    line = f"products in bfloat16 run at {fast / 1e12:.2f} TFLOP/s here, in float32 at {slow / 1e12:.2f}"
    return about(
        seen,
        "float32",
        "Matrix products run in float32, and this machine multiplies bfloat16 faster.",
        ops,
        "run the model in bfloat16, or under autocast",
        seconds=above_peak(seen, ops, "bfloat16") + 0.5 * taken(pointwise),
        levels={"precision": "bf16"},
        more=(line,),
        formula="(products in float32 - their FLOPs at the measured bfloat16 peak, half of element-wise work) / call",
        before="y = model(x)",
        after="model.bfloat16()\ny = model(x.bfloat16())",
        opportunity=True,
    )
