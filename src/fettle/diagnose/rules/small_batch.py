"""The rule `small-batch`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """A loader that hands out so few rows that the work around a batch comes once for each."""
    rows, batches = seen.loading.rows, seen.loading.batches
    if not 0 < rows <= 4 or batches < 16:
        return None
    return Finding(
        "small-batch",
        f"The loader hands out {rows} row{'s' if rows > 1 else ''} at a time, {batches} times a call.",
        bound=min(0.999, (1 - seen.share(seen.ideal_s())) * (1 - 1 / batches)),
        where=("the DataLoader",),
        evidence=(f"{seen.wall_s / batches * 1e3:.3g} ms for each batch",),
        advice="a larger batch_size: the host's work around a batch is the same for many rows",
        formula="(call - products at the measured peak) x (1 - 1 / batches) / call",
        before=f"DataLoader(dataset, batch_size={rows})",
        after="DataLoader(dataset, batch_size=32)",
    )
