"""The rule `sorting`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, named


def look(seen: Evidence) -> Finding | None:
    """Sorts and top-k."""
    ops = named(seen, "sort", "topk", "argsort", "unique_dim", "_unique2", "kthvalue", "median")
    return about(
        seen,
        "sorting",
        "Sorting takes much of the time.",
        ops,
        "topk of what is needed, or a threshold, instead of a whole sort",
        least=0.15,
        formula="time of sorting / call",
        before="best = x.sort().values[-k:]",
        after="best = x.topk(k).values",
        opportunity=True,
    )
