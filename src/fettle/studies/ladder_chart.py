"""The ladder: every step in its order, those that hurt as well, with throughput, memory and error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from fettle.estimates import Interval
from fettle.page import Figure, as_spec
from fettle.page.theme import ACCENT, LEVERS, QUIET, WARN, ladder
from fettle.studies.batches import Grown
from fettle.studies.outcome import Rung
from fettle.units import size_text

_KINDS = {"given": (QUIET, 0.85), "kept": (ACCENT, 0.85), "left out": (WARN, 0.55), "failed": (WARN, 0.85)}
_MORE = 22
"""Pixels that a step needs more where its largest batch is shown."""


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
        most = rung.grown if rung.grown is not None and rung.grown.factor else None
        row["grown"] = most.per_second if most and most.speedup and most.speedup.is_known else None
        row["below"] = _at_most(rung.grown) if rung.grown is not None else ""
    if not any(row["value"] > 0 for row in rows):
        return None
    top = max(max(row["value"], row["published"] or 0.0, row["grown"] or 0.0) for row in rows)
    larger, shown = any(row["below"] for row in rows), any(row["published"] for row in rows)

    def more(base: alt.Chart) -> list[alt.Chart]:
        thin = base.mark_bar(height=6, yOffset=22, cornerRadiusEnd=2, color=LEVERS[1], opacity=0.85)
        below = base.mark_text(align="right", dy=35, fontSize=11).encode(x=alt.value("width"), text="below:N")
        diamond = base.mark_point(shape="diamond", filled=True, size=70, yOffset=10, color=LEVERS[4], opacity=1)
        known = [mark.transform_filter(f"isValid(datum.{field})").encode(x=alt.X(f"{field}:Q", axis=None))
                 for mark, field in ((thin, "grown"), (diamond, "published"))]  # fmt: skip
        return [*known, below] if larger else known  # a text takes room also where it is empty

    tooltip = ("recipe:N", "text:N", "detail:N")
    chart = ladder(rows, _KINDS, tooltip, 1.25 * top, "width * 0.55", 48 + _MORE * larger, more)
    steps = (", ".join(filter(None, (f"{row['label']} {row['text']}", row["below"]))) for row in rows)
    words = "Diamonds: as published. " * shown + "Thin bars: at the largest batch that fits. " * larger
    words += f"Bars: {'; '.join(steps)}."
    return Figure(name, f"Every step: {workload}", words, as_spec(chart))


def beside(rung: Rung, rungs: Sequence[Rung], published: Mapping[str, float]) -> float | None:
    """What was published of a step that has the same name, ``precision=bf16``, or is the first; None for nothing."""
    if rung is rungs[0]:
        return 1.0 if published else None
    return published.get(rung.label)


def unmatched(steps: Mapping[str, Sequence[Rung]], published: Mapping[str, float]) -> list[str]:
    """Published steps that ours do not have; the first is as given, whatever it is called."""
    ours = {rung.label for rungs in steps.values() for rung in rungs}
    return [step for step in list(published)[1:] if step not in ours]


def _row(place: int, rung: Rung) -> dict[str, Any]:
    """One step: what it is worth over the workload as given, and its memory and error."""
    ratio = rung.speedup if math.isfinite(rung.per_second) else None
    kind = "given" if place == 0 else "failed" if ratio is None else "kept" if rung.kept else "left out"
    row: dict[str, Any] = {
        "label": rung.label if place == 0 or kind == "kept" else f"{rung.label} ({kind})",
        "recipe": rung.recipe, "value": rung.per_second if ratio and ratio.is_known else 0.0, "kind": kind,
        "text": rung.reason[:60] or "failed", "low": None, "high": None,
        "detail": " · ".join(_details(rung)) or "–",
    }  # fmt: skip
    if ratio is not None:
        row["text"] = " · ".join([_speed(rung.per_second, ratio), *_details(rung)])
        if ratio.is_known and place:
            baseline = rung.per_second / ratio.estimate
            row["low"], row["high"] = baseline * ratio.low, baseline * ratio.high
    return row


def _at_most(most: Grown) -> str:
    """The largest batch of a step, what it is worth, what it needs, and why there is no larger one."""
    if not most.factor or most.speedup is None:
        return f"{'no batch fits' if most.why.startswith('x1 ') else 'largest batch unknown'}: {most.why[:60]}"
    size = f" · {size_text(most.peak_bytes)}" if most.peak_bytes else ""
    return f"batch {most.rows}: {_speed(most.per_second, most.speedup)}{size} · {most.why[:60]}"


def _speed(per_second: float, ratio: Interval) -> str:
    return f"{per_second:.4g}/s · {ratio.estimate:.2f}x" if ratio.is_known else ratio.text


def _details(rung: Rung) -> list[str]:
    notes = [size_text(rung.peak_bytes)] if rung.peak_bytes else []
    return [*notes, f"error {rung.error:.1e}"] if math.isfinite(rung.error) else notes
