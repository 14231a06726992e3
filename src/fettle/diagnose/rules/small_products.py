"""The rule `small-products`."""

from __future__ import annotations

from fettle.diagnose.evidence import MATRIX, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, above_peak, taken


def look(seen: Evidence) -> Finding | None:
    """Products well below what the machine reaches in their own type."""
    ops = [op for op in seen.operations if op.group == MATRIX and op.flops > 1e6 and "conv" not in op.name]
    spent = taken(ops)
    could = above_peak(seen, ops)
    if not spent or could < 0.5 * spent or any(seen.peak_flops(op.dtype) == float("inf") for op in ops):
        return None
    reached = sum(op.flops for op in ops) / spent
    return about(
        seen,
        "small-products",
        "Matrix products are too small, or too oddly shaped, to reach the machine's peak.",
        ops,
        "more rows a call, or sizes that are multiples of 64",
        seconds=could,
        more=(f"they reach {reached / 1e9:.0f} GFLOP/s",),
        formula="(time of products - FLOPs / measured peak) / call",
        before="y = model(x)  # few rows",
        after="y = model(torch.cat(rows))",
        opportunity=True,
    )
