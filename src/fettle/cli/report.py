"""fettle report FOLDER: draw the report of a finished tuning again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fettle.cli import _options, _show
from fettle.files import write_text


def command(
    source: Annotated[Path, typer.Argument(help="the output folder of fettle tune, or its result.json")],
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output",
            "-o",
            help="the page (.html; default: report.html beside result.json), a folder for the charts as PNG and SVG; "
            "for both repeat it",
        ),
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Write report.html of a finished tuning again, print its table, and save its charts.

    fettle report fettle-out --output pictures
    """
    from fettle.report import load_result, page, print_result, to_json, write_charts

    wanted = _options.outputs(output, ".html", folder=True)
    path = source / "result.json" if source.is_dir() else source
    result = load_result(path)
    place = wanted.get(".html", path.parent / "report.html")
    write_text(place, page(result))
    written = [place, *(write_charts(result, wanted[""]) if "" in wanted else [])]
    _show.answer(as_json, lambda: to_json(result), lambda console: print_result(result, console), wrote=written)
