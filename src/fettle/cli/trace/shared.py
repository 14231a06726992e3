"""What the trace commands share: options, opening, showing."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fettle.trace.model import Trace

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Analyse profiler traces: where the time went, and why."
)

Source = Annotated[
    Path, typer.Argument(help="a trace (.json, .json.gz), or a folder with one trace a rank", show_default=False)
]
Json = Annotated[bool, typer.Option("--json", help="print JSON for machines instead of tables")]
Rows = Annotated[int, typer.Option("--rows", min=1, help="how many rows of each table to show")]
Chart = Annotated[Path | None, typer.Option("--chart", help="write a chart to this file: .html, .png, .svg or .json")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="read the trace itself, not the columns kept from its last opening")
]
Step = Annotated[int | None, typer.Option("--step", help="one step's number; all steps where left out")]


def read_traces(path: Path, fresh: bool = False) -> list[Trace]:
    """Read a trace or a folder; people see how far it is and how long it will take."""
    from fettle.trace.reader import load_all

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"reading {path}", total=1.0)
        return load_all(path, use_sidecar=not fresh, on_progress=lambda share: progress.update(task, completed=share))


def open_traces(path: Path, fresh: bool = False) -> list[Trace]:
    """Read a trace or a folder, and say what was left out of it and which answers are uncertain."""
    from fettle.trace.health import trace_health

    console = Console(stderr=True)
    traces = read_traces(path, fresh)
    for trace in traces:
        for note in trace.facts.notes:
            console.print(f"[yellow]rank {trace.rank}: {escape(note)}[/]", highlight=False)
        uncertain = trace_health(trace).uncertain
        if uncertain:
            console.print(
                f"[yellow]rank {trace.rank}: uncertain: {', '.join(uncertain)}; see 'fettle trace health'[/]",
                highlight=False,
            )
    return traces


def show(frames: dict[str, pl.DataFrame], as_json: bool, rows: int = 30, notes: dict[str, Any] | None = None) -> None:
    """Print frames as JSON ({name: rows}) or as tables, times in milliseconds."""
    if as_json:
        data = {name: frame.to_dicts() for name, frame in frames.items()} | (notes or {})
        print(json.dumps(_plain(data), default=str))
        return
    from fettle.trace.report.section import cell, heading

    console = Console()
    for key, value in (notes or {}).items():
        console.print(f"{key}: {value}", highlight=False, markup=False)
    for name, frame in frames.items():
        if "start_ns" in frame.columns:  # a person wants the time since the first, not a clock's
            frame = frame.with_columns(pl.col("start_ns") - pl.col("start_ns").min())
        shown = frame.select(
            [c for c in frame.columns if not (c.endswith("_ns") and frame[c].dtype.is_numeric() and not frame[c].sum())]
        )
        table = Table(title=name.replace("_", " "), title_justify="left")
        for column in shown.columns:
            table.add_column(
                heading(column), justify="right" if shown[column].dtype.is_numeric() else "left", overflow="fold"
            )
        for row in shown.head(rows).iter_rows():
            table.add_row(*(escape(cell(v, c)) for v, c in zip(row, shown.columns, strict=True)))
        console.print(table)
        if shown.height > rows:
            console.print(f"{shown.height - rows} more rows: --rows {shown.height}", highlight=False)


def _plain(value: Any) -> Any:
    """NaN and infinities are not JSON: null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def write_chart(path: Path | None, make: Callable[[], Any]) -> None:
    if path is not None:
        from fettle.trace import charts

        charts.save(make(), path)
        Console(stderr=True).print(f"wrote {path}", highlight=False)


def joined(traces: list[Trace], analysis: Callable[[Trace], pl.DataFrame]) -> pl.DataFrame:
    return pl.concat([analysis(t) for t in traces], how="vertical_relaxed")
