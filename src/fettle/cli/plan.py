"""`fettle plan`: what each parallel strategy would hold on one rank, before anything is launched."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fettle.cli import _options, _quiet
from fettle.units import size_text

if TYPE_CHECKING:
    from fettle.parallel.plan import Plan


def command(
    target: Annotated[str, typer.Argument(help="path/to/file.py:factory or package.module:factory, for training")],
    world_size: Annotated[int, typer.Option(min=1, help="ranks, one device each")] = 8,
    device_memory: Annotated[str | None, typer.Option(help="memory of one device, for example 80GiB")] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="ranks on one machine")] = 8,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help='instead of the usual ones, for example "zero3 precision=bf16 checkpoint=block"'),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu: the kind of device that is planned for")] = "cuda",
    headroom: Annotated[
        str, typer.Option(help="share of the device kept free for what is not counted, for example 10%")
    ] = "10%",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write stacked bars: .html, .png or .svg")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Predict the peak memory of each parallel strategy per rank, from fake tensors, in this one process.

    Strategies are single, ddp, zero1, zero2, zero3 and hsdp with settings wrap, precision, checkpoint, compress,
    buckets, graph, offload and compile. Exit code 1: nothing fits.

    [bold]Examples[/]

      fettle plan train.py --world-size 64 --device-memory 80GiB

      fettle plan train.py --world-size 16 --strategy "zero3 checkpoint=block" --strategy ddp --output plan.html
    """
    from fettle.errors import UsageError
    from fettle.parallel import plan as planning
    from fettle.parallel.report import check_path, write_plan
    from fettle.parallel.strategies import parse_strategy
    from fettle.units import parse_size
    from fettle.workload import find_target

    kind = _options.one_device(device).partition(":")[0]
    free = _options.share(headroom, "--headroom")
    memory = parse_size(device_memory, "--device-memory") if device_memory is not None else None
    if memory == 0:
        raise UsageError("--device-memory 0: give the memory of one device, for example 80GiB")
    strategies = [parse_strategy(text) for text in strategy or ()]
    if output is not None:
        check_path(output)
    found = find_target(target)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=18), TextColumn("left"), TimeRemainingColumn())
    with (
        Progress(*columns, console=Console(file=sys.stderr), transient=True, disable=as_json) as bar,
        _quiet.users_code_quiet(),
    ):
        task = bar.add_task("building the workload", total=None)
        workload, mode, note = planning.build_fake(found)
        made = planning.plan(
            workload,
            world_size,
            device_memory_bytes=memory,
            strategies=strategies,
            ranks_per_node=ranks_per_node,
            device=kind,
            headroom=free,
            mode=mode,
            tell=lambda done, of, doing: bar.update(task, completed=done, total=of, description=doing[:60]),
        )
        if output is not None:
            write_plan(made, output)
    if as_json:
        typer.echo(json.dumps(planning.as_json(made) | {"note": note}))
    else:
        _print(Console(), made, note)
        if output is not None:
            Console().print(f"report: {escape(str(output))}", highlight=False)
    if memory is not None and not any(item.fits for item in made.predictions):
        raise typer.Exit(1)


def _print(console: Console, made: Plan, note: str) -> None:
    """Three tables, each narrow enough for a terminal of 80 columns."""
    from fettle.parallel.report import basis, verdict

    console.print(f"\n[bold]{escape(verdict(made))}[/]", highlight=False)
    for table in (_peaks(made), _sent(made), _states(made)):
        console.print()
        console.print(table)
    console.print()
    for item in made.predictions:
        if item.failed or item.note:
            console.print(f"[yellow]{escape(item.strategy)}[/]: {escape(item.failed or item.note)}", highlight=False)
    for text in (note, basis(made)):
        if text:
            console.print(f"[dim]{escape(text)}[/]", highlight=False)


def _table(title: str, *names: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", title=title,
                  title_justify="left", title_style="bold")  # fmt: skip
    table.add_column("strategy", overflow="fold", min_width=20)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _peaks(made: Plan) -> Table:
    """All in one unit, which the title names: with a unit in each cell the table would be too wide."""
    from fettle.parallel.timeline import PARTS

    highest = max(item.peak_bytes for item in made.predictions)
    unit, scale = next(
        ((name, 1 << power) for name, power in (("GiB", 30), ("MiB", 20)) if highest >= 1 << power), ("KiB", 1 << 10)
    )
    names = ("params", "grads", "optimizer", "activations", "transients")  # PARTS, short
    table = _table(f"The fullest rank's peak, {unit}", "peak", *names, "fits")
    for item in made.predictions:
        sizes = [item.peak_bytes, *(item.parts.get(part, 0) for part in PARTS)]
        cells = ["failed"] if item.failed else [f"{size / scale:#.3g}" if size else "0" for size in sizes]
        cells += [] if item.failed or item.fits is None else ["yes" if item.fits else "no"]
        style = "green" if item.strategy == made.cheapest else "red" if item.fits is False else ""
        table.add_row(escape(item.strategy), *cells, style=style)
    return table


def _sent(made: Plan) -> Table:
    table = _table("What is sent in a step", "by a rank", "between nodes")
    table.add_column("collectives", overflow="fold")
    for item in made.predictions:
        if not item.failed:
            counts = ", ".join(f"{count} {name}" for name, count in item.collectives.items())
            table.add_row(
                escape(item.strategy), size_text(item.sent_bytes), size_text(item.between_nodes_bytes), counts or "none"
            )
    return table


def _states(made: Plan) -> Table:
    table = _table("The states beside the closed formula", "predicted", "formula", "bytes/parameter")
    for item in made.predictions:
        if not item.failed:
            held = sum(item.states.values())
            formula = "none known" if item.formula_bytes is None else size_text(item.formula_bytes)
            table.add_row(escape(item.strategy), size_text(held), formula, f"{held / max(made.parameters, 1):.2f}")
    return table
