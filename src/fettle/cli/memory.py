"""`fettle memory`: who holds the memory at the peak, does it leak, is it fragmented, and what changed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fettle.cli import _options, _show
from fettle.errors import UsageError
from fettle.memory import Analysis, Difference, analyse, as_json, compare, read, tables, verdict, write_report
from fettle.memory.analysis import as_plain
from fettle.units import count_text, parse_size, size_text


def command(
    snapshot: Annotated[Path, typer.Argument(help="a snapshot of PyTorch's CUDA allocator, or one of `record()`")],
    second: Annotated[Path | None, typer.Argument(help="a later snapshot: show what changed")] = None,
    device: Annotated[
        str | None, typer.Option(help="which device, for example cuda:1; default: the one with the highest peak")
    ] = None,
    request: Annotated[str | None, typer.Option(help="would a request of this size have fitted? (2GiB, 300MB)")] = None,
    device_free: Annotated[
        str | None, typer.Option(help="what the device had free outside the allocator, for --request")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write the report to this file, one HTML page")
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="rows in each table")] = 10,
    max_file_size: Annotated[str, typer.Option(help="refuse larger files")] = "1GiB",
    as_json_: _options.AsJson = False,
) -> None:
    """Analyse a memory snapshot: peak, holders, spikes, leaks, fragmentation, churn; or compare two.

    fettle memory run.pickle --output memory.html
    fettle memory before.pickle after.pickle
    fettle memory run.pickle --request 2GiB --device-free 1GiB
    """
    limit = parse_size(max_file_size, "--max-file-size")
    request_bytes = parse_size(request, "--request") if request is not None else None
    free_bytes = parse_size(device_free, "--device-free") if device_free is not None else None
    _options.check_file(output, ".html")
    number = None if device is None else _device(device)

    with _show.status_line("reading the snapshot", quiet=as_json_) as show:
        first = read(snapshot, max_file_bytes=limit)
        show("analysing")
        analysis = analyse(first, number, request_bytes=request_bytes, device_free_bytes=free_bytes, top=top)
        if free_bytes is not None and analysis.fit is None:
            raise UsageError("--device-free is for a request, and none failed in this snapshot: name one, --request")
        difference = None
        if second is not None:
            later = read(second, max_file_bytes=limit)
            difference = compare(first, later, analysis.device, top=top)
        if output is not None:
            show("writing the report")
            write_report(analysis, output, difference=difference)

    _show.answer(
        as_json_,
        lambda: {**as_json(analysis), **({} if difference is None else {"difference": as_plain(difference)})},
        lambda console: _print(console, analysis, difference),
        output,
    )


def _device(text: str) -> int:
    """The number of ``cuda:1``, or of ``1``, as it was written once."""
    name = _options.one_device(f"cuda:{text}" if text.isdigit() else text)
    if not name.startswith("cuda"):
        raise UsageError(f"--device {text}: a snapshot is of CUDA devices: write cuda:1, for example")
    return int(name.partition(":")[2] or 0)


def _print(console: Console, analysis: Analysis, difference: Difference | None) -> None:
    for note in analysis.snapshot.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    if analysis.violations:
        console.print(
            f"[yellow]the file contradicts itself in {count_text(len(analysis.violations), 'place')}[/], for instance:"
        )
        for row in analysis.violations[:3]:
            console.print(f"  {escape(str(row))}")
    if difference is None:
        _print_analysis(console, analysis)
        return
    if (fit := analysis.fit) is not None:
        console.print(f"Would {size_text(fit.request_bytes)} more have fitted in the first? {escape(fit.sentence)}")
    for note in difference.notes:
        console.print(f"[yellow]note:[/] {escape(note)}")
    for table in tables.changes(difference):
        _show.print_table(console, table)


def _print_analysis(console: Console, analysis: Analysis) -> None:
    window = analysis.replay
    console.print(f"\n{escape(verdict(analysis))}\n")
    if window.has_events:
        console.print(
            f"{count_text(len(window.trace), 'event')}; in use {window.start_bytes:,} -> peak {window.peak_bytes:,} -> "
            f"{window.end_bytes:,} bytes; {count_text(window.frees_from_before, 'free')} of blocks from before it"
        )
    _show.print_table(console, tables.holders(analysis), "Who holds the peak" if window.has_events else "Who holds it")
    if analysis.spikes:
        _show.print_table(console, tables.spikes(analysis), "Spikes")
    _print_leaks(console, analysis)
    if analysis.pools:
        _show.print_table(console, tables.pools(analysis), "Reserved memory")
    for churn in analysis.churn:
        console.print(f"\n[bold]Churn[/]: {escape(churn.sentence)}")
    for advice in analysis.advice:
        console.print(f"\n[bold]{escape(advice.setting)}[/]: {escape(advice.why)}")
        console.print(f"  not when: {escape('; '.join(advice.not_when))}")


def _print_leaks(console: Console, analysis: Analysis) -> None:
    leaks = analysis.leaks
    if not leaks.judged:
        console.print(f"\nLeaks: not judged: {escape(leaks.reason)}")
        return
    if not leaks.leaks:
        basis = leaks.reason or f"{count_text(leaks.steps, 'step')}, {leaks.step_source}"
        console.print(f"\nLeaks: none seen ({escape(basis)})")
    for leak in leaks.leaks:
        console.print(f"\n[bold]Leak[/]: {escape(leaks.sentence(leak))}")
        _show.print_table(console, tables.survivors(leak), "Survivors")
