"""The rule `constants`."""

from __future__ import annotations

import torch

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, named

_MAKERS = ("arange", "linspace", "full", "zeros", "ones", "eye", "tril", "triu", "fill_", "zero_", "new_zeros",
           "new_full", "ones_like", "zeros_like", "full_like", "scalar_tensor")  # fmt: skip


def look(seen: Evidence) -> Finding | None:
    """Tensors of constants that are made again on every call."""
    ops = [op for op in named(seen, *_MAKERS) if not hasattr(torch.nn, op.kind)]  # torch's own modules: nobody's choice
    return about(
        seen,
        "constants",
        "Constant tensors (masks, positions) are made again on every call.",
        ops,
        "make them once and register them as buffers",
        least=0.05,
        formula="time of making them / call",
        before="mask = torch.ones(n, n).tril()  # every call",
        after="self.register_buffer('mask', torch.ones(n, n).tril())  # once",
    )
