"""The rule `recurrent`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, taken


def look(seen: Evidence) -> Finding | None:
    """A recurrent layer walks through time step by step."""
    ops = [op for op in seen.operations if any(word in op.name for word in ("lstm", "gru", "rnn"))]
    return about(
        seen,
        "recurrent",
        "A recurrent layer walks through its sequence step by step.",
        ops,
        "more rows a call, bfloat16, or another runtime",
        seconds=0.9 * taken(ops),
        levels={"precision": "bf16"},
        least=0.3,
        formula="9/10 of the time of recurrent layers / call",
        before="y, state = lstm(x)",
        after="y, state = lstm.bfloat16()(x.bfloat16())",
        opportunity=True,
    )
