"""The rule `host-bound`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """The host's own work around operators outweighs what they do."""
    calls = sum(op.calls for op in seen.operations)
    without_core_s = seen.crowded * seen.wall_s  # other programs had it: not the host's work
    if calls < 20 or seen.share(seen.outside_s - without_core_s) < 0.25 or seen.slept_s > 0.3 * seen.wall_s:
        return None
    line = f"{calls} operators a call; {seen.outside_s * 1e6 / calls:.0f} us of host time around each"
    levels = {"cuda_graphs": "on"} if seen.facts.device == "cuda" else {"compile": "default", "grad": "inference_mode"}
    return Finding(
        "host-bound",
        "The host's work around many small operators takes longer than they do.",
        bound=seen.share(seen.outside_s),
        evidence=(line,),
        levels=levels,
        advice="compile the model, batch more rows into a call, or replace Python loops by one tensor operation",
        formula="time outside operators and loaders / call",
        before="y = model(x)",
        after="model = torch.compile(model)\ny = model(x)",
    )
