"""What every page with charts shares: the look, the chart library in the page, data that cannot leave its script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import jinja2

from fettle.report import _theme
from fettle.report._clean import clean

if TYPE_CHECKING:
    from fettle.report.charts import Figure


@lru_cache(maxsize=4)
def template(package: str, name: str) -> jinja2.Template:
    """A page template of a package, which may include this room's `style.css`; everything put into it is escaped."""
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(package, "."), jinja2.PackageLoader("fettle.report", ".")])
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


def configs() -> dict[str, _theme.Spec]:
    """The chart configuration for light and for dark."""
    return {"light": _theme.config(dark=False), "dark": _theme.config(dark=True)}


@lru_cache(maxsize=1)
def bundle() -> str:
    """Vega's scripts as one text, from the library that is installed: the page needs no network."""
    import vl_convert

    snippet = "window.vegaEmbed = vegaEmbed;"
    return str(vl_convert.javascript_bundle(snippet, vl_version=_theme.VEGALITE)).replace("</script", "<\\/script")


def draw(spec: _theme.Spec, kind: str, width: int = 760) -> bytes:
    """One chart as `png`, `svg` or a page of its own (`html`), in the light look."""
    spec = clean(spec)
    if kind == "html":
        page: str = template("fettle.report", "chart.html.j2").render(
            spec=script_json(spec), configs=script_json(configs()), bundle=bundle()
        )
        return page.encode()
    return _theme.png(spec, width) if kind == "png" else _theme.svg(spec, width).encode()
