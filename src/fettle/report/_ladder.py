"""The ladder: what each step from the baseline to the winner brought, as throughput and as memory bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from fettle.page import theme
from fettle.page.theme import ACCENT, QUIET, Drawn, Rows, captions, line_by_line, sized
from fettle.report import _format as fmt
from fettle.report._facts import NO_LEVER, speed
from fettle.result import Outcome, Rung

_STEP = 48


def rungs(result: Outcome) -> Sequence[Rung]:
    """The ladder; where none was measured, the two ends of it."""
    if result.ladder:
        return result.ladder
    ends = [Rung(NO_LEVER, result.baseline)] if result.baseline else []
    if result.winner is not None and result.winner.recipe.levels:
        ends.append(Rung("winner", result.winner))
    return ends


def throughput(result: Outcome) -> Drawn | None:
    """Samples per second of every rung, the speed-up beside it and its interval as an error bar."""
    rows = throughput_rows(result)
    if not rows:
        return None
    whiskers = [row for row in rows if row["low"] is not None]
    layers = _bars(rows, "samples per second")
    if whiskers:
        base = alt.Chart(theme.data(whiskers)).encode(y=line_by_line())
        line = base.mark_rule(strokeWidth=1.5, yOffset=9, clip=True).encode(x=alt.X("low:Q"), x2="high:Q")
        caps = [
            base.mark_tick(thickness=1.5, height=8, yOffset=9, clip=True).encode(x=f"{side}:Q")
            for side in ("low", "high")
        ]
        layers += [line, *caps]
    return sized(_STEP * len(rows), *layers)


def memory(result: Outcome) -> Drawn | None:
    """Peak memory of every rung."""
    rows = memory_rows(result)
    return sized(_STEP * len(rows), *_bars(rows, "peak memory, MiB")) if rows else None


def throughput_rows(result: Outcome) -> Rows:
    """One row for each rung with a time. Rungs are of several races, so a step's rate is the baseline's rate times what
    it gained over the baseline of its own race; the winner and the baseline are from one."""
    rows: Rows = []
    baseline_rate = result.baseline.throughput if result.baseline else math.nan
    for rung in rungs(result):
        trial = rung.trial
        if not math.isfinite(trial.throughput):
            continue
        relative = trial.recipe.levels and trial.speedup and speed(trial) > 0
        elsewhere = relative and result.winner is not None and trial.recipe != result.winner.recipe
        rate = baseline_rate * speed(trial) if elsewhere and math.isfinite(baseline_rate) else trial.throughput
        row = _row(rung, result, rate)
        row["text"] = fmt.rate(rate)
        row["low"] = row["high"] = None
        if relative and trial.speedup:
            row["text"] = f"{fmt.rate(rate)} · {fmt.times(speed(trial))}"
            if math.isfinite(trial.speedup.low) and math.isfinite(trial.speedup.high):
                row["low"] = rate * trial.speedup.low / speed(trial)
                row["high"] = rate * trial.speedup.high / speed(trial)
        rows.append(row)
    return _numbered(rows)


def memory_rows(result: Outcome) -> Rows:
    """One row for each rung whose memory is known."""
    rows: Rows = []
    first = next((rung.trial.peak_bytes for rung in rungs(result) if rung.trial.peak_bytes), None)
    for rung in rungs(result):
        peak = rung.trial.peak_bytes
        if peak is None:
            continue
        row = _row(rung, result, peak / 2**20)
        ratio = f" · {fmt.times(peak / first)}" if first and rung.trial.recipe.levels else ""
        row["text"] = fmt.size(peak) + ratio
        rows.append(row)
    return _numbered(rows)


def _row(rung: Rung, result: Outcome, value: float) -> dict[str, Any]:
    is_baseline = not rung.trial.recipe.levels
    last = result.winner is not None and rung.trial.recipe == result.winner.recipe
    return {
        "label": rung.label,
        "recipe": str(rung.trial.recipe),
        "value": value,
        "kind": "baseline" if is_baseline else ("winner" if last else "step"),
    }


def _numbered(rows: Rows) -> Rows:
    for index, row in enumerate(rows):
        row["order"] = index
        if index:
            row["label"] = f"+ {row['label']}"
    return rows


def _bars(rows: Rows, title: str) -> list[alt.Chart]:
    """A bar under its own line of text."""
    tallest = max(row["value"] for row in rows)
    # A wide interval may not shrink the bars to nothing: it is cut at half as much again as the longest.
    top = max(tallest, *(min(row.get("high") or 0, 1.5 * tallest) for row in rows))
    base = alt.Chart(theme.data(rows)).encode(y=line_by_line())
    x = alt.X("value:Q", axis=None, scale=alt.Scale(domain=[0, top or 1], nice=False))
    kinds = alt.Scale(domain=["baseline", "step", "winner"], range=[QUIET, ACCENT, ACCENT])
    strength = alt.Scale(domain=["baseline", "step", "winner"], range=[0.75, 0.6, 1])
    bar = base.mark_bar(height=13, yOffset=9, cornerRadiusEnd=2).encode(
        x=x,
        color=alt.Color("kind:N", scale=kinds, legend=None),
        opacity=alt.Opacity("kind:N", scale=strength, legend=None),
        tooltip=[alt.Tooltip("recipe:N", title="recipe"), alt.Tooltip("text:N", title=title)],
    )
    return [bar, *captions(base, "width - 120")]
