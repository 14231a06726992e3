"""The rule `random`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import about, named

_DRAWING = ("normal_", "uniform_", "bernoulli_", "randperm", "random_", "multinomial", "native_dropout",
            "rand", "randn", "rand_like", "randn_like")  # fmt: skip


def look(seen: Evidence) -> Finding | None:
    """Random numbers drawn for answers."""
    if seen.facts.training:
        return None
    return about(
        seen,
        "random",
        "Random numbers are drawn on every call.",
        named(seen, *_DRAWING),
        "draw them once, or on the device where they are used",
        formula="time of drawing / call",
        before="noise = torch.randn(shape)  # every call",
        after="self.register_buffer('noise', torch.randn(shape))  # once",
    )
