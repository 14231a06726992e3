"""Trials of fettle's own studies as a table of experiments."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fettle.measure import Trial, by_round
from fettle.studies.table import Experiment, Response, Table

TIME, MEMORY, ERROR = "ms_per_sample", "peak_mib", "error"
RESPONSES = (
    Response(TIME, better="faster"),
    Response(MEMORY, better="less memory"),
    Response(ERROR, better="less error"),
)
_LEAST_ERROR = 1e-7
"""Relative errors below this are the rounding of float32, and as good as none."""
_NORMAL = 1.96


@dataclass(frozen=True)
class Measured:
    """What one workload's session measured."""

    group: str
    """The model: the target without its arguments."""
    arguments: Mapping[str, str]
    """What its factory was called with: levels of factors outside of the recipe."""
    choices: Mapping[str, Sequence[str]]
    """Levels by technique, the given one first."""
    trials: Sequence[Trial]
    machine: str = ""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """By recipe: the name of the very machine."""


def table_of(measured: Sequence[Measured], arguments: Mapping[str, Sequence[str]]) -> Table:
    """One table of all that was measured; `arguments` are the factors outside of the recipe, with their levels.

    Times are those of each session's workload as given over each recipe's speed-up, which all its races say together.
    """
    choices: dict[str, list[str]] = {}
    for one in measured:
        for name, levels in one.choices.items():
            known = choices.setdefault(name, [])
            known += [level for level in levels if level not in known]
    factors = {name: tuple(levels) for name, levels in choices.items() if len(levels) > 1}
    factors |= {name: tuple(levels) for name, levels in arguments.items()}
    rows = [_row(one, trial, choices, factors) for one in measured for trial in one.trials]
    return Table(factors, RESPONSES, tuple(rows), apart=frozenset(arguments))


def _row(
    one: Measured, trial: Trial, choices: Mapping[str, Sequence[str]], factors: Mapping[str, Sequence[str]]
) -> Experiment:
    levels = {
        name: one.arguments[name] if name in one.arguments else trial.recipe.levels.get(name, choices[name][0])
        for name in factors
    }
    host = one.hosts.get(str(trial.recipe), "")
    if trial.status == "failed":
        return Experiment(
            levels, {}, one.group, reason=trial.reason or "it was not measured", machine=one.machine, host=host
        )
    baseline = next((other for other in one.trials if not other.recipe.levels), trial)
    ratio = trial.speedup if trial.recipe.levels else None
    given_ms = baseline.time_ms / baseline.samples
    values = {
        TIME: given_ms / ratio.estimate if ratio is not None and ratio.estimate > 0 else trial.time_ms / trial.samples
    }
    if trial.peak_bytes:
        values[MEMORY] = trial.peak_bytes / 2**20
    if math.isfinite(trial.accuracy.error):
        values[ERROR] = max(trial.accuracy.error, _LEAST_ERROR)
    errors = {}
    if ratio is not None and 0 < ratio.low <= ratio.high < math.inf:
        errors[TIME] = (math.log(ratio.high) - math.log(ratio.low)) / 2 / _NORMAL
    elif not trial.recipe.levels:
        errors[TIME] = 0.0  # each speed-up is against it, and has its error
    times = {abs(number): ms for number, ms in by_round(trial.slices).items()}
    rounds = tuple((number, ms / trial.samples) for number, ms in sorted(times.items()))
    return Experiment(levels, values, one.group, errors, trial.reason, rounds, one.machine, host)
