"""The rule `spike`."""

from __future__ import annotations

import math

from fettle.diagnose.evidence import POINTWISE, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about


def look(seen: Evidence) -> Finding | None:
    """An intermediate tensor far larger than what it was made from."""
    grown = [op for op in seen.operations if op.group == POINTWISE and op.growth >= 8]
    if not grown:
        return None
    shapes = {op.largest for op in grown}
    ops = [op for op in seen.operations if op.largest in shapes or op in grown]
    # Whoever reads it next reads all of it: reductions, mostly.
    size = 2 * max(math.prod(op.largest) for op in grown)  # in bytes, were it in 16 bits
    ops += [op for op in seen.operations if op not in ops and op.bytes >= size * op.calls]
    first = max(grown, key=lambda op: op.growth)
    shape = "x".join(map(str, first.largest))
    return about(
        seen,
        "spike",
        f"Broadcasting makes a tensor of {shape}, {first.growth:.0f} times what goes in, to work on it.",
        ops,
        "write it as a matrix product (for distances: torch.cdist), or work on it in parts",
        formula="time of all operators that write or read tensors of that size / call",
        before="d = (x[:, None] - y[None]).square().sum(-1).sqrt()",
        after="d = torch.cdist(x, y)",
    )
