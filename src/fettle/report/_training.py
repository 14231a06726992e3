"""Training: the losses with the band of other seeds, where the time of a step goes, and the memory plan."""

from __future__ import annotations

import math

import altair as alt

from fettle.measure import Trial
from fettle.page import Figure, picture, theme
from fettle.page.theme import ACCENT, QUIET, Rows, by_part, coloured, peaks
from fettle.report import _format as fmt
from fettle.result import Outcome
from fettle.techniques import uses_ranks

PHASES = ("data", "forward", "backward", "optimizer", "communication", "idle")
MEMORY = ("parameters", "gradients", "optimizer state", "activations", "transients")


def losses(result: Outcome) -> Figure | None:
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
    ends = [curve[-1] for curve in curves[1:]]
    words = (
        f"Losses of the baseline over {len(curves[0])} steps, from {curves[0][0]:.4g} to {curves[0][-1]:.4g}; "
        f"{len(ends)} other seeds end between {min(ends):.4g} and {max(ends):.4g}"
    )
    winner = result.winner
    if winner is not None and winner.recipe.levels and winner.accuracy.losses:
        words += f"; tuned it ends at {winner.accuracy.losses[-1]:.4g}"
        stride = max(1, round(count / len(winner.accuracy.losses)))  # a step of a larger batch stands for several
        lines += [
            {"step": (i + 1) * stride, "loss": loss, "run": "tuned"} for i, loss in enumerate(winner.accuracy.losses)
        ]
    x = alt.X("step:Q", title="step", axis=alt.Axis(tickMinStep=1, grid=False))
    y = alt.Y("low:Q", title="loss", scale=alt.Scale(zero=False))
    area = alt.Chart(theme.data(band)).mark_area(opacity=0.22, color=QUIET).encode(x=x, y=y, y2="high:Q")
    dashes = alt.Scale(domain=["baseline", "tuned"], range=[[1, 0], [5, 3]])
    line = (
        alt.Chart(theme.data(lines))
        .mark_line(strokeWidth=2)
        .encode(
            x=x,
            y=alt.Y("loss:Q"),
            color=coloured("run", {"baseline": QUIET, "tuned": ACCENT}),
            strokeDash=alt.StrokeDash("run:N", scale=dashes, title=None),
            tooltip=["run:N", "step:Q", alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    return picture("losses", "Losses, baseline and tuned", f"{words}.", 260, area, line)


def timeline(result: Outcome) -> Figure | None:
    """One bar for each of baseline, winner and plain parallel strategy: the parts of a mean step, side by side."""
    rows = timeline_rows(result)
    if not rows:
        return None
    labels = list(dict.fromkeys(row["run"] for row in rows))
    x = alt.X("start:Q", title="milliseconds from the start of a step", axis=alt.Axis(grid=True))
    bars = (
        alt.Chart(theme.data(rows))
        .mark_bar(height=26)
        .encode(
            x=x,
            x2="end:Q",
            y=alt.Y("run:N", sort=labels, title=None),
            color=by_part("phase", PHASES, columns=3),
            tooltip=["run:N", "phase:N", alt.Tooltip("ms:Q", format=".2f")],
        )
    )
    words = "Parts of a step, which add up to its wall time: " + "; ".join(
        f"{row['run']} {row['phase']} {fmt.milliseconds(row['ms'])}" for row in rows
    )
    return picture("timeline", "A step, by phase", words, (52 if len(labels) < 3 else 36) * len(labels), bars)


def timeline_rows(result: Outcome) -> Rows:
    """Start and end of each phase in milliseconds."""
    named: list[tuple[str, Trial]] = [("as given", result.baseline)] if result.baseline else []
    if result.winner is not None and result.winner.recipe.levels:
        named.append(("tuned", result.winner))
    shown = {str(trial.recipe) for _, trial in named}
    for trial in result.trials:  # each parallel strategy by itself, for what it spends on communication
        levels = list(trial.recipe.levels.values())
        if len(levels) == 1 and uses_ranks(trial.recipe) and trial.phases_ms and str(trial.recipe) not in shown:
            named.append((levels[0], trial))
    rows: Rows = []
    for run, trial in named:
        start = 0.0
        for phase in PHASES:
            ms = trial.phases_ms.get(phase, math.nan)
            if math.isfinite(ms):
                rows.append({"run": run, "phase": phase, "start": start, "end": start + ms, "ms": ms})
                start += ms
    return rows


def plan(result: Outcome) -> Figure | None:
    """Stacked bars of the peak that the plan predicts for a rank of each strategy; the line is what a device holds."""
    rows = [row for row in result.plan if not row.failed]
    if not rows:
        return None
    limit = min((row.limit_bytes for row in result.plan if row.limit_bytes), default=None)
    layers = peaks(
        {row.strategy: row.parts for row in rows}, MEMORY, "MiB", "predicted peak of one rank", limit, 2,
        alt.Axis(labelLimit=190),
    )  # fmt: skip
    words = "; ".join(f"{row.strategy} {fmt.size(row.peak_bytes)}" for row in rows)
    words = f"Predicted peak of one rank: {words}."
    return picture("plan", "The memory plan, one rank", words, alt.Step(24), *layers)
