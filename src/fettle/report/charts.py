"""The charts of a result, each with its title and a text for those who cannot see it; as data, PNG and SVG."""

from __future__ import annotations

from pathlib import Path

import altair as alt

from fettle.page import Figure, as_spec, clean
from fettle.page.drawn import write_pictures
from fettle.page.theme import Rows
from fettle.report import _format as fmt
from fettle.report import _ladder, _payback, _rounds, _scatter, _text, _training
from fettle.report._facts import error_name, front_trials, ranked
from fettle.report._verdict import payback as payback_text
from fettle.result import Outcome


def figures(result: Outcome) -> list[Figure]:
    """The charts that this result has data for, in the order of the report."""
    result = clean(result)
    drawn = [
        ("throughput", _rate_title(result), _bars_alt(_ladder.throughput_rows(result)), _ladder.throughput),
        ("memory", "Peak memory", _bars_alt(_ladder.memory_rows(result)), _ladder.memory),
        ("roofline", "Prefill and decode under the machine's limits", _text.roofline_words(result), _text.roofline),
        ("losses", "Losses, baseline and tuned", _training.losses_words(result), _training.losses),
        ("timeline", "A step, by phase", _training.timeline_words(result), _training.timeline),
        ("plan", "The memory plan, one rank", _training.plan_words(result), _training.plan),
        ("rounds", "The final race, round by round", _rounds.words(result), _rounds.rounds),
        ("error", "Speed-up against error", _cloud_alt(result, error_name(result)), _scatter.against_error),
        ("footprint", "Speed-up against memory", _cloud_alt(result, "peak memory"), _scatter.against_memory),
        ("pareto", "The Pareto front", _front_alt(result), _scatter.front),
        ("payback", "Start-up and payback", payback_text(result), _payback.payback),
    ]
    charts = []
    for name, title, words, draw in drawn:
        chart = draw(result)
        if chart is not None:
            charts.append(Figure(name, title, words, as_spec(chart)))
    return charts


def ladder(result: Outcome) -> Figure | None:
    """Throughput and memory bars side by side, as one picture."""
    result = clean(result)
    both = [chart for chart in (_ladder.throughput(result), _ladder.memory(result)) if chart is not None]
    if not both:
        return None
    titles = [_rate_title(result).lower(), "peak memory"]
    named = [
        chart.properties(width=400, title=alt.Title(title, anchor="start", fontWeight="normal", fontSize=12, offset=12))
        for chart, title in zip(both, titles, strict=False)
    ]
    return Figure(
        "ladder", "From the baseline to the winner", _bars_alt(_ladder.throughput_rows(result)),
        as_spec(alt.hconcat(*named, spacing=40)),
    )  # fmt: skip


def write_charts(result: Outcome, folder: str | Path) -> list[Path]:
    """Write every chart to `folder` as PNG and as SVG, and return the paths of both."""
    side_by_side = ladder(result)
    rest = [figure for figure in figures(result) if figure.name not in ("throughput", "memory")]
    return write_pictures([*([side_by_side] if side_by_side else []), *rest], Path(folder))


def _rate_title(result: Outcome) -> str:
    written = "prompts" if result.goal == "ttft" else "tokens"
    return f"Throughput, {written if result.facts.generates else 'samples'} per second"


def _bars_alt(rows: Rows) -> str:
    return "Bars: " + "; ".join(f"{row['label']} {row['text']}" for row in rows) + "."


def _cloud_alt(result: Outcome, against: str) -> str:
    rows = _scatter.points(result)
    if not rows:
        return ""
    low, high = min(row["speedup"] for row in rows), max(row["speedup"] for row in rows)
    rejected = sum(row["status"] == "rejected" for row in rows)
    return (
        f"Scatter of {len(rows)} trials, speed-up from {fmt.times(low)} to {fmt.times(high)} against {against}; "
        f"{rejected} rejected. The figures are in the table of all trials."
    )


def _front_alt(result: Outcome) -> str:
    front = front_trials(ranked(result))
    listed = "; ".join(
        f"{fmt.times(trial.speedup.estimate if trial.speedup else None)} with error {fmt.error(trial.accuracy.error)} "
        f"and {fmt.size(trial.peak_bytes)}"
        for trial in front[:8]
    )
    return f"{len(front)} trials that no other beats in speed, error and memory at once: {listed}."
