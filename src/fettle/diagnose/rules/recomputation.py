"""The rule `recomputation`."""

from __future__ import annotations

from fettle.diagnose.evidence import POINTWISE, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, taken


def look(seen: Evidence) -> Finding | None:
    """Growing inputs, computed whole each time: generation without a key-value cache."""
    ops = [op for op in seen.operations if op.repeated > 0]
    spent = sum(op.seconds * op.repeated for op in ops)
    # What stands around these products (norms, activations) is computed again with them.
    share = spent / max(taken(ops), 1e-12)
    calls = max((op.calls for op in ops), default=0)
    return about(
        seen,
        "recomputation",
        f"Layers compute a growing sequence from its beginning each time, {calls} times a call.",
        ops,
        "keep what was computed: a key-value cache (use_cache=True), or append to the last result",
        seconds=spent + share * seen.seconds(POINTWISE),
        formula="(repeated products x share of their FLOPs done before, as much of element-wise work) / call",
        before="for end in range(1, n):\n    keys = project(tokens[:end])",
        after="for token in tokens:\n    keys.append(project(token))  # or use_cache=True",
    )
