"""The look that all charts share, in light and in dark, and their way to SVG and PNG."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import altair as alt

from fettle.units import size_text

ACCENT = "#1f8a99"
QUIET = "#8a949e"
WARN = "#c2562d"
LEVERS = BLUE, ORANGE, GREEN, PINK, VIOLET, OLIVE, RED = (
    "#1f77a8", "#d27a22", "#2f9a6c", "#b4588e", "#7d6bc4", "#a48a17", "#c24d4d"
)  # fmt: skip
"""Middle tones, so that they stand out on white and on near-black alike, and apart for most colour-blind eyes."""
MORE = INDIGO, WINE, BROWN, MOSS, SAND, SLATE = "#4f5fb0", "#8c2f39", "#8a6d3b", "#5c8d2f", "#d9a05b", "#5b7083"
"""For charts with more parts than that."""

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
VEGALITE = "6.4"
Spec = dict[str, Any]
Drawn: TypeAlias = "alt.LayerChart | alt.FacetChart"
"""What altair says that a layered chart may become once it is given properties."""


def data(rows: list[dict[str, Any]]) -> alt.Data:
    """Rows as data inside the chart."""
    return alt.Data(values=rows)  # type: ignore[no-untyped-call]


def pale(colour: str, share: float = 0.5) -> str:
    """A lighter tone of a colour: so much of the way to white."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)


def config(dark: bool) -> Spec:
    """The Vega-Lite configuration; the charts themselves name no ink and no paper."""
    ink, muted, line = ("#e6e9ec", "#a3adb7", "#323a42") if dark else ("#1c2126", "#59636e", "#e2e5e8")
    return {
        "background": "transparent" if dark else "white",
        "font": FONT,
        "view": {"stroke": None},
        "text": {"color": ink, "fontSize": 12},
        "rule": {"color": muted},
        "axis": {
            "labelColor": muted,
            "titleColor": muted,
            "titleFontWeight": "normal",
            "titleFontSize": 12,
            "labelFontSize": 11,
            "gridColor": line,
            "gridOpacity": {"condition": {"test": "datum.label === ''", "value": 0}, "value": 1},  # of a log axis
            "domain": False,
            "ticks": False,
            "labelPadding": 6,
        },
        "legend": {
            "labelColor": ink,
            "titleColor": muted,
            "titleFontWeight": "normal",
            "labelFontSize": 12,
            "titleFontSize": 12,
            "orient": "bottom",
            "direction": "horizontal",
            "layout": {"bottom": {"direction": "vertical", "anchor": "start"}},  # side by side two may be too wide
            "symbolStrokeWidth": 2,
        },
    }


def svg(spec: Spec, width: int, dark: bool = False) -> str:
    """The chart as an SVG, light unless asked otherwise: for paper and for readers without scripts."""
    padded = {"padding": 16, **spec}
    if spec.get("width") == "container":  # charts side by side bring their own
        padded["width"] = width
    return _svg(json.dumps(padded), dark)


def png(spec: Spec, width: int) -> bytes:
    """The chart as a light PNG."""
    import vl_convert

    return bytes(vl_convert.svg_to_png(svg(spec, width), scale=2.0))


@lru_cache(maxsize=64)
def _svg(spec: str, dark: bool) -> str:
    """Drawn once for a page and for the files beside it."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(spec, vl_version=VEGALITE, config=config(dark)))


Rows = list[dict[str, Any]]
LIMIT, NEUTRAL = (6, 3), (2, 3)
"""Dashes of a line that should not be crossed, and of one that only divides."""


def rule(axis: str, value: float, colour: str = WARN, dashes: Sequence[int] = LIMIT, **channel: Any) -> alt.Chart:
    """A dashed line across the chart at `value` of its x or y axis."""
    kind = alt.X if axis == "x" else alt.Y
    base = alt.Chart(data([{axis: value}])).mark_rule(color=colour, strokeDash=list(dashes), strokeWidth=1.5)
    return base.encode(kind(f"{axis}:Q", **channel))  # type: ignore[no-any-return]


def level(value: float, text: str, colour: str = WARN) -> list[alt.Chart]:
    """A `rule` at `value` of the y axis, with its name."""
    name = alt.Chart(data([{"y": value, "text": text}])).encode(y="y:Q", x=alt.value(4), text="text:N")
    return [rule("y", value, colour), name.mark_text(color=colour, align="left", dy=-7, fontSize=11)]


def moment(value: float, text: str, colour: str = WARN, *, near_end: bool = False) -> list[alt.Chart]:
    """A `rule` at `value` of the x axis, with its name at the top: to the left of it where the right end is near."""
    base = alt.Chart(data([{"x": value, "text": text}])).encode(x="x:Q", y=alt.value(8), text="text:N")
    if near_end:
        return [rule("x", value, colour), base.mark_text(color=colour, align="right", dx=-6, fontSize=11)]
    return [rule("x", value, colour), base.mark_text(color=colour, align="left", dx=6, fontSize=11)]


def sized(height: float | alt.Step, *layers: alt.Chart) -> Drawn:
    """The layers as one chart of this height, as wide as the page has room for."""
    return alt.layer(*layers).properties(width="container", height=height)


def ladder(
    rows: Rows, kinds: Mapping[str, tuple[str, float]], tooltip: Sequence[str | alt.Tooltip], top: float, room: str,
    step: float = 48, more: Callable[[alt.Chart], Sequence[alt.Chart]] = lambda base: (),
) -> Drawn:  # fmt: skip
    """A bar as long as its `value` for each row, in their order, under its `label` and its `text` on a line of their
    own: long names and phones leave no room at the side. From `low` to `high` a line, where there is an interval.

    Args:
        kinds: Colour and opacity by the row's `kind`.
        top: The `value` at which the axis ends.
        room: What a label may take of the ``width``.
        more: Further layers, of the rows of `base`.
    """
    base = alt.Chart(data([{**row, "order": place} for place, row in enumerate(rows)])).encode(
        y=alt.Y("order:O", axis=None, scale=alt.Scale(paddingInner=0, paddingOuter=0)), tooltip=list(tooltip)
    )
    colours, strengths = zip(*kinds.values(), strict=True)
    bars = base.mark_bar(height=13, yOffset=9, cornerRadiusEnd=2).encode(
        x=alt.X("value:Q", axis=None, scale=alt.Scale(domain=[0, top], nice=False)),
        color=alt.Color("kind:N", scale=alt.Scale(domain=list(kinds), range=list(colours)), legend=None),
        opacity=alt.Opacity("kind:N", scale=alt.Scale(domain=list(kinds), range=list(strengths)), legend=None),
    )
    label = base.mark_text(align="left", dy=-9, limit=alt.ExprRef(room)).encode(x=alt.value(0), text="label:N")
    text = base.mark_text(align="right", dy=-9, fontWeight=600).encode(x=alt.value("width"), text="text:N")
    known = base.transform_filter("isValid(datum.low)")
    line = known.mark_rule(strokeWidth=1.5, yOffset=9, clip=True).encode(x=alt.X("low:Q", axis=None), x2="high:Q")
    ends = known.mark_tick(thickness=1.5, height=8, yOffset=9, clip=True)
    whiskers = [line, *(ends.encode(x=alt.X(f"{side}:Q", axis=None)) for side in ("low", "high"))]
    return sized(step * len(rows), bars, *whiskers, *more(base), label, text)


def front_dots(base: alt.Chart, size: int = 70) -> alt.Chart:
    """A dot for each row: those of the Pareto front, whose field `front` is true, before those that are beaten."""
    return base.mark_point(filled=True, size=size).encode(  # type: ignore[no-any-return]
        color=alt.condition("datum.front", alt.value(ACCENT), alt.value(QUIET)),
        opacity=alt.condition("datum.front", alt.value(0.85), alt.value(0.3)), order=alt.Order("front:N"),
    )  # fmt: skip


def coloured(field: str, colours: Mapping[str, str], **legend: Any) -> alt.Color:
    """A colour for each name, in their order."""
    scale = alt.Scale(domain=list(colours), range=list(colours.values()))
    return alt.Color(f"{field}:N", title=None, sort=list(colours), scale=scale, legend=alt.Legend(**legend))


def by_name(field: str, names: Sequence[str], **legend: Any) -> alt.Color:
    """The usual colours of lines, fourteen at most."""
    return coloured(field, dict(zip(names, [ACCENT, *LEVERS[1:], *LEVERS], strict=False)), **legend)


def by_part(field: str, parts: Sequence[str], columns: int) -> alt.Color:
    """The colours of stacked parts; the last one is what is left, and quiet."""
    return coloured(field, dict(zip(parts, [*LEVERS[: len(parts) - 1], QUIET], strict=True)), columns=columns)


def peaks(
    planned: Mapping[str, Mapping[str, int]], parts: Sequence[str], unit: str, title: str, limit: float | None,
    columns: int, axis: alt.Axis,
) -> list[alt.Chart]:  # fmt: skip
    """Stacked bars of what a rank of each strategy needs at its peak, bytes by part, drawn in MiB or GiB; and the
    `limit`, unless it is so far beyond the bars that it would squeeze them."""
    scale = {"MiB": 1 << 20, "GiB": 1 << 30}[unit]
    rows: Rows = [
        {"strategy": name, "part": part, "order": order, "x": sizes.get(part, 0) / scale,
         "size": size_text(sizes.get(part, 0))}
        for name, sizes in planned.items() for order, part in enumerate(parts)
    ]  # fmt: skip
    bars = alt.Chart(data(rows)).encode(
        x=alt.X("x:Q", title=f"{title}, {unit}"), y=alt.Y("strategy:N", sort=list(planned), title=None, axis=axis),
        color=by_part("part", parts, columns), order="order:Q", tooltip=["strategy:N", "part:N", "size:N"],
    )  # fmt: skip
    near = limit is not None and limit <= 1.5 * max(sum(sizes.values()) for sizes in planned.values())
    return [bars.mark_bar(height=16), *([rule("x", limit / scale)] if limit and near else [])]
