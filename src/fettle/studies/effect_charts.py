"""Pictures of a fit: the effects with their intervals, and which pairs bring more or less together."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from fettle.page import Figure, picture, theme
from fettle.page.theme import ACCENT, NEUTRAL, QUIET, WARN, rule
from fettle.studies.analysis import Analysis
from fettle.studies.effects import Effect

_MOST = 24
_ROW = 20
_COLOURS = alt.Scale(domain=["helped", "hurt", "same", "cannot tell"], range=[ACCENT, WARN, QUIET, QUIET])


def figures(name: str, analysis: Analysis) -> list[Figure | None]:
    return [_forest(f"forest-{name}", analysis), _matrix(f"matrix-{name}", analysis)]


def _title(what: str, analysis: Analysis) -> str:
    return f"{what} on {analysis.response.name}" + (f": {analysis.group}" if analysis.group else "")


def _with_intervals(analysis: Analysis) -> list[Effect]:
    """The effects that have an interval, what is claimed first, then main effects before pairs."""
    known = [one for one in analysis.effects if one.ratio is not None and one.ratio.low > 0]
    return sorted(known, key=lambda one: (not one.is_claimed, -one.certain, len(one.levels)))


def _forest(name: str, analysis: Analysis) -> Figure | None:
    shown = _with_intervals(analysis)[:_MOST]
    rows: list[dict[str, Any]] = []
    for effect in shown:
        assert effect.ratio is not None
        kind = "together" if len(effect.levels) > 1 else "alone"
        rows.append({
            "effect": effect.label, "ratio": effect.ratio.estimate, "low": effect.ratio.low, "high": effect.ratio.high,
            "reading": effect.reading, "kind": kind,
            "text": f"{effect.ratio.estimate:.2f}x [{effect.ratio.low:.2f}, {effect.ratio.high:.2f}]",
        })  # fmt: skip
    if not rows:
        return None
    base = alt.Chart(theme.data(rows)).encode(
        y=alt.Y("effect:N", sort=[row["effect"] for row in rows], title=None, axis=alt.Axis(labelLimit=230)),
        color=alt.Color("reading:N", scale=_COLOURS, legend=alt.Legend(title=None, columns=4)),
        tooltip=["effect:N", "text:N", "reading:N"],
    )
    x = alt.X("low:Q", title=f"times {analysis.response.better} (log)",
              scale=alt.Scale(type="log", nice=False, padding=10),
              axis=alt.Axis(tickCount=6, labelExpr="format(datum.value, '~g') + 'x'"))  # fmt: skip
    line = base.mark_rule(strokeWidth=1.6).encode(x=x, x2="high:Q")
    shapes = alt.Scale(domain=["alone", "together"], range=["circle", "diamond"])
    dot = base.mark_point(filled=True, size=60).encode(
        x="ratio:Q", shape=alt.Shape("kind:N", scale=shapes, legend=alt.Legend(title=None))
    )
    words = "Effects with intervals: " + "; ".join(f"{row['effect']} {row['text']}" for row in rows[:8]) + "."
    one = rule("x", 1, QUIET, NEUTRAL)
    return picture(name, _title("Effects", analysis), words, _ROW * len(rows) + 10, one, line, dot)


def _matrix(name: str, analysis: Analysis) -> Figure | None:
    """Levels against levels: what two bring beyond the product of each; a main effect where a level meets itself."""
    rows: list[dict[str, Any]] = []
    known = {level for effect in analysis.effects if effect.ratio is not None for level in effect.levels}
    shown = [effect for effect in analysis.effects if known.issuperset(effect.levels)]
    order = ["=".join(effect.levels[0]) for effect in shown if len(effect.levels) == 1]
    for effect in shown:
        names = ["=".join(level) for level in effect.levels]
        row: dict[str, Any] = {"effect": effect.label, "claimed": effect.is_claimed}
        if effect.ratio is None:
            row |= {"gain": None, "text": "?", "reading": effect.why or "cannot tell"}
        else:
            ratio = effect.ratio.estimate
            row |= {"gain": max(-1.0, min(1.0, math.log(ratio))), "text": f"{ratio:.2f}", "reading": effect.reading}
        for a, b in sorted({(names[0], names[-1]), (names[-1], names[0])}):
            rows.append({**row, "a": a, "b": b})
    if len(order) < 2 or len(order) > 30 or not any(len(effect.levels) > 1 for effect in analysis.effects):
        return None
    base = alt.Chart(theme.data(rows)).encode(
        x=alt.X("a:N", sort=order, title=None, axis=alt.Axis(labelAngle=-40, labelLimit=140)),
        y=alt.Y("b:N", sort=order, title=None, axis=alt.Axis(labelLimit=160)),
        tooltip=["effect:N", alt.Tooltip("text:N", title="ratio"), "reading:N"],
    )
    scale = alt.Scale(domain=[-1, 0, 1], range=[WARN, "#8a949e22", ACCENT], clamp=True)
    cells = base.mark_rect(stroke=QUIET, strokeWidth=0.3).encode(color=alt.Color("gain:Q", scale=scale, legend=None))
    text = base.mark_text(fontSize=10).encode(
        text="text:N", opacity=alt.condition("datum.claimed", alt.value(1), alt.value(0.4))
    )
    pairs = [one for one in _with_intervals(analysis) if len(one.levels) > 1 and one.is_claimed][:6]
    largest = (
        "; ".join(f"{one.label} {one.ratio.estimate:.2f}x" for one in pairs if one.ratio) or "none that is not chance"
    )
    words = f"Matrix of {len(order)} levels: what two bring together beyond the product of each. Largest: {largest}."
    return picture(name, _title("Interactions", analysis), words, max(120, 30 * len(order)), cells, text)
