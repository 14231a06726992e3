"""Under what load a figure was measured, in words."""

from __future__ import annotations

from collections.abc import Sequence

from fettle.measure import Trial
from fettle.report import _format as fmt
from fettle.report._facts import name_of


def under(trial: Trial, asked: bool = False) -> str:
    """What a figure of this trial is of, to stand before it; empty on a quiet machine. `asked`: the user wanted it
    measured beside whatever else the machine does."""
    if trial.is_quiet:
        return ""
    if asked:
        return f"Measured under load, as asked ({trial.load}): "
    return f"On a busy machine ({trial.load}), waiting for a core taken out: "


def elapsed(trial: Trial) -> str:
    """What the ratio was beside the neighbours, a sentence; empty where that was not measured."""
    ratio = trial.elapsed_speedup
    if trial.is_quiet or ratio is None:
        return ""
    return (
        "The machine was not quiet for long enough, so this is what to expect on a quiet one, not what was measured "
        f"on one; in time elapsed beside that load it was {fmt.interval(ratio)}."
    )


def load_lines(trials: Sequence[Trial], asked: bool = False) -> list[str]:
    """How busy the machine was during a comparison: one line for each recipe that was not measured on a quiet one."""
    return [
        f"{under(trial, asked)}{name_of(trial.recipe)} {fmt.interval(trial.speedup)}. {'' if asked else elapsed(trial)}"
        for trial in trials
        if not trial.is_quiet and trial.recipe.levels
    ]
