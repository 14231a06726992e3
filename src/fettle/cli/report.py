"""fettle report FOLDER: draw the report of a finished tuning again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    source: Annotated[Path, typer.Argument(help="the output folder of a tuning, or its result.json")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; default: report.html beside result.json")
    ] = None,
    charts: Annotated[Path | None, typer.Option(help="folder for the charts as PNG and SVG")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Write report.html of a finished tuning again, print its table, and save its charts.

    [bold]Example[/]

      fettle report fettle-out --charts pictures
    """
    from fettle.report import load_result, print_result, to_json, write_charts, write_report

    path = source / "result.json" if source.is_dir() else source
    result = load_result(path)
    if as_json:
        print(json.dumps(to_json(result)))
    else:
        print_result(result, Console())
    page = output or path.parent / "report.html"
    write_report(result, page)
    written = [page, *(write_charts(result, charts) if charts is not None else [])]
    if not as_json:
        print("\nwrote " + ", ".join(str(item) for item in written))
