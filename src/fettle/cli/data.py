"""fettle data TARGET: measure and tune an input pipeline."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fettle.cli import _options

if TYPE_CHECKING:
    from fettle.inputs import Found


def command(
    target: Annotated[
        str, typer.Argument(help="path/to/file.py:factory that returns a DataLoader, a dataset, or (it, step)")
    ],
    slice_: Annotated[str, typer.Option("--slice", help="time of one run of one setting")] = "1.5s",
    timeout: Annotated[str, typer.Option(help="longest time of one run: a worker that hangs ends there")] = "2m",
    ranks: Annotated[int, typer.Option(min=1, help="processes of the job that share this host")] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the curve to this .html, .png or .svg")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print what was found as JSON")] = False,
) -> None:
    """Say how long a loop waits for its data, and find the loader setting that ends it, or why none does.

    [bold]Examples[/]

      fettle data train.py:loader

      fettle data train.py:loader_and_step --output curve.html
    """
    from fettle.inputs import measure_and_search

    console = Console(stderr=True)
    with console.status("starting") as status:
        found = measure_and_search(
            target, slice_s=_options.duration_s(slice_, "--slice"), timeout_s=_options.duration_s(timeout, "--timeout"),
            ranks=ranks, tell=status.update if console.is_terminal and not as_json else (lambda text: None),
        )  # fmt: skip
    if output is not None:
        from fettle.inputs.report import write_curve

        write_curve(found, output)
    if as_json:
        print(json.dumps({**asdict(found), "bound": found.bound, "code": found.code}))
    else:
        _print(found, Console())
    if found.interrupted:
        raise typer.Exit(130)


def _print(found: Found, console: Console) -> None:
    console.print(f"[bold]{escape(found.verdict)}[/]\n", highlight=False)
    step = f"a step alone {found.step_s * 1e3:.3g} ms, " if found.step_s else ""
    console.print(
        f"{step}a batch from one process {found.batch_p50_s * 1e3:.3g} ms (95%: {found.batch_p95_s * 1e3:.3g} ms); "
        f"waiting as given {found.waiting:.0%}: removing it brings at most {found.bound:.2f}x; {found.cores} cores",
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("workers", "prefetch", "batches/s", "waiting", "first batch s", ""):
        table.add_column(name, justify="right" if name else "left")
    for item in sorted(found.settings, key=lambda item: (item.setting.num_workers, item.setting.prefetch_factor)):
        mark = " ".join(
            word for word, on in (("as given", item is found.given), ("← take this", item is found.best)) if on
        )
        cells = ("-", "-", "-") if item.failure else (
            f"{item.rate:.1f}", f"{sorted(item.waiting)[len(item.waiting) // 2]:.0%}", f"{item.start_s:.2f}"
        )  # fmt: skip
        note = f"[red]failed: {escape(item.failure[:120])}[/]" if item.failure else mark
        table.add_row(str(item.setting.num_workers), str(item.setting.prefetch_factor), *cells, note)
    console.print(table)
    for lint in found.lints:
        console.print(
            f"\n[yellow]{escape(lint.says)}[/] {escape(lint.evidence)}\n  → {escape(lint.advice)}", highlight=False
        )
    if found.best is not found.given:
        console.print(f"\n{escape(found.code)}", style="green", highlight=False)
