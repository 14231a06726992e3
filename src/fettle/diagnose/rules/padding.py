"""The rule `padding`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """Positions that only fill up a batch."""
    if seen.padding.share < 0.1:
        return None
    return Finding(
        "padding",
        f"{seen.padding.share:.0%} of the positions in the inputs are padding.",
        bound=seen.padding.share,
        evidence=(f"seen by {seen.padding.where}",),
        advice="batch rows of like length together, or use nested tensors",
        formula="padded positions / all positions",
        before="batch = pad_sequence(rows)",
        after="batch = pad_sequence(rows_of_like_length)  # fettle.inputs.bucket_by_length",
    )
