"""All trials at a glance: speed against error, speed against memory, and the Pareto front of all three."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, TypeVar

import altair as alt

from fettle.page import Figure, picture, theme
from fettle.page.theme import LEVERS, NEUTRAL, QUIET, Rows, level, moment, rule
from fettle.report import _format as fmt
from fettle.report._facts import error_name, front_trials, levers, name_of, ranked, speed, status_of, unit_name
from fettle.result import Outcome
from fettle.units import count_text

SHAPES = {
    "winner": "diamond",
    "ok": "circle",
    "baseline": "square",
    "over limit": "triangle-down",
    "rejected": "cross",
}
OTHER = "other"
_HEIGHT = 340
_NICE = [base * 10.0**power for power in range(-12, 7) for base in (1, 2, 5)]
Channel = TypeVar("Channel", alt.X, alt.Y)


def points(result: Outcome) -> Rows:
    """One row for each trial with a speed-up (the baseline's is 1), numbered as in the table of all trials."""
    trials = ranked(result)
    lever = levers(trials)
    common = {name for name, _ in Counter(lever.values()).most_common(len(LEVERS) + 1)}
    front = {id(trial) for trial in front_trials(trials)}
    rows: Rows = []
    for number, trial in enumerate(trials, 1):
        value = speed(trial) if trial.recipe.levels else 1.0
        if not (math.isfinite(value) and value > 0):
            continue
        error = trial.accuracy.error
        rows.append(
            {
                "number": number,
                "recipe": name_of(trial.recipe),
                "lever": lever[trial.recipe] if lever[trial.recipe] in common else OTHER,
                "status": status_of(result, trial),
                "speedup": value,
                "error": error if math.isfinite(error) else None,
                "memory": None if trial.peak_bytes is None else trial.peak_bytes / 2**20,
                "front": id(trial) in front,
                "speedup_text": fmt.interval(trial.speedup) if trial.recipe.levels else "1 (as given)",
                "time_text": fmt.milliseconds(trial.time_ms),
                "error_text": fmt.error(error),
                "memory_text": fmt.size(trial.peak_bytes),
                "startup_text": fmt.seconds(trial.startup.total_s),
                "reason": trial.reason or "–",
            }
        )
    return rows


def against_error(result: Outcome) -> Figure | None:
    """Every trial by speed-up and relative error, with the limit and the baseline's own error as lines."""
    rows = _with_error(points(result))
    if not rows:
        return None
    limit = result.limits.above(result.reference.noise).max_error
    levels = [row["y"] for row in rows] + ([limit] if limit else [])
    y = _log(levels, alt.Y("y:Q"), f"{error_name(result)} (log)", "format(datum.value, '~g')")
    rules: list[alt.Chart] = []
    if limit:
        rules += level(limit, f"limit {fmt.error(limit)}")
    own = next((row["y"] for row in rows if row["status"] == "baseline" and row["error"]), None)
    if own:
        rules += level(own, "as given", QUIET)
    return _cloud("error", "Speed-up against error", error_name(result), result, rows, y, rules)


def against_memory(result: Outcome) -> Figure | None:
    """Every trial by speed-up and peak memory, with the limit as a line."""
    rows = [{**row, "y": row["memory"]} for row in points(result) if row["memory"] is not None]
    if not rows:
        return None
    limit = result.limits.max_memory_bytes
    y = alt.Y("y:Q", title="peak memory, MiB", scale=alt.Scale(zero=True, nice=True), axis=alt.Axis(tickCount=6))
    rules = level(limit / 2**20, f"limit {fmt.size(limit)}") if limit is not None else []
    return _cloud("footprint", "Speed-up against memory", "peak memory", result, rows, y, rules)


def front(result: Outcome) -> Figure | None:
    """The Pareto front: speed and error as place, memory as size; what is beaten in all three stays in the back."""
    rows = [row for row in _with_error(points(result)) if row["status"] != "rejected"]
    if not any(row["front"] for row in rows):
        return None
    known = any(row["memory"] is not None for row in rows)
    y = _log([row["y"] for row in rows], alt.Y("y:Q"), f"{error_name(result)} (log)", "format(datum.value, '~g')")
    base = alt.Chart(theme.data(rows)).encode(x=_speedup_axis(rows), y=y, tooltip=_tooltip(result))
    dots = theme.front_dots(base, 160)
    if known:
        scale = alt.Scale(range=[60, 700], zero=True)
        dots = dots.encode(
            size=alt.Size("memory:Q", scale=scale, legend=alt.Legend(title="peak memory, MiB", values=_sizes(rows)))
        )
    numbers = (
        base.transform_filter("datum.front").mark_text(fontWeight=700, fontSize=12, dy=-18).encode(text="number:N")
    )
    best = front_trials(ranked(result))
    listed = "; ".join(
        f"{fmt.times(speed(trial))} with error {fmt.error(trial.accuracy.error)} and {fmt.size(trial.peak_bytes)}"
        for trial in best[:8]
    )
    words = f"{count_text(len(best), 'trial')} that no other beats in speed, error and memory at once: {listed}."
    return picture("pareto", "The Pareto front", words, _HEIGHT, dots, numbers)


def _with_error(rows: Rows) -> Rows:
    """Rows that have an error; one of 0, which a logarithmic axis cannot hold, is drawn at its foot."""
    errors = [row["error"] for row in rows if row["error"]]
    floor = min(errors) / 3 if errors else 1e-9
    return [{**row, "y": max(row["error"], floor)} for row in rows if row["error"] is not None]


def _cloud(
    name: str, title: str, against: str, result: Outcome, rows: Rows, y: alt.Y, rules: list[alt.Chart]
) -> Figure:  # fmt: skip
    picked = alt.selection_point(fields=["lever"], bind="legend")
    names = sorted({row["lever"] for row in rows}, key=lambda name: (name in ("as given", OTHER), name))
    colours = [QUIET if name in ("as given", OTHER) else LEVERS[i % len(LEVERS)] for i, name in enumerate(names)]
    shown = [status for status in SHAPES if any(row["status"] == status for row in rows)]
    base = alt.Chart(theme.data(rows)).encode(x=_speedup_axis(rows, _latency_ratio(result)), y=y)
    dots = (
        base.mark_point(filled=True, size=90)
        .encode(
            color=alt.Color(
                "lever:N",
                scale=alt.Scale(domain=names, range=colours),
                legend=alt.Legend(
                    title="main lever (click to pick one)", columns=3, symbolType="circle", labelLimit=110
                ),
            ),
            shape=alt.Shape(
                "status:N",
                scale=alt.Scale(domain=shown, range=[SHAPES[status] for status in shown]),
                legend=alt.Legend(title="status", columns=3),
            ),
            size=alt.condition("datum.status === 'winner'", alt.value(240), alt.value(90)),
            opacity=alt.condition(picked, alt.value(0.9), alt.value(0.12)),
            tooltip=_tooltip(result),
        )
        .add_params(picked)
    )
    label = (
        base.transform_filter("datum.status === 'winner'")
        .mark_text(align="right", dx=-12, fontWeight=600)
        .encode(text=alt.value("winner"))
    )
    one = rule("x", 1, QUIET, NEUTRAL)
    ratio = _latency_ratio(result)
    if ratio is not None:
        text = f"latency limit {fmt.milliseconds(result.limits.max_latency_ms)}"
        rules = [*rules, *moment(ratio, text)]
    every = points(result)
    low, high = min(row["speedup"] for row in every), max(row["speedup"] for row in every)
    words = (
        f"Scatter of {count_text(len(every), 'trial')}, "
        f"speed-up from {fmt.times(low)} to {fmt.times(high)} against {against}; "
        f"{sum(row['status'] == 'rejected' for row in every)} rejected. The figures are in the table of all trials."
    )
    return picture(name, title, words, _HEIGHT, one, *rules, dots, label)


def _latency_ratio(result: Outcome) -> float | None:
    """Where on the speed-up axis the latency limit lies; None where speed-ups are of a part of that time."""
    limit, baseline = result.limits.max_latency_ms, result.baseline
    if not limit or limit <= 0 or baseline is None or not math.isfinite(baseline.time_ms):
        return None
    if result.goal in ("ttft", "tpot"):
        return None
    return baseline.time_ms / limit


def _speedup_axis(rows: Rows, *more: float | None) -> alt.X:
    values = [row["speedup"] for row in rows] + [1.0] + [value for value in more if value]
    return _log(values, alt.X("speedup:Q"), "speed-up over the model as given (log)", "format(datum.value, '~g') + 'x'")


def _log(values: list[float], channel: Channel, title: str, label: str) -> Channel:
    """A logarithmic axis with a little room at its ends and ticks at 1, 2 and 5."""
    low, high = min(values), max(values)
    room = max(1.06, (high / low) ** 0.06)
    low, high = low / room, high * room
    ticks = [tick for tick in _NICE if low <= tick <= high]
    if len(ticks) > 8:
        ticks = [tick for tick in ticks if f"{tick:e}".startswith("1")]
    axis: dict[str, Any] = {"labelExpr": label, "tickCount": 6}
    if len(ticks) >= 3:
        axis["values"] = ticks
    return channel.title(title).scale(type="log", domain=[low, high], nice=False).axis(**axis)


def _sizes(rows: Rows) -> list[float]:
    known = [row["memory"] for row in rows if row["memory"]]
    if not known:
        return []
    steps = [step for step in _NICE if min(known) * 0.5 <= step <= max(known) * 1.2]
    return steps[-3:] or [round(max(known))]


def _tooltip(result: Outcome) -> list[alt.Tooltip]:
    titles = {
        "number": "#",
        "recipe": "recipe",
        "speedup_text": "speed-up",
        "time_text": f"time of a {unit_name(result)}",
        "error_text": error_name(result),
        "memory_text": "peak memory",
        "startup_text": "start-up",
        "lever": "main lever",
        "status": "status",
        "reason": "reason",
    }
    return [alt.Tooltip(f"{name}:N", title=title) for name, title in titles.items()]
