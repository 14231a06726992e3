"""Training: the loss curves with the band of other seeds, and where the time of a step goes."""

from __future__ import annotations

import math
from typing import Any

import altair as alt

from fettle.measure import Trial
from fettle.report import _format as fmt
from fettle.report import _theme
from fettle.report._theme import ACCENT, LEVERS, QUIET, Drawn
from fettle.result import Result

PHASES = ("data", "forward", "backward", "optimizer")
Rows = list[dict[str, Any]]


def losses(result: Result) -> Drawn | None:
    """The baseline's losses and the winner's, over the band between the lowest and the highest of all seeds."""
    curves = [list(curve) for curve in result.reference.curves if curve]
    if len(curves) < 2:
        return None
    count = min(len(curve) for curve in curves)
    band: Rows = [
        {"step": step + 1, "low": min(c[step] for c in curves), "high": max(c[step] for c in curves)}
        for step in range(count)
    ]
    lines: Rows = [{"step": i + 1, "loss": loss, "run": "baseline"} for i, loss in enumerate(curves[0])]
    winner = result.winner
    if winner is not None and winner.recipe.levels and winner.accuracy.losses:
        stride = max(1, round(count / len(winner.accuracy.losses)))  # a step of a larger batch stands for several
        lines += [
            {"step": (i + 1) * stride, "loss": loss, "run": "tuned"} for i, loss in enumerate(winner.accuracy.losses)
        ]
    x = alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, grid=False))
    y = alt.Y("low:Q", title="loss", scale=alt.Scale(zero=False))
    area = alt.Chart(_theme.data(band)).mark_area(opacity=0.22, color=QUIET).encode(x=x, y=y, y2="high:Q")
    runs = alt.Scale(domain=["baseline", "tuned"], range=[QUIET, ACCENT])
    dashes = alt.Scale(domain=["baseline", "tuned"], range=[[1, 0], [5, 3]])
    line = (
        alt.Chart(_theme.data(lines))
        .mark_line(strokeWidth=2)
        .encode(
            x=x,
            y=alt.Y("loss:Q"),
            color=alt.Color("run:N", scale=runs, title=None),
            strokeDash=alt.StrokeDash("run:N", scale=dashes, title=None),
            tooltip=["run:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    return alt.layer(area, line).properties(width="container", height=260)


def losses_words(result: Result) -> str:
    """The same for those who cannot see it."""
    curves = result.reference.curves
    if len(curves) < 2:
        return ""
    said = (
        f"Losses of the baseline over {len(curves[0])} steps, from {curves[0][0]:.4g} to {curves[0][-1]:.4g}; "
        f"{len(curves) - 1} other seeds end between {min(c[-1] for c in curves[1:]):.4g} and "
        f"{max(c[-1] for c in curves[1:]):.4g}"
    )
    winner = result.winner
    if winner is not None and winner.recipe.levels and winner.accuracy.losses:
        said += f"; tuned it ends at {winner.accuracy.losses[-1]:.4g}"
    return said + "."


def timeline(result: Result) -> Drawn | None:
    """One bar for each of baseline and winner: the phases of a mean step, one after the other."""
    rows = timeline_rows(result)
    if not rows:
        return None
    labels = list(dict.fromkeys(row["run"] for row in rows))
    x = alt.X("start:Q", title="milliseconds from the start of a step", axis=alt.Axis(grid=True))
    bars = (
        alt.Chart(_theme.data(rows))
        .mark_bar(height=26)
        .encode(
            x=x,
            x2="end:Q",
            y=alt.Y("run:N", sort=labels, title=None),
            color=alt.Color(
                "phase:N", scale=alt.Scale(domain=list(PHASES), range=list(LEVERS[: len(PHASES)])), title=None
            ),
            tooltip=["run:N", "phase:N", alt.Tooltip("ms:Q", format=".2f")],
        )
    )
    return alt.layer(bars).properties(width="container", height=52 * len(labels))


def timeline_rows(result: Result) -> Rows:
    """Start and end of each phase in milliseconds."""
    named: list[tuple[str, Trial]] = [("as given", result.baseline)] if result.baseline else []
    if result.winner is not None and result.winner.recipe.levels:
        named.append(("tuned", result.winner))
    rows: Rows = []
    for run, trial in named:
        start = 0.0
        for phase in PHASES:
            ms = trial.phases_ms.get(phase, math.nan)
            if math.isfinite(ms):
                rows.append({"run": run, "phase": phase, "start": start, "end": start + ms, "ms": ms})
                start += ms
    return rows


def timeline_words(result: Result) -> str:
    """The same for those who cannot see it."""
    return "Phases of a step: " + "; ".join(
        f"{row['run']} {row['phase']} {fmt.milliseconds(row['ms'])}" for row in timeline_rows(result)
    )
