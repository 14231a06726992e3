"""Two load runs compared: is the server faster or slower than it was, or can that not be told?

The unit is the batch: the steady part of a run cut into ten stretches of equal length, because answers near in time are
alike and ones far apart hardly are. The interval of a ratio is Welch's, between the logarithms of the two runs' batch
values (B. L. Welch, *Biometrika* 34, 1947).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fettle.errors import UsageError
from fettle.files import read_bytes
from fettle.units import count_text

SAME = 0.05
"""Ratios whose whole interval lies within this share of 1 are called the same."""
MEASURES = {"throughput": "answers/s", "p50_ms": "p50", "p99_ms": "p99"}


class _Batches(msgspec.Struct):
    p50_ms: tuple[float, ...]
    p99_ms: tuple[float, ...]
    throughput: tuple[float, ...]


class _Earlier(msgspec.Struct):
    """What is read of a run that `fettle serve load --json` printed."""

    mode: str
    rate: float
    concurrency: int
    batches: _Batches
    void: str = ""
    stable: bool = True


@dataclass(frozen=True)
class Change:
    """One measure of one load, now over then."""

    load: str
    """For example ``80/s`` or ``8 clients``."""
    measure: str
    ratio: float
    low: float
    high: float
    verdict: str
    """``better``, ``worse``, ``same``, or ``cannot tell``."""
    why: str = ""
    """Why it cannot be told, where that is not the interval."""


def read_baseline(path: Path) -> list[_Earlier]:
    """The runs of an earlier ``fettle serve load --json``. Raises `UsageError`."""
    try:
        data = msgspec.json.decode(read_bytes(path))
        # With --baseline the runs stand beside the comparison.
        runs = msgspec.convert(data["runs"] if isinstance(data, dict) else data, list[_Earlier])
    except (ValueError, KeyError, RecursionError) as error:
        raise UsageError(f"{path} is not what fettle serve load --json prints") from error
    if not runs:
        raise UsageError(f"{path} holds no run")
    return runs


def compare(now: Sequence[dict[str, Any]], then: Sequence[_Earlier]) -> list[Change]:
    """Every run of `now` (`fettle.load.run.as_data`) against the run of the same load in `then`.

    Raises `UsageError` where none has a partner.
    """
    changes: list[Change] = []
    for data in now:
        run = msgspec.json.decode(json.dumps(data), type=_Earlier)
        old = min(
            (other for other in then if _alike(run, other)), key=lambda one: abs(one.rate - run.rate), default=None
        )
        if old is None:
            continue
        trouble = next((f"the {name} run is void" for name, r in (("new", run), ("old", old)) if r.void), "")
        for measure in MEASURES:
            if measure == "throughput" and run.mode == "open" and run.stable and old.stable:
                continue  # as many as were sent
            fresh, past = getattr(run.batches, measure), getattr(old.batches, measure)
            changes.append(_change(_load(run), measure, fresh, past, trouble))
    if not changes:
        loads = ", ".join(dict.fromkeys(_load(run) for run in then))
        raise UsageError(f"the baseline has no run of the same load: it has {loads}")
    return changes


def _change(load: str, measure: str, now: Sequence[float], then: Sequence[float], trouble: str) -> Change:
    if trouble or min(len(now), len(then)) < 3 or min([*now, *then]) <= 0:
        why = trouble or "too few answers for an interval"
        return Change(load, MEASURES[measure], math.nan, math.nan, math.nan, "cannot tell", why)
    estimate, low, high = ratio_interval(now, then, 0.95)
    better, worse = (low > 1, high < 1) if measure == "throughput" else (high < 1, low > 1)
    if low >= 1 / (1 + SAME) and high <= 1 + SAME:
        verdict = "same"
    else:
        verdict = "better" if better else "worse" if worse else "cannot tell"
    return Change(load, MEASURES[measure], estimate, low, high, verdict)


def ratio_interval(now: Sequence[float], then: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """Ratio of the geometric means, with its two-sided interval. At least two positive values on each side."""
    from scipy import stats

    test = stats.ttest_ind(np.log(now), np.log(then), equal_var=False)
    middle = float(np.log(now).mean() - np.log(then).mean())
    if not math.isfinite(float(test.statistic)):  # all equal to the last bit
        return math.exp(middle), math.exp(middle), math.exp(middle)
    ends = test.confidence_interval(confidence)
    return math.exp(middle), math.exp(float(ends.low)), math.exp(float(ends.high))


def _alike(run: _Earlier, other: _Earlier) -> bool:
    if run.mode != other.mode:
        return False
    if run.mode == "closed":
        return run.concurrency == other.concurrency
    return abs(run.rate - other.rate) < 0.1 * other.rate


def _load(run: _Earlier) -> str:
    if run.mode == "closed":
        return count_text(run.concurrency, "client")
    return f"{run.rate:.4g}/s"
