"""The rule `not-fused`."""

from __future__ import annotations

from fettle.diagnose.evidence import POINTWISE, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, taken


def look(seen: Evidence) -> Finding | None:
    """Memory-bound operators one by one, each reading and writing everything."""
    ops = [op for op in seen.operations if op.group == POINTWISE]
    if not ops:
        return None
    return about(
        seen,
        "not-fused",
        "Element-wise operators run one by one, each reading and writing all its values.",
        ops,
        "torch.compile fuses them into their neighbours",
        seconds=taken(ops) + 0.5 * seen.outside_s,
        levels={"compile": "default", "grad": "inference_mode"},
        formula="(time of element-wise operators, and half of the host's own work) / call",
        before="y = model(x)",
        after="model = torch.compile(model)\ny = model(x)",
        opportunity=True,
    )
