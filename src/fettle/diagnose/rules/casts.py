"""The rule `casts`."""

from __future__ import annotations

from fettle.diagnose.evidence import CAST, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, taken


def look(seen: Evidence) -> Finding | None:
    """The same values converted from type to type on every call."""
    ops = [op for op in seen.operations if op.group == CAST]
    spent = taken(ops)
    return about(
        seen,
        "casts",
        "Tensors are converted between types on every call.",
        ops,
        "convert weights once, or keep a chain of operations in one type",
        levels={"precision": "bf16"} if any(op.dtype in ("bfloat16", "float16") for op in ops) else {},
        seconds=spent,
        # Each makes a tensor, for which the C library need not fetch memory any more.
        formula="time of casts, with what fetching memory costs / call",
        besides=min(spent, seen.fresh.seconds),
        before="x = layer(x).half().float()",
        after="x = layer(x)",
    )
