"""The charts of a result, each with its title and a text for those who cannot see it; as data, PNG and SVG."""

from __future__ import annotations

from pathlib import Path

import altair as alt

from fettle.page import Figure, as_spec, clean
from fettle.page.drawn import write_pictures
from fettle.page.theme import Drawn, Rows
from fettle.report import _ladder, _payback, _rounds, _scatter, _text, _training
from fettle.result import Outcome


def figures(result: Outcome) -> list[Figure]:
    """The charts that this result has data for, in the order of the report."""
    result = clean(result)
    ladders = [Figure(name, title, _bars_alt(rows), as_spec(chart)) for name, title, rows, chart in _ladders(result)]
    others = [
        _text.roofline(result), _training.losses(result), _training.timeline(result), _training.plan(result),
        _rounds.rounds(result), _scatter.against_error(result), _scatter.against_memory(result), _scatter.front(result),
        _payback.payback(result),
    ]  # fmt: skip
    return [*ladders, *filter(None, others)]


def ladder(result: Outcome) -> Figure | None:
    """Throughput and memory bars side by side, as one picture."""
    result = clean(result)
    both = _ladders(result)
    if not both:
        return None
    named = [
        chart.properties(
            width=400, title=alt.Title(title.lower(), anchor="start", fontWeight="normal", fontSize=12, offset=12)
        )
        for _, title, _, chart in both
    ]
    chart = as_spec(alt.hconcat(*named, spacing=40))
    return Figure("ladder", "From the baseline to the winner", _bars_alt(both[0][2]), chart)


def _ladders(result: Outcome) -> list[tuple[str, str, Rows, Drawn]]:
    """Name, title, rows and chart of each ladder that there is data for."""
    written = "prompts" if result.goal == "ttft" else "tokens"
    rate = f"Throughput, {written if result.facts.generates else 'samples'} per second"
    both = (
        ("throughput", rate, "samples per second", _ladder.throughput_rows(result)),
        ("memory", "Peak memory", "peak memory, MiB", _ladder.memory_rows(result)),
    )
    return [(name, title, rows, _ladder.bars(rows, what)) for name, title, what, rows in both if rows]


def write_charts(result: Outcome, folder: str | Path) -> list[Path]:
    """Write every chart to `folder` as PNG and as SVG, and return the paths of both."""
    side_by_side = ladder(result)
    rest = [figure for figure in figures(result) if figure.name not in ("throughput", "memory")]
    return write_pictures([*([side_by_side] if side_by_side else []), *rest], Path(folder))


def _bars_alt(rows: Rows) -> str:
    return "Bars: " + "; ".join(f"{row['label']} {row['text']}" for row in rows) + "."
