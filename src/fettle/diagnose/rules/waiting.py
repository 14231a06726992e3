"""The rule `waiting`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """The call waits for something that is not computation."""
    if seen.share(seen.slept_s) < 0.1 or seen.facts.device != "cpu" or seen.cores < 1:
        return None
    # Threads that wait for each other sleep too: what operators took is computation whoever did it.
    if seen.compiled and seen.compile is not None and not seen.compile.healthy:
        return None  # it waits for the compiler's processes, which another rule says
    waiting = min(seen.slept_s, seen.outside_s)
    if seen.share(waiting) < 0.1:
        return None
    return Finding(
        "waiting",
        "The call sleeps or waits for files or the network.",
        bound=seen.share(waiting),
        evidence=(f"{waiting * 1e3:.3g} ms a call outside all operators, off the processor",),
        advice="move loading out of the call, or overlap it with computing",
        formula="time off the processor outside all operators / call",
        before="y = model(load(path))",
        after="x = load(path)  # once, or in a loader's workers\ny = model(x)",
    )
