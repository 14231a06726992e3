"""The rule `copies`."""

from __future__ import annotations

import math

from fettle.diagnose.evidence import LAYOUT, POINTWISE, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, taken


def look(seen: Evidence) -> Finding | None:
    """Copies that only move values: clone, contiguous, cat, pad."""
    ops = [op for op in seen.operations if op.group == LAYOUT]
    spent = taken(ops)
    least = min((math.prod(op.largest) for op in ops if math.prod(op.largest) >= 1 << 18), default=math.inf)
    large = sum(op.seconds for op in seen.operations if op.group == POINTWISE and math.prod(op.largest) >= least)
    return about(
        seen,
        "copies",
        "Time goes into copying and rearranging tensors.",
        ops,
        "avoid clone(), contiguous() and cat() in the hot path; a compiler fuses many of them away",
        seconds=spent,
        levels={"compile": "default", "grad": "inference_mode"},
        # Its results gone, caches hold what comes next, and the C library need not fetch as much memory.
        formula="copying operators, and as much again of work on their results, with what fetching memory costs / call",
        besides=min(large, spent + seen.fresh.seconds),
        before="x = x.clone() * 2",
        after="x = x * 2",
    )
