"""The rule `float64`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about


def look(seen: Evidence) -> Finding | None:
    """Double precision that slipped in."""
    double = ("float64", "complex128") if seen.facts.dtype == "float64" else ("float64",)
    ops = [op for op in seen.operations if op.dtype in double]
    if not ops:
        return None
    return about(
        seen,
        "float64",
        "Work is done in double precision.",
        ops,
        "make the tensor float32 where it is created: NumPy arrays and Python scalars bring float64 along",
        formula="time of operators in double precision / call",
        before="x = torch.from_numpy(array)",
        after="x = torch.from_numpy(array).float()",
    )
