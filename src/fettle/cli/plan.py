"""`fettle plan`: what each parallel strategy would hold on one rank, before anything is launched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


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
    headroom: Annotated[float, typer.Option(help="share of the device kept free for what is not counted")] = 0.1,
    report: Annotated[Path | None, typer.Option(help="write stacked bars: .html, .png or .svg")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Predict the peak memory of each parallel strategy per rank, from fake tensors, in this one process.

    Strategies are single, ddp, zero1, zero2, zero3 and hsdp with settings wrap, precision, checkpoint, compress,
    buckets, graph, offload and compile. Exit code 1: nothing fits.

    [bold]Examples[/]

      fettle plan train.py --world-size 64 --device-memory 80GiB

      fettle plan train.py --world-size 16 --strategy "zero3 checkpoint=block" --strategy ddp --report plan.html
    """
    from fettle.errors import UsageError
    from fettle.train import plan as planning
    from fettle.train.plan_report import check_path, write_plan
    from fettle.train.strategies import parse_strategy
    from fettle.units import parse_size
    from fettle.workload import find_target

    if device not in ("cuda", "cpu"):
        raise UsageError(f"--device {device}: use cuda or cpu")
    memory = parse_size(device_memory, "--device-memory") if device_memory is not None else None
    if memory == 0:
        raise UsageError("--device-memory 0: give the memory of one device, for example 80GiB")
    strategies = [parse_strategy(text) for text in strategy or ()]
    if report is not None:
        check_path(report)
    found = find_target(target)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=18), TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=as_json) as bar:
        task = bar.add_task("building the workload", total=None)
        workload, mode, note = planning.build_fake(found)
        made = planning.plan(
            workload,
            world_size,
            device_memory_bytes=memory,
            strategies=strategies,
            ranks_per_node=ranks_per_node,
            device=device,
            headroom=headroom,
            mode=mode,
            tell=lambda done, of, doing: bar.update(task, completed=done, total=of, description=doing[:60]),
        )
        if report is not None:
            write_plan(made, report)
    if as_json:
        typer.echo(json.dumps(planning.as_json(made) | {"note": note}))
    else:
        _print(Console(), made, note)
        if report is not None:
            Console().print(f"report: {escape(str(report))}", highlight=False)
    if memory is not None and not any(item.fits for item in made.predictions):
        raise typer.Exit(1)


def _print(console: Console, made: object, note: str) -> None:
    from fettle.train.plan import Plan
    from fettle.train.plan_report import basis, row_texts, verdict
    from fettle.train.plan_timeline import PARTS
    from fettle.units import size_text

    assert isinstance(made, Plan)
    console.print(f"\n[bold]{escape(verdict(made))}[/]\n", highlight=False)
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("strategy", overflow="fold")
    for name in ("peak", *PARTS, "fits", "sent/step", "between nodes"):
        table.add_column(name, justify="right", overflow="fold")
    for item in made.predictions:
        style = "green" if item.strategy == made.cheapest else "red" if item.fits is False else ""
        table.add_row(*(escape(text) for text in row_texts(item)[:10]), style=style)
    console.print(table)

    states = Table(box=None, pad_edge=False, header_style="dim", title="The states beside the closed formula",
                   title_justify="left", title_style="bold")  # fmt: skip
    states.add_column("strategy", overflow="fold")
    for name in ("predicted", "formula", "bytes/parameter", "collectives a step"):
        states.add_column(name, justify="right" if name != "collectives a step" else "left", overflow="fold")
    for item in made.predictions:
        if not item.failed:
            held = sum(item.states.values())
            formula = "none known" if item.formula_bytes is None else size_text(item.formula_bytes)
            counts = ", ".join(f"{count} {name}" for name, count in item.collectives.items())
            states.add_row(
                escape(item.strategy), size_text(held), formula, f"{held / max(made.parameters, 1):.2f}", counts
            )
    console.print()
    console.print(states)
    console.print()
    for item in made.predictions:
        if item.failed or item.note:
            console.print(f"[yellow]{escape(item.strategy)}[/]: {escape(item.failed or item.note)}", highlight=False)
    for text in (note, basis(made)):
        if text:
            console.print(f"[dim]{escape(text)}[/]", highlight=False)
