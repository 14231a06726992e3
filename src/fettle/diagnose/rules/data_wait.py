"""The rule `data-wait`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import LEAST


def look(seen: Evidence) -> Finding | None:
    """A loop that waits for its loader."""
    waited = seen.share(seen.loading.seconds)
    if waited < LEAST:
        return None
    lines = [f"{seen.loading.seconds * 1e3:.3g} ms of {seen.wall_s * 1e3:.3g} ms a call are spent in it"]
    if seen.loading.at_hand_s:
        lines.append(f"the same call with its batches at hand takes {seen.loading.at_hand_s * 1e3:.3g} ms")
    return Finding(
        "data-wait",
        f"The loop waits for its DataLoader ({waited:.0%} of a call).",
        bound=min(0.999, max(waited, 1 - seen.loading.at_hand_s / seen.wall_s if seen.loading.at_hand_s else 0.0)),
        where=("the DataLoader",),
        evidence=tuple(lines),
        parts=(("in the DataLoader", waited), ("the rest of the call", 1 - waited)),
        advice="workers that persist, cheaper transforms: fettle data TARGET finds the setting",
        formula="1 - call with its batches at hand / call; at least the time in the loader / call",
        before="DataLoader(dataset, batch_size=32)",
        after="DataLoader(dataset, batch_size=32, num_workers=N, persistent_workers=True)",
    )
