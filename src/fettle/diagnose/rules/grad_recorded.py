"""The rule `grad-recorded`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import LEAST, UNKNOWN


def look(seen: Evidence) -> Finding | None:
    """Autograd records a graph that nobody asks for."""
    saved, low, high = seen.variants.get("grad=inference_mode", UNKNOWN)
    if seen.settings.get("records") != "True" or saved < LEAST or low <= 0:
        return None
    return Finding(
        "grad-recorded",
        "Autograd records every operation for a backward pass that never comes.",
        bound=high,
        evidence=(f"the same call in inference mode took {saved:.0%} less",),
        levels={"grad": "inference_mode"},
        advice="wrap inference in torch.inference_mode()",
        formula="upper end of what inference_mode saved when it was tried",
        before="y = model(x)",
        after="with torch.inference_mode():\n    y = model(x)",
    )
