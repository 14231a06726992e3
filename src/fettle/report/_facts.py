"""What a report says beyond the plain figures, each computed from the result alone.

Which trials are on the Pareto front, which technique carries a recipe, which limits held.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fettle.generate.speed import Generation
from fettle.measure import Load, Trial, busy_load, pareto
from fettle.recipe import Recipe
from fettle.report import _format as fmt
from fettle.result import Outcome, call_ms, goal_figure

NO_LEVER = "as given"


@dataclass(frozen=True)
class Check:
    """One limit and whether a trial keeps it."""

    name: str
    limit: str
    value: str
    held: bool | None
    """None: it was not measured, which never counts as held."""


def name_of(recipe: Recipe) -> str:
    """What people call a recipe; the baseline is the workload as given."""
    return str(recipe) if recipe.levels else NO_LEVER


def is_winner(result: Outcome, trial: Trial) -> bool:
    """Whether this trial's recipe is the one that won."""
    return result.winner is not None and trial.recipe == result.winner.recipe


def ran(trial: Trial) -> bool:
    """Whether the trial has a time to show."""
    return trial.status != "failed" and math.isfinite(trial.time_ms)


def speed(trial: Trial) -> float:
    """The estimated speed-up; NaN where it is not known."""
    return trial.known_speedup.estimate if trial.known_speedup is not None else math.nan


def ranked(result: Outcome) -> list[Trial]:
    """Trials that ran, those that may win first, the best for the goal first; the baseline keeps its place."""
    shown = [_as_measured_last(result, trial) for trial in result.trials if ran(trial)]
    allowed = {"measured": 0, "rejected": 1, "failed": 2}

    def order(trial: Trial) -> tuple[int, bool, float]:
        if (figure := goal_figure(result.goal, trial)) is not None:
            return allowed[trial.status], math.isnan(figure), figure
        value = speed(trial)
        return allowed[trial.status], math.isnan(value), -value if math.isfinite(value) else trial.time_ms

    return sorted(shown, key=order)


def failed(result: Outcome) -> list[Trial]:
    """Trials without a time, in the order they were tried."""
    return [trial for trial in result.trials if not ran(trial)]


def _as_measured_last(result: Outcome, trial: Trial) -> Trial:
    """The winner's figures come from its last, fresh race, and the baseline's beside them: the same recipe must not
    show two speeds."""
    if result.baseline is not None and not trial.recipe.levels:
        return result.baseline
    if result.winner is not None and trial.recipe == result.winner.recipe and trial.recipe.levels:
        return result.winner
    return trial


def error_name(result: Outcome) -> str:
    """What a trial's error is: of its answers, or of its losses in units of what other seeds make."""
    if result.facts.mode == "training":
        return "loss deviation"
    return "KL divergence" if result.facts.generates else "relative error"


def unit_name(result: Outcome) -> str:
    """What one measured call of the workload is."""
    if result.facts.mode == "training":
        return "step"
    part = {"ttft": "prompt", "tpot": "continuation"}.get(result.goal, "text")
    return part if result.facts.generates else "call"


def checks(result: Outcome, trial: Trial) -> list[Check]:
    """Every limit that was set, and whether `trial` keeps it. Finite outputs are a limit that is always set."""
    limits, accuracy = result.limits.above(result.reference.noise), trial.accuracy
    was_judged = accuracy.finite or math.isfinite(accuracy.error)
    other = Check(
        "other tokens", "none", fmt.share(accuracy.unequal),
        None if math.isnan(accuracy.unequal) else accuracy.unequal == 0,
    )  # fmt: skip
    text = trial.generation or Generation()
    rate = text.throughput if trial.generation else trial.throughput
    samples, call = "samples a second", unit_name(result)
    if result.facts.generates:
        samples, call = "tokens a second", "text"
    peak = math.nan if trial.peak_bytes is None else float(trial.peak_bytes)
    return [
        Check("finite outputs", "always", "yes" if accuracy.finite else "no", accuracy.finite if was_judged else None),
        *_limited("≤", error_name(result), accuracy.error, limits.max_error, fmt.error),
        *_limited("≥", "top-1 agreement", accuracy.agreement, limits.min_agreement, fmt.share),
        *([other] if limits.exact else []),
        *_limited("≤", "metric drop", result.reference.metric - accuracy.metric, limits.max_metric_drop, fmt.number),
        *_limited("≤", f"time of a {call}", call_ms(result.goal, trial), limits.max_latency_ms, fmt.milliseconds),
        *_limited("≤", "time to first token", text.ttft_ms, limits.max_ttft_ms, fmt.milliseconds),
        *_limited("≤", "time per output token", text.tpot_ms, limits.max_tpot_ms, fmt.milliseconds),
        *_limited("≥", samples, rate, limits.min_throughput, fmt.number),
        *_limited("≤", "peak memory", peak, limits.max_memory_bytes, fmt.size),
    ]


def misses(result: Outcome, trial: Trial) -> list[Check]:
    """The limits that a trial does not keep."""
    return [check for check in checks(result, trial) if not check.held]


def status_of(result: Outcome, trial: Trial) -> str:
    """One word: winner, baseline, ok, over limit, rejected or failed."""
    if is_winner(result, trial):
        return "winner"
    if trial.status != "measured":
        return trial.status
    if not trial.recipe.levels:
        return "baseline"
    return "over limit" if misses(result, trial) else "ok"


def front_trials(trials: Sequence[Trial]) -> list[Trial]:
    """Trials that no other beats in speed, error and memory at once, the fastest first.

    A figure that was not measured counts as the worst: a trial is not on the front for want of a number.
    """
    candidates = [trial for trial in trials if trial.ok and math.isfinite(speed(trial))]
    unbeaten = [candidates[place] for place in pareto([_costs(trial) for trial in candidates])]
    return sorted(unbeaten, key=lambda trial: -speed(trial))


def _costs(trial: Trial) -> tuple[float, float, float]:
    error = trial.accuracy.error
    peak = math.inf if trial.peak_bytes is None else float(trial.peak_bytes)
    return -speed(trial), error if math.isfinite(error) else math.inf, peak


def levers(trials: Sequence[Trial]) -> dict[Recipe, str]:
    """By recipe, the technique that carries most of its speed.

    The effects come from a least-squares fit of the log speed-ups on the levels present, drawn slightly towards
    zero so that a level tried once does not take the credit for everything beside it.
    """
    fitted = [trial for trial in trials if trial.recipe.levels and math.isfinite(speed(trial)) and speed(trial) > 0]
    levels = sorted({item for trial in fitted for item in trial.recipe.levels.items()})
    effects = dict.fromkeys(levels, 0.0)
    if fitted:
        present = np.array([[float(trial.recipe.levels.get(n) == v) for n, v in levels] for trial in fitted])
        gains = np.log([speed(trial) for trial in fitted])
        solved = np.linalg.solve(present.T @ present + 0.3 * np.eye(len(levels)), present.T @ gains)
        effects = dict(zip(levels, map(float, solved), strict=True))
    recipes = [trial.recipe for trial in trials]
    return {recipe: max(recipe.levels, key=lambda name: effects.get((name, recipe.levels[name]), 0.0), default=NO_LEVER)
            for recipe in recipes}  # fmt: skip


def _limited(sign: str, name: str, value: float, limit: float | None, text: Callable[[float], str]) -> list[Check]:
    """The check of a limit, if it was set; `sign`: ≤ or ≥."""
    if limit is None:
        return []
    kept = value <= limit if sign == "≤" else value >= limit
    return [Check(name, f"{sign} {text(limit)}", text(value), kept if math.isfinite(value) else None)]


def disturbed(result: Outcome) -> list[Trial]:
    """The trials that the verdict goes by and that were not measured on a quiet machine: the winner's, or, where
    nothing is to be changed, all that might have won."""
    winner = result.winner
    changes = winner is not None and bool(winner.recipe.levels)
    every = [winner] if changes else [winner, result.baseline, *result.trials]
    return [trial for trial in every if trial is not None and trial.ok and not trial.is_quiet]


def load_of(*trials: Trial | None) -> str:
    """What others took, in brackets with a space before; empty where that was little on the mean of all slices."""
    load = busy_load(trial.load for trial in trials if trial is not None)
    return "" if load.is_quiet else f" ({load})"


def under(trial: Trial, asked: bool = False, given: Trial | None = None) -> str:
    """What a figure of this trial over the workload as `given` is of, to stand before it; empty on a quiet machine.
    `asked`: the user wanted it measured beside whatever else the machine does."""
    if trial.is_quiet:
        return ""
    if asked:
        return f"Measured under load, as asked{load_of(trial) or load_of(given)}: "
    return (given if given is not None and trial.load.is_quiet else trial).load.waiting_taken_out


def elapsed(trial: Trial) -> str:
    """What the ratio was beside the neighbours, a sentence; empty where that was not measured."""
    ratio = trial.elapsed_speedup
    if trial.is_quiet or ratio is None or not ratio.is_known:
        return ""
    return (
        "The machine was not quiet for long enough, so this is what to expect on a quiet one, not what was measured "
        f"on one; in time elapsed beside that load it was {fmt.interval(ratio)}."
    )


def load_lines(trials: Sequence[Trial], asked: bool = False) -> list[str]:
    """How busy the machine was during a comparison: what every recipe that was not measured on a quiet one was there.

    What their figures are is said once, and then comes a line of each.
    """
    busy = [trial for trial in trials if not trial.is_quiet and trial.recipe.levels]
    given = next((trial for trial in trials if not trial.recipe.levels), None)
    said = "Measured under load, as asked:" if asked else (
        f"{Load().waiting_taken_out}what to expect on a quiet one, for it was not quiet for long enough to be measured "
        "on one."
    )  # fmt: skip
    return [said, *(_load_line(trial, given, asked) for trial in busy)] if busy else []


def _load_line(trial: Trial, given: Trial | None, asked: bool) -> str:
    load = load_of(trial) or load_of(given)
    ratio = None if asked else trial.elapsed_speedup
    beside = f"; in time elapsed beside that load {fmt.interval(ratio)}" if ratio is not None else ""
    return f"- {name_of(trial.recipe)} {fmt.interval(trial.speedup)}{load}{beside}"
