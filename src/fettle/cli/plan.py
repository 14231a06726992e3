"""`fettle plan`: what each parallel strategy would hold on one rank, before anything is launched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fettle.cli import _options, _quiet, _show

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
    device: Annotated[str, typer.Option(help="cuda or cpu: the kind of device to plan for")] = "cuda",
    headroom: Annotated[
        str, typer.Option(help="share of the device kept free for what is not counted, for example 10%")
    ] = "10%",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write stacked bars: .html, .png or .svg")
    ] = None,
    as_json: _options.AsJson = False,
) -> None:
    """Predict the peak memory of each parallel strategy per rank, from fake tensors, in this one process.

    Strategies are single, ddp, zero1, zero2, zero3, hsdp, tensor and zero3-tensor with settings wrap, precision,
    checkpoint, compress, buckets, graph, offload and compile. Exit code 1: nothing fits.

    fettle plan train.py --world-size 64 --device-memory 80GiB
    fettle plan train.py --world-size 16 --strategy "zero3 checkpoint=block" --strategy ddp --output plan.html
    """
    from fettle.errors import UsageError
    from fettle.files import plain
    from fettle.page import drawn
    from fettle.parallel import plan as planning
    from fettle.parallel.report import write_plan
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
        drawn.check_path(output)
    named = find_target(target)
    with _show.bar("building the workload", quiet=as_json) as show, _quiet.users_code_quiet():
        workload, mode, note = planning.build_fake(named)
        planned = planning.plan(
            workload,
            world_size,
            device_memory_bytes=memory,
            strategies=strategies,
            ranks_per_node=ranks_per_node,
            device=kind,
            headroom=free,
            mode=mode,
            on_progress=show,
        )
        if output is not None:
            write_plan(planned, output)
    _show.answer(
        as_json, lambda: {**plain(planned), "note": note}, lambda console: _print(console, planned, note), output
    )
    _show.leave(missed=memory is not None and not any(item.fits for item in planned.predictions))


def _print(console: Console, made: Plan, note: str) -> None:
    from fettle.parallel.report import basis, notes, tables, verdict

    console.print(f"\n[bold]{escape(verdict(made))}[/]")
    for table in tables(made):
        _show.print_table(console, table)
    console.print()
    for line in notes(made):
        console.print(f"[yellow]{escape(line)}[/]")
    for text in (note, basis(made)):
        if text:
            console.print(f"[dim]{escape(text)}[/]")
