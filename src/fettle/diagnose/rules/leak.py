"""The rule `leak`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.units import size_text


def look(seen: Evidence) -> Finding | None:
    """Tensors that pile up."""
    graph = seen.graphs_kept >= 1
    if seen.tensors_kept < 1 or not (graph or seen.bytes_kept >= 1 << 20):  # a number kept for a log is no leak
        return None
    written = sum(op.written for op in seen.operations)
    what = ", with the autograd graphs that made them" if graph else ""
    count = f"{seen.tensors_kept:.3g} tensor{'s' if seen.tensors_kept >= 2 else ''}, {size_text(seen.bytes_kept)},"
    return Finding(
        "leak",
        f"{count} more stay alive after every call{what}.",
        bound=min(0.999, seen.share(written * seen.fresh_s_per_byte)) if graph else 0.0,
        bound_bytes=int(seen.bytes_kept),
        evidence=("counted after a full collection, call after call",),
        advice="keep loss.detach() or loss.item(), not the loss" if graph else "look for a list or cache that grows",
        formula="bytes that its operators write x measured cost of a fresh page / call: kept memory is never reused",
        before="losses.append(loss)",
        after="losses.append(loss.detach())",
    )
