"""The rule `duplicate-data`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding


def look(seen: Evidence) -> Finding | None:
    """Batches that the model has seen before in the same pass."""
    again, run = seen.batches.seen_before, seen.batches.run
    if run < 4 or again < 0.2 * run:
        return None
    return Finding(
        "duplicate-data",
        f"{again} of {run} batches of a call have the same values as an earlier one.",
        bound=again / run,
        evidence=("equal contents, found by hashing what the outermost modules are given",),
        advice="an IterableDataset gives every worker all its rows: divide them by get_worker_info()",
        formula="batches seen before / batches",
        before="def __iter__(self):\n    yield from self.rows",
        after="def __iter__(self):\n    me = get_worker_info()\n    yield from self.rows[me.id :: me.num_workers]",
    )
