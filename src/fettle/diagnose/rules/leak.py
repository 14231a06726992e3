"""The rule `leak`."""

from __future__ import annotations

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.units import size_text


def look(seen: Evidence) -> Finding | None:
    """Tensors that pile up."""
    graph = seen.kept.graphs >= 1
    if seen.kept.tensors < 1 or not (graph or seen.kept.bytes >= 1 << 20):  # a number kept for a log is no leak
        return None
    written = sum(op.written for op in seen.operations)
    what = ", with the autograd graphs that made them" if graph else ""
    count = f"{seen.kept.tensors:.3g} tensor{'s' if seen.kept.tensors >= 2 else ''}, {size_text(seen.kept.bytes)},"
    return Finding(
        "leak",
        f"{count} more stay alive after every call{what}.",
        bound=min(0.999, seen.share(written * seen.fresh.s_per_byte)) if graph else 0.0,
        bound_bytes=int(seen.kept.bytes),
        evidence=("counted after a full collection, call after call",),
        advice="keep loss.detach() or loss.item(), not the loss" if graph else "look for a list or cache that grows",
        formula="bytes that its operators write x measured cost of a fresh page / call: kept memory is never reused",
        before="losses.append(loss)",
        after="losses.append(loss.detach())",
    )
