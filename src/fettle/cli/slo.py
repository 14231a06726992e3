"""fettle slo PACKAGE: the best way to serve under a latency limit, predicted and then proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fettle.cli import _options
from fettle.errors import UsageError

if TYPE_CHECKING:
    from fettle.serve.search import Found


def command(
    package: Annotated[Path, typer.Argument(help="a folder that fettle package wrote")],
    p99: Annotated[str, typer.Option("--p99", help="the latency limit, for example 100ms")],
    rate: Annotated[float, typer.Option(min=0.0, help="requests a second that are needed; 0: as many as can be")] = 0.0,
    max_rows: Annotated[int, typer.Option(min=1, help="rows of the largest batch to try")] = 32,
    cores: Annotated[int | None, typer.Option(min=1, help="cores to use; default: all")] = None,
    seconds: Annotated[str, typer.Option(help="length of one load test")] = "8s",
    confirm: Annotated[int, typer.Option(min=1, help="settings to prove by load tests")] = 2,
    write: Annotated[bool, typer.Option(help="write the best setting to the package's serve.toml")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print what was found as JSON")] = False,
) -> None:
    """Calibrate, simulate every setting, prove the best by open-loop load, and write serve.toml. Exit 1: not met.

    Calibrations are kept beside the package, so a search that was stopped goes on where it was.

    [bold]Examples[/]

      fettle slo digits-1 --p99 20ms

      fettle slo bert-1 --p99 100ms --rate 80
    """
    try:
        import uvloop

        from fettle.serve.search import as_json as to_json
        from fettle.serve.search import search, serve_settings
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed: pip install 'torch-fettle[serve]'") from error
    from fettle.serve.host import cores as usable_cores
    from fettle.serve.host import host_id
    from fettle.serve.package import open_package, write_settings
    from fettle.serve.simulate import Costs

    opened = open_package(package)
    console = Console(stderr=True)
    keep = opened.folder.parent / f".{opened.folder.name}.calibration.json"
    with console.status("starting") as status:
        found = uvloop.run(
            search(
                opened, _options.duration_s(p99, "--p99"), rate=rate, most_rows=max_rows, cores=cores or usable_cores(),
                seconds=_options.duration_s(seconds, "--seconds"), confirm=confirm, keep=keep,
                tell=status.update if console.is_terminal and not as_json else (lambda text: None),
            )
        )  # fmt: skip
    best = found.best
    if write and best is not None:
        setting = best.setting
        samples = found.costs[f"{setting.workers}x{setting.threads}"]
        costs = Costs({rows: tuple(values) for rows, values in samples.items()})
        write_settings(opened, serve_settings(opened.settings, setting, costs, found.limit_s, host_id()))
    if as_json:
        print(json.dumps(to_json(found)))
    else:
        _print(found, Console(), opened.folder if write and best is not None else None)
    if not found.met:
        raise typer.Exit(1)


def _print(found: Found, console: Console, written: Path | None) -> None:
    from fettle.serve.search import HEAD_ROOM

    table = Table(box=None, header_style="bold")
    for name in ("setting", "predicted/s", "measured/s", "p50 ms", "p99 ms", "memory"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for point in found.points[:10]:
        last = [run for run in point.runs if run["rate"] <= (point.measured or 0) * 1.001]
        run = last[-1] if last else None
        table.add_row(
            str(point.setting), f"{point.predicted:.4g}", "" if point.measured is None else f"{point.measured:.4g}",
            f"{run['latency_ms']['p50']:.1f}" if run else "", f"{run['latency_ms']['p99']:.1f}" if run else "",
            f"{point.memory_bytes >> 20} MiB" if point.memory_bytes else "",
        )  # fmt: skip
    console.print(f"requests a second with p99 within {found.limit_s * 1e3:.4g} ms, Poisson arrivals", highlight=False)
    console.print(table)
    for line in found.why:
        console.print(f"  {line}", highlight=False)
    best = found.best
    if best is not None and best.measured:
        room = (1 - HEAD_ROOM) * best.measured
        console.print(f"with {HEAD_ROOM:.0%} head-room: up to {room:.4g} requests/s", highlight=False)
    if written is not None:
        console.print(f"written to {written}/serve.toml: fettle serve {written}", highlight=False)
