"""The ladder: every step in its order, those that hurt as well, with throughput, memory and error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from fettle.page import Figure, as_spec, clean, theme
from fettle.page.marks import captions, line_by_line, sized
from fettle.page.theme import ACCENT, QUIET, WARN
from fettle.studies.running import Rung
from fettle.units import size_text

_STEP = 46


def figure(name: str, workload: str, rungs: Sequence[Rung]) -> Figure | None:
    """Bars of throughput with the speed-up's interval, each under its own line of text."""
    rows = [_row(place, rung) for place, rung in enumerate(rungs)]
    drawn = [row for row in rows if row["value"] > 0]
    if not drawn:
        return None
    top = max(row["value"] for row in drawn)
    base = alt.Chart(theme.data(rows)).encode(
        y=line_by_line(),
        tooltip=["recipe:N", "text:N", "detail:N"],
    )
    kinds = alt.Scale(domain=["given", "kept", "left out", "failed"], range=[QUIET, ACCENT, WARN, WARN])
    ends = alt.Scale(domain=[0, 1.25 * top], nice=False)
    bar = base.mark_bar(height=12, yOffset=10, cornerRadiusEnd=2).encode(
        x=alt.X("value:Q", axis=None, scale=ends),
        color=alt.Color("kind:N", scale=kinds, legend=None),
        opacity=alt.condition("datum.kind === 'left out'", alt.value(0.55), alt.value(0.85)),
    )
    interval = (
        base.transform_filter("isValid(datum.low)")
        .mark_rule(strokeWidth=1.4, yOffset=10, clip=True)
        .encode(x=alt.X("low:Q", axis=None, scale=ends), x2="high:Q")
    )
    chart = sized(_STEP * len(rows), bar, interval, *captions(base, "width * 0.55"))
    words = "Bars: " + "; ".join(f"{row['label']} {row['text']}" for row in rows) + "."
    return Figure(name, clean(f"Every step: {workload}"), clean(words), clean(as_spec(chart)))


def _row(place: int, rung: Rung) -> dict[str, Any]:
    """One step: what it is worth over the workload as given, and its memory and error."""
    known = rung.speedup is not None and math.isfinite(rung.per_second)
    kind = "given" if place == 0 else "failed" if not known else "kept" if rung.kept else "left out"
    row: dict[str, Any] = {
        "order": place, "label": rung.label if place == 0 or kind == "kept" else f"{rung.label} ({kind})",
        "recipe": rung.recipe, "value": rung.per_second if known else 0.0, "kind": kind,
        "text": rung.reason[:60] or "failed", "low": None, "high": None,
        "detail": " · ".join(_details(rung)) or "–",
    }  # fmt: skip
    if known and rung.speedup is not None:
        row["text"] = " · ".join([f"{rung.per_second:.4g}/s", f"{rung.speedup.estimate:.2f}x", *_details(rung)])
        if rung.speedup.low > 0 and rung.speedup.high < math.inf and place:
            given = rung.per_second / rung.speedup.estimate
            row["low"], row["high"] = given * rung.speedup.low, given * rung.speedup.high
    return row


def _details(rung: Rung) -> list[str]:
    found = [size_text(rung.peak_bytes)] if rung.peak_bytes else []
    return [*found, f"error {rung.error:.1e}"] if math.isfinite(rung.error) else found
