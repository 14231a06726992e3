"""The rule `no-tf32`."""

from __future__ import annotations

from fettle.diagnose.evidence import MATRIX, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, taken


def look(seen: Evidence) -> Finding | None:
    """Full float32 products on a GPU with TensorFloat-32."""
    if seen.facts.device != "cuda" or seen.facts.cuda_capability < (8, 0) or seen.settings.get("matmul") != "highest":
        return None
    ops = [op for op in seen.operations if op.group == MATRIX and op.dtype == "float32"]
    return about(
        seen,
        "no-tf32",
        "float32 products do not use TensorFloat-32.",
        ops,
        "torch.set_float32_matmul_precision('high')",
        seconds=0.85 * taken(ops),
        levels={"matmul": "high"},
        formula="0.85 of the time of float32 products / call",
        before="y = model(x)",
        after="torch.set_float32_matmul_precision('high')\ny = model(x)",
        opportunity=True,
    )
