"""The rule `first-call`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """The first call costs much more than the others."""
    extra = seen.first_call_s - seen.wall_s
    if extra < 2.0:
        return None
    return Finding(
        "first-call",
        f"The first call takes {seen.first_call_s:.1f} s, a later one {seen.wall_s:.3g} s.",
        startup_s=extra,
        evidence=("lazy loading, or compiling, happens in it",),
        advice="warm up before the first user, and keep the compile cache",
        formula="first call - a later one",
        before="serve(model)",
        after="model(example)  # warm up\nserve(model)",
        opportunity=True,
    )
