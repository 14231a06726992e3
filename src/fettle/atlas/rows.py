"""Trials of a study as rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from fettle.atlas.table import Row, Subject
from fettle.measure import Trial
from fettle.recipe import Recipe


def rows_of(about: Subject, trials: Sequence[Trial]) -> list[Row]:
    """A row for each trial; none where the workload as given did not run, for then there is nothing to compare with.

    Speed-ups are those that the trials say, which should be what all races of the study say together.
    """
    baseline = next((trial for trial in trials if not trial.recipe.levels and trial.status != "failed"), None)
    if baseline is None:
        return []
    return [_row(about, trial, baseline) for trial in trials]


def _row(about: Subject, trial: Trial, baseline: Trial) -> Row:
    ratio = trial.speedup if trial.recipe.levels else None
    known = ratio is not None and trial.status != "failed" and 1e-6 < ratio.estimate < 1e6
    same = not trial.recipe.levels
    return Row(
        **msgspec.structs.asdict(about), recipe=str(trial.recipe), status=trial.status, reason=trial.reason[:300],
        speedup=1.0 if same else ratio.estimate if known and ratio is not None else None,
        low=1.0 if same else _number(ratio.low) if known and ratio is not None else None,
        high=1.0 if same else _number(ratio.high) if known and ratio is not None else None,
        given_ms=_number(baseline.time_ms), error=_number(trial.accuracy.error),
        peak_bytes=_number(trial.peak_bytes), given_peak_bytes=_number(baseline.peak_bytes),
        start_s=_number(trial.start_s), given_start_s=_number(baseline.start_s), rounds=float(trial.rounds),
        quiet=trial.is_quiet and baseline.is_quiet,
    )  # fmt: skip


def is_given(row: Row) -> bool:
    """Whether it is the workload as given."""
    return not Recipe.parse(row.recipe).levels


def _number(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) and value >= 0 else None
