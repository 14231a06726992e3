"""When a start-up cost is paid back: seconds since the start against calls answered."""

from __future__ import annotations

import math
from dataclasses import replace

import altair as alt

from fettle.measure import Startup, Trial
from fettle.page import Figure, picture, theme
from fettle.page.theme import ACCENT, LEVERS, QUIET, coloured, moment
from fettle.report import _format as fmt
from fettle.report import _verdict
from fettle.report._facts import front_trials, is_winner, ranked, speed, unit_name
from fettle.result import Outcome

_POINTS = 60
GIVEN, WINNER, AGAIN = "as given", "winner", "winner, started again"


def payback(result: Outcome) -> Figure | None:
    """Lines for the model as given, the winner, and up to two others that start sooner than the winner."""
    series = _series(result)
    baseline = result.baseline
    if baseline is None or len(series) < 2:
        return None
    calls = result.payback_calls
    end = max(1000.0, 10 * calls) if calls and math.isfinite(calls) else 1000.0
    rows = []
    for name, trial in series.items():
        per_call = trial.time_ms / 1e3 * baseline.samples / trial.samples
        for index in range(_POINTS + 1):
            x = end ** (index / _POINTS)
            rows.append({"calls": x, "seconds": trial.startup.total_s + x * per_call, "series": name})
    own = {GIVEN: QUIET, WINNER: ACCENT, AGAIN: LEVERS[0]}
    colours = {name: own.get(name, LEVERS[1 + 2 * i % 6]) for i, name in enumerate(series)}
    scale = alt.Scale(type="log", nice=False)
    done = "steps made" if unit_name(result) == "step" else "calls answered"
    line = (
        alt.Chart(theme.data(rows))
        .mark_line(strokeWidth=2.5)
        .encode(
            x=alt.X("calls:Q", title=f"{done} (log)", scale=scale, axis=alt.Axis(format="~s", tickCount=6)),
            y=alt.Y(
                "seconds:Q", title="seconds since the start (log)", scale=scale, axis=alt.Axis(format="~g", tickCount=6)
            ),
            color=coloured("series", colours, columns=1, labelLimit=310, symbolType="stroke"),
        )
    )
    layers: list[alt.Chart] = [line]
    if calls and math.isfinite(calls) and calls >= 1:
        near_end = calls > end**0.6
        text = f"paid back after {fmt.count(calls)} {unit_name(result)}s"
        layers += moment(calls, text, QUIET, near_end=near_end)
    return picture("payback", "Start-up and payback", _verdict.payback(result), 300, *layers)


def _series(result: Outcome) -> dict[str, Trial]:
    baseline, winner = result.baseline, result.winner
    chosen = {GIVEN: baseline, WINNER: winner if winner and winner.recipe.levels else None}
    usable = {name: trial for name, trial in chosen.items() if trial is not None and _usable(trial)}
    if winner is not None and WINNER in usable:
        trials = ranked(result)
        number = {trial.recipe: index for index, trial in enumerate(trials, 1)}
        sooner = [
            trial
            for trial in front_trials(trials)
            if _usable(trial)
            and trial.recipe.levels
            and not is_winner(result, trial)
            and speed(trial) > 1.05
            and trial.startup.total_s < 0.7 * winner.startup.total_s
        ]
        if result.warm_payback_calls is not None:
            usable[AGAIN] = replace(winner, startup=Startup(optimize_s=0.0, first_call_s=winner.startup.warm_s))
        for trial in sooner[:2]:
            usable[f"#{number[trial.recipe]} {trial.recipe}"] = trial
    return usable


def _usable(trial: Trial) -> bool:
    return math.isfinite(trial.time_ms) and trial.time_ms > 0 and trial.startup.total_s >= 0
