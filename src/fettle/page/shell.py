"""The one shell of all pages: their head, their look, their charts and the library that draws them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import jinja2

from fettle.errors import UsageError
from fettle.files import cache_folder, read_text, write_text
from fettle.page import theme
from fettle.page.blocks import Figure, clean
from fettle.units import count_text, size_text

if TYPE_CHECKING:
    import altair as alt


def as_spec(chart: theme.Drawn | alt.HConcatChart) -> theme.Spec:
    """The chart as plain data, without what the page brings: its look, and any address that could be fetched."""
    spec: theme.Spec = chart.to_dict()
    for key in ("$schema", "config"):
        spec.pop(key, None)
    return spec


def picture(name: str, title: str, words: str, height: float | alt.Step, *layers: alt.Chart) -> Figure:
    """A chart of these layers, ready to be drawn anywhere; `words` say what it shows."""
    return Figure(name, title, words, as_spec(theme.sized(height, *layers)))


def render(
    package: str, template: str, title: str, figures: Sequence[Figure] = (), /, *, stills: bool = True, **context: Any
) -> str:
    """A page: a template of a package, which extends `shell.html.j2`. Everything put into it is escaped.

    `figures` are drawn by a script, and with `stills` as SVG where there is none, and on paper. A page without any
    may run no scripts, unless it has `scripts` in its context.
    """
    page = {
        "title": title,
        "figures": {f.name: {"figure": f, "svg": f.svg() if stills else ""} for f in figures},
    }
    if figures:
        page["specs"] = script_json({f.name: f.spec for f in figures})
        page["configs"] = script_json({"light": theme.config(dark=False), "dark": theme.config(dark=True)})
        page["bundle"] = bundle()
    return _template(package, template).render(page, **context)


@lru_cache(maxsize=8)
def _template(package: str, name: str) -> jinja2.Template:
    """A page's template, which may use this room's."""
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(package, "."), jinja2.PackageLoader("fettle.page", ".")])
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": size_text, "counted": count_text}
    return environment.get_template(name)


def script_json(data: Any) -> str:
    """JSON that cannot end the script element it stands in, whatever strings it holds."""
    text = json.dumps(data, default=str, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def bundle() -> str:
    """Vega's scripts as one text, from the library that is installed: the page needs no network. To join them takes
    longer than all else of a page, so the text is kept for the next process."""
    with contextlib.suppress(UsageError):  # nowhere to keep it
        kept = cache_folder("pages") / f"vega-{theme.VEGALITE}-{metadata.version('vl-convert-python')}.js"
        if not kept.is_file():
            write_text(kept, _joined())
        return read_text(kept)
    return _joined()


@lru_cache(maxsize=1)
def _joined() -> str:
    import vl_convert

    snippet = "window.vegaEmbed = vegaEmbed;"
    return str(vl_convert.javascript_bundle(snippet, vl_version=theme.VEGALITE)).replace("</script", "<\\/script")


def draw(spec: theme.Spec, kind: str, width: int = 760) -> bytes:
    """One chart as `png`, `svg` or a page of its own (`html`), in the light look."""
    spec = clean(spec)
    if kind == "html":
        figure = Figure("one", "", "", spec)
        return render("fettle.page", "chart.html.j2", "chart", [figure], stills=False).encode()
    return theme.png(spec, width) if kind == "png" else theme.svg(spec, width).encode()
