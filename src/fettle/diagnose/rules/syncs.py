"""The rule `syncs`."""

from __future__ import annotations

from fettle.diagnose.evidence import MATRIX, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._common import short


def look(seen: Evidence) -> Finding | None:
    """Places where the host would wait for the device."""
    # Of a compiled model, a line that breaks the graph is that rule's: mended there, it is mended here.
    breaks = {(b.file, b.line) for b in seen.compile.breaks} if seen.compiled and seen.compile else set()
    syncs = [sync for sync in seen.syncs if (sync.file, sync.line) not in breaks]
    if not syncs:
        return None
    count = sum(sync.count for sync in syncs)
    waits = "waits for the GPU" if seen.facts.device == "cuda" else "would wait for a GPU"
    # Without it the host could run ahead, and what was computed only to be looked at need not be: all but the products.
    return Finding(
        "syncs",
        f"The host {waits} {count} time{'s' if count > 1 else ''} a call.",
        bound=min(0.999, 1 - seen.share(seen.seconds(MATRIX) + seen.loading.seconds)),
        where=tuple(f"{short(s.file)}:{s.line}" for s in syncs[:6]),
        evidence=tuple(f"{short(s.file)}:{s.line}: {s.operator}, {s.count}x: {s.reason}" for s in syncs[:6]),
        count=count,
        advice="keep values on the device: torch.where, masks of fixed size, .item() once at the end",
        formula="(call - products - loader) / call",
        before="if loss.item() > limit:\n    x = x * 0.5",
        after="x = torch.where(loss > limit, x * 0.5, x)",
    )
