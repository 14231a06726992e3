"""What `fettle serve slo` prints when it is through, of the plain data of its search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fettle.cli import _show
from fettle.measure import Load
from fettle.units import rate_text

if TYPE_CHECKING:
    from fettle.page import Table


def print_settings(data: dict[str, Any], console: Console) -> None:
    from fettle.report import slo_table
    from fettle.slo.search import HEADROOM

    words = f"requests a second with p99 within {data['limit_ms']:.4g} ms, Poisson arrivals"
    more = []
    for branch in data["branches"]:
        if branch["overheads"] == "measured":
            held = f", {branch['held_ms']:.2g} ms to a call for each request that comes during it"
            more.append(f"  serving adds {branch['request_ms']:.2g} ms a request and {branch['batch_ms']:.2g} ms a "
                        f"batch{held if branch['held_ms'] else ''}: measured with {branch['branch']}")  # fmt: skip
    if data["best"] is not None:
        share = data["headroom"] or HEADROOM
        room = (1 - share) * data["points"][data["best"]]["measured"]
        more.append(f"with {share:.0%} headroom: up to {rate_text(room)} requests/s")
    _print(data, words, slo_table(data, 12), more, console)


def print_texts(data: dict[str, Any], console: Console) -> None:
    from fettle.report import texts_table, texts_words

    _print(data, texts_words(data), texts_table(data), (), console)


def _print(data: dict[str, Any], words: str, table: Table, more: Sequence[str], console: Console) -> None:
    console.print(f"{Load.from_json(data['load']).under}{words}", markup=False)
    if table.rows:
        _show.print_table(console, table)
    for line in data["why"]:
        console.print(f"  {line}", markup=False)
    for line in more:
        console.print(line, markup=False)
    for failure in data["failures"]:
        console.print(f"  failed: {failure['what']}: {failure['why']}", markup=False, style="yellow")
    if data["tests_kept"]:
        console.print(f"{data['tests_kept']} of {data['tests']} load tests had been made before")
    if data["interrupted"]:
        console.print("interrupted: the same command goes on from here")
    if written := data["written"]:
        console.print(f"written to {written}/serve.toml: fettle serve {written}", markup=False, soft_wrap=True)
