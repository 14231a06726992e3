"""The rule `garbage-collection`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import LEAST


def look(seen: Evidence) -> Finding | None:
    """Python's garbage collector runs during calls."""
    if seen.share(seen.gc_s) < LEAST:
        return None
    return Finding(
        "garbage-collection",
        "Python's garbage collector runs during calls.",
        bound=min(0.999, seen.share(seen.gc_s)),
        evidence=(f"{seen.gc_s * 1e3:.3g} ms a call",),
        advice="gc.freeze() after loading, collect between requests; look for reference cycles made by the model",
        formula="time in the collector / call",
        before="serve(model)",
        after="gc.collect()\ngc.freeze()\nserve(model)",
    )
