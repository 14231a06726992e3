"""Rich tables for the terminal: plain when piped, whole at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fettle.measure import Trial
from fettle.page import clean
from fettle.report import _facts, _text, _verdict
from fettle.report import _format as fmt
from fettle.result import Outcome
from fettle.techniques import parts_sentence

_ALIKE = 3
"""Recipes that failed for one reason and are named; the others are counted."""
_STYLES = {"winner": "bold green", "rejected": "yellow", "over limit": "yellow", "baseline": "bold"}


def print_result(result: Outcome, console: Console) -> None:
    """The verdict, the trials from fast to slow, what failed, and what was left out."""
    result = clean(result)
    console.print()
    console.print(result_table(result, wide=console.width >= 120))
    by_reason: dict[str, list[str]] = {}
    for trial in _facts.failed(result):
        by_reason.setdefault(trial.reason, []).append(_facts.name_of(trial.recipe))
    for reason, alike in by_reason.items():
        more = f" and {len(alike) - _ALIKE} more" if len(alike) > _ALIKE else ""
        console.print(f"[red]failed[/] {escape(', '.join(alike[:_ALIKE]))}{more}: {escape(reason)}")
    if result.facts.parts:
        console.print(f"[dim]{escape(parts_sentence(result.facts))}[/]")
    if result.left_out:
        names = dict.fromkeys(item.technique.partition("[")[0] for item in result.left_out)
        console.print(
            f"[dim]left out: {len(result.left_out)} levels of {escape(', '.join(names))}; the report says why[/]",
        )
    console.print()
    console.print(f"[bold]{escape(_verdict.verdict(result))}[/]")
    if written := _text.sentence(result):
        console.print(escape(written))
    payback = _verdict.payback(result)
    if payback:
        console.print(escape(payback))
    for trial in result.nearest:
        why = trial.reason or _verdict.miss_text(result, trial)
        console.print(f"  nearest: {escape(_facts.name_of(trial.recipe))}: {escape(why)}")


def result_table(result: Outcome, wide: bool = True) -> Table:
    """All trials that ran; memory and start-up too where there is room."""
    table = _table("status", wide)
    for trial in _facts.ranked(result):
        status = _facts.status_of(result, trial)
        table.add_row(*_cells(trial, wide), status, escape(_facts.name_of(trial.recipe)), style=_STYLES.get(status))
    return table


def comparison_table(trials: Sequence[Trial], verdicts: Sequence[str]) -> Table:
    """Named recipes beside the workload as given, each with its verdict."""
    table = _table("verdict", wide=False)
    for trial, word in zip(trials, verdicts, strict=True):
        trial = clean(trial)
        text = word if trial.status == "measured" else f"{trial.status}: {trial.reason}"
        name = escape(_facts.name_of(trial.recipe))
        table.add_row(*_cells(trial, wide=False), escape(text), name, style=_STYLES.get(trial.status))
    return table


def _table(last: str, wide: bool) -> Table:
    """Figures first and recipes last: a recipe may be long, and wraps there without breaking the figures."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("time", "speed-up", "error", *(("memory", "start-up") if wide else ())):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(last, overflow="fold")
    table.add_column("recipe", overflow="fold", ratio=1)
    return table


def _cells(trial: Trial, wide: bool) -> list[str]:
    cells = [
        fmt.milliseconds(trial.time_ms),
        escape(fmt.interval(trial.speedup)),
        fmt.error(trial.accuracy.error),
    ]
    return [*cells, fmt.size(trial.peak_bytes), fmt.seconds(trial.startup.total_s)] if wide else cells
