"""The rule `optimizer`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import OPTIMIZER, about, named, taken


def look(seen: Evidence) -> Finding | None:
    """An optimizer that walks through its parameters one at a time."""
    marks = [op for op in named(seen, *OPTIMIZER) if op.calls >= 16]
    if not marks:
        return None
    lines = {op.line for op in marks}
    ops = [op for op in seen.operations if op.line in lines and op.calls >= 16]
    share = sum(op.calls for op in ops) / max(1, sum(op.calls for op in seen.operations))
    return about(
        seen,
        "optimizer",
        f"The optimizer updates {max(op.calls for op in marks)} parameters one at a time.",
        ops,
        "fused=True, or foreach=True: one kernel for many parameters",
        seconds=taken(ops) + share * seen.outside_s,
        formula="time of the update's operators and their share of the host's work / call",
        before="torch.optim.AdamW(parameters, foreach=False)",
        after="torch.optim.AdamW(parameters, fused=True)",
    )
