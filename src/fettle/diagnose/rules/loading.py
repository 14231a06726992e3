"""The rule `loading`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """Building the model takes long."""
    if seen.load_s < 5.0:
        return None
    return Finding(
        "loading",
        f"Building the workload takes {seen.load_s:.1f} s.",
        startup_s=seen.load_s,
        evidence=(f"weights: {seen.weights.bytes >> 20} MiB",),
        advice="skip the random initialisation (torch.device('meta') and assign), and map weight files",
        formula="seconds to build the workload",
        before="model = Net()\nmodel.load_state_dict(state)",
        after="with torch.device('meta'):\n    model = Net()\nmodel.load_state_dict(state, assign=True)",
        opportunity=True,
    )
