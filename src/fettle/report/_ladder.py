"""The ladder: what each step from the baseline to the winner brought, as throughput and as memory bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from fettle.page.theme import ACCENT, QUIET, Drawn, Rows, ladder
from fettle.report import _format as fmt
from fettle.report._facts import NO_LEVER, speed
from fettle.result import Outcome, Rung

_KINDS = {"baseline": (QUIET, 0.75), "step": (ACCENT, 0.6), "winner": (ACCENT, 1.0)}


def rungs(result: Outcome) -> Sequence[Rung]:
    """The ladder; where none was measured, the two ends of it."""
    if result.ladder:
        return result.ladder
    ends = [Rung(NO_LEVER, result.baseline)] if result.baseline else []
    if result.winner is not None and result.winner.recipe.levels:
        ends.append(Rung("winner", result.winner))
    return ends


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
            row["low"] = rate * trial.speedup.low / speed(trial)
            row["high"] = rate * trial.speedup.high / speed(trial)
        rows.append(row)
    return _added(rows)


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
    return _added(rows)


def _row(rung: Rung, result: Outcome, value: float) -> dict[str, Any]:
    is_baseline = not rung.trial.recipe.levels
    last = result.winner is not None and rung.trial.recipe == result.winner.recipe
    return {
        "label": rung.label,
        "recipe": str(rung.trial.recipe),
        "value": value,
        "kind": "baseline" if is_baseline else ("winner" if last else "step"),
    }


def _added(rows: Rows) -> Rows:
    for row in rows[1:]:
        row["label"] = f"+ {row['label']}"
    return rows


def bars(rows: Rows, title: str) -> Drawn:
    """The rows drawn; `title`: what they are of."""
    tallest = max(row["value"] for row in rows)
    # A wide interval may not shrink the bars to nothing: it is cut at half as much again as the longest.
    top = max(tallest, *(min(row.get("high") or 0, 1.5 * tallest) for row in rows))
    tooltip = [alt.Tooltip("recipe:N", title="recipe"), alt.Tooltip("text:N", title=title)]
    return ladder(rows, _KINDS, tooltip, top or 1, "width - 120")
