"""The rule `onednn-off`."""

from __future__ import annotations

from fettle.diagnose.evidence import MATRIX, POINTWISE, Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """oneDNN switched off on a CPU."""
    if seen.facts.device != "cpu" or seen.settings.get("mkldnn") != "False":
        return None
    return Finding(
        "onednn-off",
        "oneDNN, which has the CPU's fast kernels, is switched off.",
        bound=seen.share(seen.seconds(MATRIX, POINTWISE)),
        evidence=("torch.backends.mkldnn.enabled is False",),
        advice="torch.backends.mkldnn.enabled = True",
        formula="time of products and element-wise work / call",
        before="torch.backends.mkldnn.enabled = False",
        after="torch.backends.mkldnn.enabled = True",
    )
