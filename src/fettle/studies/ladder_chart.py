"""The ladder: every step in its order, those that hurt as well, with throughput, memory and error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from fettle.page import Figure, as_spec, clean, theme
from fettle.page.theme import ACCENT, LEVERS, QUIET, WARN, captions, line_by_line, sized
from fettle.studies.running import Rung
from fettle.units import size_text

_STEP = 46


def figure(
    name: str, workload: str, rungs: Sequence[Rung], published: Mapping[str, float] | None = None
) -> Figure | None:
    """Bars of throughput with the speed-up's interval, each under its own line of text.

    What was `published` of a step, as a ratio to the first, stands beside its bar at the speed that ours would have.
    """
    rows = [_row(place, rung) for place, rung in enumerate(rungs)]
    baseline = rungs[0].per_second if rungs else math.nan
    for row, rung in zip(rows, rungs, strict=True):
        ratio = beside(rung, rungs, published or {})
        row["published"] = baseline * ratio if ratio is not None and math.isfinite(baseline) else None
        row["text"] += f" · published {ratio:.2f}x" if ratio is not None else ""
    drawn = [row for row in rows if row["value"] > 0]
    if not drawn:
        return None
    top = max(max(row["value"], row["published"] or 0.0) for row in rows)
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
    others = (
        base.transform_filter("isValid(datum.published)")
        .mark_point(shape="diamond", filled=True, size=70, yOffset=10, color=LEVERS[4], opacity=1)
        .encode(x=alt.X("published:Q", axis=None, scale=ends))
    )
    shown = [others] if any(row["published"] for row in rows) else []
    chart = sized(_STEP * len(rows), bar, interval, *shown, *captions(base, "width * 0.55"))
    words = (
        ("Diamonds: as published. " if shown else "")
        + "Bars: "
        + "; ".join(f"{row['label']} {row['text']}" for row in rows)
        + "."
    )
    return Figure(name, clean(f"Every step: {workload}"), clean(words), clean(as_spec(chart)))


def beside(rung: Rung, rungs: Sequence[Rung], published: Mapping[str, float]) -> float | None:
    """What was published of a step that has the same name, ``precision=bf16``, or is the first; None for nothing."""
    if rung is rungs[0]:
        return 1.0 if published else None
    return published.get(rung.label)


def unmatched(steps: Mapping[str, Sequence[Rung]], published: Mapping[str, float]) -> list[str]:
    """Steps that were published and are none of ours; the first is as given, whatever it is called."""
    ours = {rung.label for rungs in steps.values() for rung in rungs}
    return [step for step in list(published)[1:] if step not in ours]


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
            baseline = rung.per_second / rung.speedup.estimate
            row["low"], row["high"] = baseline * rung.speedup.low, baseline * rung.speedup.high
    return row


def _details(rung: Rung) -> list[str]:
    found = [size_text(rung.peak_bytes)] if rung.peak_bytes else []
    return [*found, f"error {rung.error:.1e}"] if math.isfinite(rung.error) else found
