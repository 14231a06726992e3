"""The look that all charts share, in light and in dark, and their way to SVG and PNG."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import altair as alt

ACCENT = "#1f8a99"
QUIET = "#8a949e"
WARN = "#c2562d"
LEVERS = ("#1f77a8", "#d27a22", "#2f9a6c", "#b4588e", "#7d6bc4", "#a48a17", "#c24d4d")
"""Middle tones, so that they stand out on white and on near-black alike, and apart for most colour-blind eyes."""

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
VEGALITE = "6.4"
Spec = dict[str, Any]
Drawn: TypeAlias = "alt.LayerChart | alt.FacetChart"
"""What altair says that a layered chart may become once it is given properties."""


def data(rows: list[dict[str, Any]]) -> alt.Data:
    """Rows as data inside the chart."""
    import altair as alt

    return alt.Data(values=rows)  # type: ignore[no-untyped-call]


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
    return _svg(json.dumps(_sized(spec, width)), dark)


def png(spec: Spec, width: int, scale: float = 2.0) -> bytes:
    """The chart as a light PNG."""
    import vl_convert

    return bytes(vl_convert.svg_to_png(svg(spec, width), scale=scale))


@lru_cache(maxsize=64)
def _svg(spec: str, dark: bool) -> str:
    """Drawn once for a page and for the files beside it."""
    import vl_convert

    return str(vl_convert.vegalite_to_svg(spec, vl_version=VEGALITE, config=config(dark)))


def _sized(spec: Spec, width: int) -> Spec:
    """A width of its own in place of the page's; charts side by side bring theirs."""
    sized = {"padding": 16, **spec}
    return {**sized, "width": width} if spec.get("width") == "container" else sized
