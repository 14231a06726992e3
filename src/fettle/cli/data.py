"""fettle data TARGET: measure and tune an input pipeline."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fettle.cli import _options

if TYPE_CHECKING:
    from fettle.inputs import Found


def command(
    target: Annotated[
        str,
        typer.Argument(help="path/to/file.py:factory that returns a DataLoader, a dataset, or (it, step); or a trace"),
    ],
    slice_: Annotated[str, typer.Option("--slice", help="time of one run of one setting")] = "0.4s",
    timeout: Annotated[str, typer.Option(help="longest time of one run: a worker that hangs ends there")] = "2m",
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="processes of the job on this host; default: LOCAL_WORLD_SIZE, or 1"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda: where each batch is copied before the step")] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write a page (.html) or the curve alone (.png, .svg)")
    ] = None,
    keep: Annotated[
        Path | None, typer.Option(help="file that a killed search goes on from; default: a hidden one beside TARGET")
    ] = None,
    lints: Annotated[bool, typer.Option(help="look for faults beyond the setting")] = True,
    after: Annotated[
        Path | None, typer.Option(help="TARGET is a profiler trace; this is one after a change, to hold against it")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print what was found as JSON")] = False,
) -> None:
    """Say how long a loop waits for its data, and find the loader setting that ends it, or why none does.

    A search that was killed goes on where it was; Ctrl-C ends it and shows what is known.

    [bold]Examples[/]

      fettle data train.py:loader

      fettle data train.py:loader_and_step --output pipeline.html

      fettle data workers0.pt.trace.json.gz --after workers4.pt.trace.json.gz
    """
    from fettle.errors import UsageError

    if target.endswith((".json", ".json.gz")):
        if output is not None:
            raise UsageError("--output goes with a loader: fettle trace report draws a trace")
        _trace(Path(target), after, as_json)
        return
    if after is not None:
        raise UsageError("--after goes with a trace as TARGET, for example run.pt.trace.json.gz")

    from fettle.inputs import measure_and_search
    from fettle.inputs.journal import default_path
    from fettle.inputs.report import as_data, check_path, write_report
    from fettle.measure import Surroundings

    if output is not None:
        check_path(output)
    slice_s = _options.duration_s(slice_, "--slice")
    if not 0.01 <= slice_s <= 600:
        raise UsageError(f"--slice {slice_}: between 10ms and 10m")
    around = Surroundings()
    with _progress(quiet=as_json) as show:
        found = measure_and_search(
            target, slice_s=slice_s, timeout_s=_options.duration_s(timeout, "--timeout"), ranks=ranks or _ranks(),
            device=_options.one_device(device, ("auto",)), keep=keep or default_path(target), lints=lints,
            on_progress=show,
        )  # fmt: skip
    busy = around.sentence()
    if output is not None:
        write_report(found, output)
    if as_json:
        typer.echo(json.dumps({**as_data(found), "busy": busy}))
    else:
        if busy:
            Console().print(f"[yellow]{escape(busy)}[/]\n", highlight=False)
        _print(found, Console())
        if output is not None:
            Console().print(f"\nreport: {escape(str(output))}", highlight=False)
    if found.interrupted:
        raise typer.Exit(130)


def _trace(before: Path, after: Path | None, as_json: bool) -> None:
    """What the steps of a profiled loop waited for."""
    from dataclasses import asdict

    from fettle.inputs.from_trace import compare_text, waits_in_trace

    waits = [waits_in_trace(path) for path in ((before,) if after is None else (before, after))]
    if as_json:
        told = [{**asdict(item), "bound": item.bound} for item in waits]
        achieved = waits[0].step_s / waits[1].step_s if after is not None else None
        typer.echo(json.dumps({"before": told[0], "after": told[1] if after else None, "achieved": achieved}))
        return
    for line in compare_text(waits):
        Console().print(escape(line), highlight=False)


def _ranks() -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(text)) if text.isdigit() else 1


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """What runs now and the time left, on stderr; a line for each slice where that is no terminal."""
    console = Console(stderr=True)
    if quiet:
        yield lambda doing, done, of: None
    elif not console.is_terminal:
        yield lambda doing, done, of: console.print(f"[{done}/{of}] {doing}", highlight=False, markup=False)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=18), TimeElapsedColumn(), TextColumn("left"),
                   TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("starting", total=None)
            yield lambda doing, done, of: bar.update(task, description=escape(doing[:70]), completed=done, total=of)


def _print(found: Found, console: Console) -> None:
    from fettle.inputs.report import facts, rows

    console.print(f"[bold]{escape(found.verdict)}[/]\n", highlight=False)
    for line in facts(found):
        console.print(escape(line), highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    shown = [{name: cell for name, cell in row.items() if name != "first"} for row in rows(found)]
    for name in [name for name in shown[0] if name != "note" and not any(row[name] for row in shown)]:
        for row in shown:
            del row[name]
    for name in shown[0]:
        left = name in ("also", "note")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "note", overflow="fold")
    for row in shown:
        style = "green" if "take this" in row["note"] else "red" if row["note"].startswith("failed") else ""
        table.add_row(*(escape(cell) for cell in row.values()), style=style)
    console.print()
    console.print(table)
    for lint in found.lints:
        console.print(
            f"\n[yellow]{escape(lint.says)}[/] {escape(lint.evidence)}\n  → {escape(lint.advice)}", highlight=False
        )
    for note in found.notes:
        console.print(f"[dim]{escape(note)}[/]", highlight=False)
    if found.best.setting != found.given.setting:
        console.print(f"\n{escape(found.code)}", style="green", highlight=False, soft_wrap=True)
