"""Marks that the charts of several rooms have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from fettle.page import theme
from fettle.page.theme import LEVERS, QUIET, WARN, Drawn

Rows = list[dict[str, Any]]
LIMIT, NEUTRAL = (6, 3), (2, 3)
"""Dashes of a line that should not be crossed, and of one that only divides."""


def rule(axis: str, value: float, colour: str = WARN, dashes: Sequence[int] = LIMIT, **channel: Any) -> alt.Chart:
    """A dashed line across the chart at `value` of its x or y axis."""
    kind = alt.X if axis == "x" else alt.Y
    base = alt.Chart(theme.data([{axis: value}])).mark_rule(color=colour, strokeDash=list(dashes), strokeWidth=1.5)
    return base.encode(kind(f"{axis}:Q", **channel))  # type: ignore[no-any-return]


def level(value: float, text: str, colour: str = WARN) -> list[alt.Chart]:
    """A `rule` at `value` of the y axis, with its name."""
    name = alt.Chart(theme.data([{"y": value, "text": text}])).encode(y="y:Q", x=alt.value(4), text="text:N")
    return [rule("y", value, colour), name.mark_text(color=colour, align="left", dy=-7, fontSize=11)]


def moment(value: float, text: str, colour: str = WARN, *, near_end: bool = False) -> list[alt.Chart]:
    """A `rule` at `value` of the x axis, with its name at the top: to the left of it where the right end is near."""
    base = alt.Chart(theme.data([{"x": value, "text": text}])).encode(x="x:Q", y=alt.value(8), text="text:N")
    if near_end:
        return [rule("x", value, colour), base.mark_text(color=colour, align="right", dx=-6, fontSize=11)]
    return [rule("x", value, colour), base.mark_text(color=colour, align="left", dx=6, fontSize=11)]


def captions(base: alt.Chart, room: str) -> list[alt.Chart]:
    """The fields `label` and `text` of each row on a line of their own, above its bar: long names and phones leave no
    room at the side. `room` is what the label may take of the ``width``."""
    label = base.mark_text(align="left", dy=-9, limit=alt.ExprRef(room)).encode(x=alt.value(0), text="label:N")
    return [label, base.mark_text(align="right", dy=-9, fontWeight=600).encode(x=alt.value("width"), text="text:N")]


def line_by_line() -> alt.Y:
    """Rows in the order of their field `order`, each with its captions."""
    return alt.Y("order:O", axis=None, scale=alt.Scale(paddingInner=0, paddingOuter=0))


def sized(height: float | alt.Step, *layers: alt.Chart) -> Drawn:
    """The layers as one chart of this height, as wide as the page has room for."""
    return alt.layer(*layers).properties(width="container", height=height)


def by_part(name: str, parts: Sequence[str], columns: int) -> alt.Color:
    """The colours of stacked parts; the last one is what is left, and quiet."""
    scale = alt.Scale(domain=list(parts), range=[*LEVERS[: len(parts) - 1], QUIET])
    return alt.Color(f"{name}:N", scale=scale, title=None, sort=list(parts), legend=alt.Legend(columns=columns))


def peaks(
    rows: Rows, parts: Sequence[str], title: str, limit: float | None, columns: int, axis: alt.Axis
) -> list[alt.Chart]:
    """Stacked bars of what a rank of each `strategy` needs at its peak, by `part` and `x` in the unit of the `title`,
    and the `limit`, unless it is so far beyond the bars that it would squeeze them."""
    named = list(dict.fromkeys(row["strategy"] for row in rows))
    bars = alt.Chart(theme.data(rows)).encode(
        x=alt.X("x:Q", title=title), y=alt.Y("strategy:N", sort=named, title=None, axis=axis),
        color=by_part("part", parts, columns), order="order:Q", tooltip=["strategy:N", "part:N", "size:N"],
    )  # fmt: skip
    longest = max(sum(row["x"] for row in rows if row["strategy"] == name) for name in named)
    far = limit is None or limit > 1.5 * longest
    return [bars.mark_bar(height=16), *([] if far or limit is None else [rule("x", limit)])]
