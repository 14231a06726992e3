"""The charts of a result, each with its title and a text for those who cannot see it; as data, PNG and SVG."""

from __future__ import annotations

from pathlib import Path

import altair as alt

from fettle.page import Figure, as_spec, clean
from fettle.page.drawn import write_pictures
from fettle.page.theme import Rows
from fettle.report import _ladder, _payback, _rounds, _scatter, _text, _training
from fettle.result import Outcome


def figures(result: Outcome) -> list[Figure]:
    """The charts that this result has data for, in the order of the report."""
    result = clean(result)
    bars = [
        ("throughput", _rate_title(result), _ladder.throughput_rows(result), _ladder.throughput(result)),
        ("memory", "Peak memory", _ladder.memory_rows(result), _ladder.memory(result)),
    ]
    ladders = [Figure(name, title, _bars_alt(rows), as_spec(chart)) for name, title, rows, chart in bars
               if chart is not None]  # fmt: skip
    others = [
        _text.roofline(result), _training.losses(result), _training.timeline(result), _training.plan(result),
        _rounds.rounds(result), _scatter.against_error(result), _scatter.against_memory(result), _scatter.front(result),
        _payback.payback(result),
    ]  # fmt: skip
    return [*ladders, *filter(None, others)]


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
