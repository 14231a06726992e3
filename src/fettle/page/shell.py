"""A page's template, its charts, the chart library inside it, and data that cannot leave its script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import altair as alt
import jinja2

from fettle.page import theme
from fettle.page.clean import clean


@dataclass(frozen=True)
class Figure:
    """One chart, ready to be drawn anywhere."""

    name: str
    """Short, for file names and anchors."""
    title: str
    alt: str
    """What it shows, in words."""
    spec: theme.Spec
    """Vega-Lite, without a configuration, as wide as what holds it."""

    def svg(self, width: int = 640) -> str:
        """As a light SVG."""
        return theme.svg(self.spec, width)

    def png(self, width: int = 640) -> bytes:
        """As a light PNG at twice the resolution."""
        return theme.png(self.spec, width)


def as_spec(chart: theme.Drawn | alt.HConcatChart) -> theme.Spec:
    """The chart as plain data, without what the page brings: its look, and any address that could be fetched."""
    spec: theme.Spec = chart.to_dict()
    for key in ("$schema", "config"):
        spec.pop(key, None)
    return spec


@lru_cache(maxsize=4)
def template(package: str, name: str) -> jinja2.Template:
    """A page template of a package, which may include this room's files; everything put into it is escaped."""
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(package, "."), jinja2.PackageLoader("fettle.page", ".")])
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(name)


def script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever strings it holds."""
    text = json.dumps(data, default=str)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def drawing(drawn: Sequence[Figure]) -> dict[str, Any]:
    """What a page needs to show figures: as data for a screen, as SVG for paper, and the library that draws."""
    return {
        "figures": [{"name": f.name, "title": f.title, "alt": f.alt, "svg": f.svg()} for f in drawn],
        "specs": script_json({f.name: f.spec for f in drawn}),
        "configs": script_json(configs()),
        "bundle": bundle(),
    }


def configs() -> dict[str, theme.Spec]:
    """The chart configuration for light and for dark."""
    return {"light": theme.config(dark=False), "dark": theme.config(dark=True)}


@lru_cache(maxsize=1)
def bundle() -> str:
    """Vega's scripts as one text, from the library that is installed: the page needs no network."""
    import vl_convert

    snippet = "window.vegaEmbed = vegaEmbed;"
    return str(vl_convert.javascript_bundle(snippet, vl_version=theme.VEGALITE)).replace("</script", "<\\/script")


def draw(spec: theme.Spec, kind: str, width: int = 760) -> bytes:
    """One chart as `png`, `svg` or a page of its own (`html`), in the light look."""
    spec = clean(spec)
    if kind == "html":
        page: str = template("fettle.page", "chart.html.j2").render(
            spec=script_json(spec), configs=script_json(configs()), bundle=bundle()
        )
        return page.encode()
    return theme.png(spec, width) if kind == "png" else theme.svg(spec, width).encode()
