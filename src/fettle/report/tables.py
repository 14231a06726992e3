"""Rich tables for the terminal: plain when piped, whole at 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fettle.measure import Trial
from fettle.page import clean
from fettle.report import _facts, _text, _verdict
from fettle.report import _format as fmt
from fettle.result import Goal, Outcome, goal_figure
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
    """All trials that ran: times, the goal's own figure, and memory and start-up where there is room."""
    names = ["time", "speed-up", "error", *(("memory", "start-up") if wide else ())]
    if (own := _of_goal(result.goal, result.trials)) and own not in names:
        names.append(own)
    table = _table(names, "status")
    for trial in _facts.ranked(result):
        status = _facts.status_of(result, trial)
        name = escape(_facts.name_of(trial.recipe))
        table.add_row(*_cells(trial, names), status, name, style=_STYLES.get(status))
    return table


def comparison_table(trials: Sequence[Trial], verdicts: Sequence[str], goal: Goal = "throughput") -> Table:
    """Named recipes beside the workload as given, each with its verdict and what the goal goes by."""
    names = list(filter(None, ["time", "speed-up", "error", _of_goal(goal, trials)]))
    table = _table(names, "verdict")
    for trial, word in zip(trials, verdicts, strict=True):
        trial = clean(trial)
        text = word if trial.status == "measured" else f"{trial.status}: {trial.reason}"
        name = escape(_facts.name_of(trial.recipe))
        table.add_row(*_cells(trial, names), escape(text), name, style=_STYLES.get(trial.status))
    return table


_OF_GOAL = {"memory": "memory", "startup": "start-up", "warm-startup": "warm start", "energy": "energy a row"}
"""The column that each goal goes by, where it is not the speed-up."""


def _of_goal(goal: Goal, trials: Sequence[Trial]) -> str:
    """That column; empty for the speed-up."""
    return "energy a token" if goal == "energy" and any(one.generation for one in trials) else _OF_GOAL.get(goal, "")


_FIGURES: Mapping[str, Callable[[Trial], str]] = {
    "time": lambda trial: fmt.milliseconds(trial.time_ms),
    "speed-up": lambda trial: escape(fmt.interval(trial.speedup)),
    "error": lambda trial: fmt.error(trial.accuracy.error),
    "memory": lambda trial: fmt.size(trial.peak_bytes),
    "start-up": lambda trial: fmt.seconds(trial.startup.total_s),
    "warm start": lambda trial: fmt.seconds(trial.startup.again_s),
    **dict.fromkeys(("energy a row", "energy a token"), lambda trial: fmt.joules(goal_figure("energy", trial))),
}


def _table(names: Sequence[str], last: str) -> Table:
    """Figures first and recipes last: a recipe may be long, and wraps there without breaking the figures."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(last, overflow="fold")
    table.add_column("recipe", overflow="fold", ratio=1)
    return table


def _cells(trial: Trial, names: Sequence[str]) -> list[str]:
    return [_FIGURES[name](trial) for name in names]
