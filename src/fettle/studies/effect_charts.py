"""Pictures of a fit: the effects with their intervals, which pairs bring more or less together, and how what a level
brings differs from place to place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import altair as alt

from fettle.measure import Interval
from fettle.page import Figure, picture, theme
from fettle.page.theme import ACCENT, LEVERS, MORE, NEUTRAL, QUIET, WARN, coloured, rule
from fettle.studies.analysis import Analysis
from fettle.studies.effects import Effect
from fettle.studies.model import Level
from fettle.studies.sentences import between, times

_MOST = 24
_MOST_CROSSED = 30
"""Levels of a matrix, those of the surest effects."""
_MOST_ACROSS, _FEWEST = 90, 4
"""Most dots of a chart over several places, but for so many levels."""
_ROW = 20
_COLOURS = {"helped": ACCENT, "hurt": WARN, "same": QUIET, "cannot tell": QUIET}


def figures(name: str, analysis: Analysis) -> list[Figure | None]:
    return [_forest(f"forest-{name}", analysis), _matrix(f"matrix-{name}", analysis)]


def across(name: str, title: str, better: str, places: Mapping[str, Mapping[Level, Interval]]) -> Figure | None:
    """The same level in several places: on each model, or at each level of a factor such as the environment. Levels of
    which places differ most come first."""
    gains: dict[Level, dict[str, Interval]] = {}
    for place, found in places.items():
        for level, ratio in found.items():
            if ratio.low > 0 and math.isfinite(ratio.high):
                gains.setdefault(level, {})[place] = ratio
    told = {level: found for level, found in gains.items() if len(found) > 1}
    if not told:
        return None
    ranked = sorted(told, key=lambda level: -_apart(told[level].values()))
    shown = ranked[: max(_FEWEST, _MOST_ACROSS // len(places))]
    rows = [
        {"level": "=".join(level), "place": place, "ratio": ratio.estimate, "low": ratio.low, "high": ratio.high,
         "text": f"{times(ratio.estimate)} {between(ratio)}"}
        for level in shown for place, ratio in told[level].items()
    ]  # fmt: skip
    order = list(places)
    base = alt.Chart(theme.data(rows)).encode(
        y=alt.Y("level:N", sort=["=".join(level) for level in shown], title=None, axis=alt.Axis(labelLimit=230)),
        yOffset=alt.YOffset("place:N", sort=order),
        color=alt.Color("place:N", sort=order, scale=alt.Scale(domain=order, range=[*LEVERS, *MORE]),
                        legend=alt.Legend(title=None, columns=3, labelLimit=200)),
        tooltip=["level:N", "place:N", "text:N"],
    )  # fmt: skip
    line = base.mark_rule(strokeWidth=1.6).encode(x=_times(better), x2="high:Q")
    dot = base.mark_point(filled=True, size=50, opacity=1).encode(x="ratio:Q")
    words = "; ".join(
        f"{'='.join(level)} " + ", ".join(f"{times(told[level][place].estimate)} {place}" for place in told[level])
        for level in shown[:6]
    )
    words = f"What each level brings, those that differ most first: {words}."
    height = max(2 * _ROW, 12 * len(places)) * len(shown)
    return picture(name, title, words, height, rule("x", 1, QUIET, NEUTRAL), line, dot)


def _times(better: str) -> alt.X:
    return alt.X("low:Q", title=f"times {better} (log)", scale=alt.Scale(type="log", nice=False, padding=10),
                 axis=alt.Axis(tickCount=6, labelExpr="format(datum.value, '~g') + 'x'"))  # fmt: skip


def _apart(ratios: Iterable[Interval]) -> float:
    """How far apart they are, as a logarithm."""
    logs = [math.log(ratio.estimate) for ratio in ratios]
    return max(logs) - min(logs)


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
            "text": f"{times(effect.ratio.estimate)} {between(effect.ratio)}",
        })  # fmt: skip
    if not rows:
        return None
    base = alt.Chart(theme.data(rows)).encode(
        y=alt.Y("effect:N", sort=[row["effect"] for row in rows], title=None, axis=alt.Axis(labelLimit=230)),
        color=coloured("reading", _COLOURS, columns=4),
        tooltip=["effect:N", "text:N", "reading:N"],
    )
    line = base.mark_rule(strokeWidth=1.6).encode(x=_times(analysis.response.better), x2="high:Q")
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
    surest: dict[Level, float] = {}
    for effect in analysis.effects:
        for level in effect.levels if effect.ratio is not None else ():
            surest[level] = max(surest.get(level, 0.0), effect.certain)
    known = set(sorted(surest, key=lambda level: -surest[level])[:_MOST_CROSSED])
    shown = [effect for effect in analysis.effects if known.issuperset(effect.levels)]
    order = ["=".join(effect.levels[0]) for effect in shown if len(effect.levels) == 1]
    for effect in shown:
        names = ["=".join(level) for level in effect.levels]
        row: dict[str, Any] = {"effect": effect.label, "claimed": effect.is_claimed}
        if effect.ratio is None:
            row |= {"gain": None, "text": "?", "reading": effect.why or "cannot tell"}
        else:
            ratio = effect.ratio.estimate
            row |= {"gain": max(-1.0, min(1.0, math.log(ratio))), "text": times(ratio)[:-1], "reading": effect.reading}
        for a, b in sorted({(names[0], names[-1]), (names[-1], names[0])}):
            rows.append({**row, "a": a, "b": b})
    if len(order) < 2 or not any(len(effect.levels) > 1 for effect in analysis.effects):
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
        "; ".join(f"{one.label} {times(one.ratio.estimate)}" for one in pairs if one.ratio) or "none that is not chance"
    )
    words = f"Matrix of {len(order)} levels: what two bring together beyond the product of each. Largest: {largest}."
    return picture(name, _title("Interactions", analysis), words, max(120, 30 * len(order)), cells, text)
