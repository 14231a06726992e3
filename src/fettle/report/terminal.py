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
from fettle.units import count_text

_ALIKE = 3
"""Recipes that failed for one reason and are named; the others are counted."""
_STYLES = {"winner": "bold green", "rejected": "yellow", "over limit": "yellow", "baseline": "bold"}


def print_result(result: Outcome, console: Console) -> None:
    """The verdict, the trials from fast to slow, what failed, and what was left out."""
    result = clean(result)
    console.print()
    trials = _facts.ranked(result)
    words = [_facts.status_of(result, trial) for trial in trials]
    wide = ("memory", "start-up") if console.width >= 120 else ()  # where there is room
    console.print(_table(trials, words, words, "status", result.goal, wide))
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
            f"[dim]left out: {count_text(len(result.left_out), 'level')} of {escape(', '.join(names))}; "
            "the report says why[/]",
        )
    console.print()
    console.print(f"[bold]{escape(_verdict.verdict(result))}[/]")
    if written := _text.sentence(result):
        console.print(escape(written))
    if payback := _verdict.payback(result):
        console.print(escape(payback))
    for trial in result.nearest:
        why = trial.reason or _verdict.miss_text(result, trial)
        console.print(f"  nearest: {escape(_facts.name_of(trial.recipe))}: {escape(why)}")


def comparison_table(trials: Sequence[Trial], verdicts: Sequence[str], goal: Goal = "throughput") -> Table:
    """Named recipes beside the workload as given, each with its verdict and what the goal goes by."""
    trials = clean(list(trials))
    states = [trial.status for trial in trials]
    words = [word if trial.status == "measured" else f"{trial.status}: {trial.reason}"
             for trial, word in zip(trials, verdicts, strict=True)]  # fmt: skip
    return _table(trials, words, states, "verdict", goal, ())


_OF_GOAL = {"memory": "memory", "startup": "start-up", "warm-startup": "warm start", "energy": "energy a row"}
"""The column that each goal goes by, where it is not the speed-up."""
_FIGURES: Mapping[str, Callable[[Trial], str]] = {
    "time": lambda trial: fmt.milliseconds(trial.time_ms),
    "speed-up": lambda trial: escape(fmt.interval(trial.speedup)),
    "error": lambda trial: fmt.error(trial.accuracy.error),
    "memory": lambda trial: fmt.size(trial.peak_bytes),
    "start-up": lambda trial: fmt.seconds(trial.startup.total_s),
    "warm start": lambda trial: fmt.seconds(trial.startup.again_s),
    **dict.fromkeys(("energy a row", "energy a token"), lambda trial: fmt.joules(goal_figure("energy", trial))),
}


def _table(
    trials: Sequence[Trial], words: Sequence[str], states: Sequence[str], last: str, goal: Goal, more: Sequence[str]
) -> Table:
    """Figures first, the goal's own among them, and recipes last: a recipe may be long, and wraps there without
    breaking the figures. `words` stand in the column `last`, and `states` colour the rows."""
    own = "energy a token" if goal == "energy" and any(one.generation for one in trials) else _OF_GOAL.get(goal)
    names = list(dict.fromkeys(filter(None, ("time", "speed-up", "error", *more, own))))
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(last, overflow="fold")
    table.add_column("recipe", overflow="fold", ratio=1)
    for trial, word, state in zip(trials, words, states, strict=True):
        cells = [_FIGURES[name](trial) for name in names]
        table.add_row(*cells, escape(word), escape(_facts.name_of(trial.recipe)), style=_STYLES.get(state))
    return table
