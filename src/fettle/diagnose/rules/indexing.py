"""The rule `indexing`."""

from __future__ import annotations

from fettle.diagnose.evidence import INDEX, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about


def look(seen: Evidence) -> Finding | None:
    """Gathers and scatters that take a large part of a call."""
    ops = [op for op in seen.operations if op.group == INDEX]
    return about(
        seen,
        "indexing",
        "Gathering and scattering single elements takes much of the time.",
        ops,
        "sort or group the indices, or use a mask",
        least=0.15,
        formula="time of gathers and scatters / call",
        before="x[index] = value",
        after="x = torch.where(mask, value, x)",
        opportunity=True,
    )
