"""What `fettle serve slo` prints when it is through."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fettle.cli import _show
from fettle.units import rate_text

if TYPE_CHECKING:
    from fettle.page import Table
    from fettle.slo.points import Point, SearchResult


def print_result(result: SearchResult, busy: str, written: Path | None, console: Console) -> None:
    from fettle.slo.search import HEADROOM

    if busy:
        console.print(f"[yellow]{busy}[/]\n")
    console.print(f"requests a second with p99 within {result.limit_s * 1e3:.4g} ms, Poisson arrivals")
    _show.print_table(console, _table(result))
    for line in result.why:
        console.print(f"  {line}", markup=False)
    for measured in result.branches.values():
        if measured.overheads is not None:
            around = measured.overheads
            held = f", {around.held_s * 1e3:.2g} ms to a call for each request that comes during it"
            console.print(f"  serving adds {around.request_s * 1e3:.2g} ms a request and {around.batch_s * 1e3:.2g} ms "
                          f"a batch{held if around.held_s else ''}: measured with {measured.branch}",
                          markup=False)  # fmt: skip
    _print_how([f"{one.what}: {one.why}" for one in result.failures], result.tests_kept, result.tests, console)
    best = result.best
    if best is not None and best.measured:
        share = result.headroom or HEADROOM
        room = (1 - share) * best.measured
        console.print(f"with {share:.0%} headroom: up to {rate_text(room)} requests/s")
    _print_end(result.interrupted, written, console)


def _table(result: SearchResult, most: int = 12) -> Table:
    """What was measured, then what no other setting beats in all respects."""
    from fettle.page import Table

    shown = [point for point in result.points if point.tests]
    shown += [point for point in result.points if point.front and not point.tests]
    shown = (shown or result.points)[:most]
    several = len({point.setting.variant for point in shown}) > 1
    at = f"p99 ms at {result.reference_rate:.4g}/s" if result.reference_rate else "p99 ms"
    columns = ("predicted/s", "measured/s", at, "memory", "error", "per million", "setting")
    kinds = ["winner" if point is result.best else "" for point in shown]
    return Table(columns, [_cells(point, several) for point in shown], columns[:-1], kinds=kinds)


def _cells(point: Point, several: bool) -> list[str]:
    measured = "" if point.measured is None else rate_text(point.measured)
    if point.measured == 0:
        measured = f"under {point.lowest:.4g}"
    return [
        f"{point.predicted:.4g}",
        measured,
        f"{point.p99_s * 1e3:.1f}" if point.p99_s < 1e3 else "",
        f"{point.memory_bytes >> 20} MiB" if point.memory_bytes else "",
        f"{point.error:.2g}" if several else "",
        f"{point.cost:.3g}" if point.cost is not None else "",
        str(point.setting),
    ]


def print_texts(data: dict[str, Any], console: Console) -> None:
    from fettle.report import texts_table, texts_words

    if data["busy"]:
        console.print(f"[yellow]{data['busy']}[/]\n")
    console.print(texts_words(data), markup=False)
    _show.print_table(console, texts_table(data))
    for line in data["why"]:
        console.print(f"  {line}", markup=False)
    failures = [f"{one['what']}: {one['why']}" for one in data["failures"]]
    _print_how(failures, data["tests_kept"], data["tests"], console)
    _print_end(data["interrupted"], data["written"], console)


def _print_how(failures: Sequence[str], kept: int, tests: int, console: Console) -> None:
    for failure in failures:
        console.print(f"  failed: {failure}", markup=False, style="yellow")
    if kept:
        console.print(f"{kept} of {tests} load tests had been made before")


def _print_end(interrupted: bool, written: Path | str | None, console: Console) -> None:
    if interrupted:
        console.print("interrupted: the same command goes on from here")
    if written:
        console.print(f"written to {written}/serve.toml: fettle serve {written}", markup=False, soft_wrap=True)
