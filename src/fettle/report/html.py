"""The report: one HTML file that needs no network, readable on a phone, in the dark and on paper."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from fettle.recipe import write_text
from fettle.report import _facts, _format, _theme, _verdict
from fettle.report._clean import clean
from fettle.report.charts import Figure, figures
from fettle.result import Result


def write_report(result: Result, path: str | Path) -> None:
    """Write the page of `result` to `path`, whole or not at all. Raises `UsageError` when it cannot be written."""
    write_text(Path(path), page(result))


def page(result: Result) -> str:
    """The page as text: every chart once as data for a screen and once as SVG for paper, the library once for all."""
    result = clean(result)
    drawn = figures(result)
    return str(
        template().render(
            result=result,
            **drawing(drawn),
            fmt=_format,
            facts=_facts,
            say=_verdict,
            ranked=_facts.ranked(result),
            failed=_facts.failed(result),
            checks=_facts.checks(result, result.winner) if result.winner else [],
        )
    )


def drawing(drawn: Sequence[Figure]) -> dict[str, Any]:
    """What a page needs to show figures: as data for a screen, as SVG for paper, and the library that draws."""
    return {
        "figures": [{"name": f.name, "title": f.title, "alt": f.alt, "svg": f.svg()} for f in drawn],
        "specs": _script_safe(json.dumps({f.name: f.spec for f in drawn})),
        "configs": _script_safe(json.dumps({"light": _theme.config(dark=False), "dark": _theme.config(dark=True)})),
        "bundle": _bundle(),
    }


def _script_safe(text: str) -> str:
    """JSON that cannot end the script element it stands in, whatever strings it holds."""
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@lru_cache(maxsize=4)
def template(name: str = "page.html.j2") -> jinja2.Template:
    """One of this room's pages."""
    loader = jinja2.PackageLoader("fettle.report", ".")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(name)


@lru_cache(maxsize=1)
def _bundle() -> str:
    import vl_convert

    snippet = "window.vegaEmbed = vegaEmbed;"
    return str(vl_convert.javascript_bundle(snippet, vl_version=_theme.VEGALITE)).replace("</script", "<\\/script")
