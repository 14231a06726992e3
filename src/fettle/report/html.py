"""The report: one HTML file that needs no network, readable on a phone, in the dark and on paper."""

from __future__ import annotations

from pathlib import Path

from fettle.files import write_text
from fettle.page import clean, shell
from fettle.report import _facts, _format, _tables, _text, _verdict
from fettle.report.charts import figures
from fettle.result import Outcome


def write_report(result: Outcome, path: str | Path) -> None:
    """Write the page of `result` to `path`, whole or not at all. Raises `UsageError` when it cannot be written."""
    write_text(Path(path), page(result))


def page(result: Outcome) -> str:
    """The page as text: every chart once as data for a screen and once as SVG for paper, the library once for all."""
    result = clean(result)
    title = f"{_verdict.headline(result)}: {result.name}"
    return shell.render(
        "fettle.report",
        "page.html.j2",
        title,
        figures(result),
        result=result,
        fmt=_format,
        facts=_facts,
        say=_verdict,
        tables=_tables,
        text=_text,
    )
