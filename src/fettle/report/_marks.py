"""Marks that several charts have in common."""

from __future__ import annotations

from typing import Any

import altair as alt

from fettle.page import theme
from fettle.page.theme import LEVERS, QUIET, WARN, Drawn

Rows = list[dict[str, Any]]


def level(value: float, text: str, colour: str = WARN) -> list[alt.Chart]:
    """A dashed line across the chart at `value` of its y axis, with its name."""
    base = alt.Chart(theme.data([{"y": value, "text": text}])).encode(y="y:Q")
    return [
        base.mark_rule(color=colour, strokeDash=[6, 3]),
        base.mark_text(color=colour, align="left", dy=-7, fontSize=11).encode(x=alt.value(4), text="text:N"),
    ]


def sized(height: float, *layers: alt.Chart) -> Drawn:
    """The layers as one chart of this height, as wide as the page has room for."""
    return alt.layer(*layers).properties(width="container", height=height)


def by_part(name: str, parts: tuple[str, ...], columns: int) -> alt.Color:
    """The colours of stacked parts; the last one is what is left, and quiet."""
    scale = alt.Scale(domain=list(parts), range=[*LEVERS[: len(parts) - 1], QUIET])
    return alt.Color(f"{name}:N", scale=scale, title=None, legend=alt.Legend(columns=columns))
