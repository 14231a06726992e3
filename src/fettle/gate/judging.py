"""What a gate says of a change: worse, within the limit, or that it cannot tell and what would settle it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fettle.estimates import student
from fettle.measure import Interval, Trial, contrast_interval

Verdict = Literal["worse", "within", "cannot tell"]
MOST_PROCESSES = 64
"""More processes than this are not recommended."""


@dataclass(frozen=True)
class Judged:
    """One figure of the new code beside the old."""

    what: str
    """``time`` or ``memory``."""
    change: Interval | None
    """New over old, above 1 is worse; None where it was not measured."""
    limit: float
    """Largest change that passes, as a share."""
    verdict: Verdict
    processes: int = 1
    """Processes of each side."""
    needs: int = 0
    """Processes of each side that should settle it where it cannot tell, 0 where more would not help."""

    @property
    def settled_by(self) -> str:
        """What to do where it cannot tell; empty otherwise."""
        if self.verdict != "cannot tell":
            return ""
        if self.change is None:
            return "it was not measured"
        if self.processes < 2:
            return "one process of each side tells nothing of others: give it four, and time to start them"
        if not self.needs:
            return (
                f"processes differ too much for so small a margin: more than {MOST_PROCESSES} a side would be needed; "
                "choose another limit, a longer call or a quieter machine"
            )
        return f"about {self.needs} processes a side instead of {self.processes} should settle it"


def judge(what: str, change: Interval | None, limit: float, processes: int) -> Judged:
    """Worse where the interval excludes no change and the estimate is above the limit; within where the whole interval
    is below it.

    So code that did not change is called worse with half the interval's error rate at most, whatever the limit.
    """
    if change is None or not math.isfinite(change.estimate):
        return Judged(what, None, limit, "cannot tell", processes)
    estimate, low, high, most = (_log(x) for x in (change.estimate, change.low, change.high, 1 + limit))
    if change.is_known and low > 0 and estimate > most:
        return Judged(what, change, limit, "worse", processes)
    if change.is_known and high < most:
        return Judged(what, change, limit, "within", processes)
    # An estimate above the limit must be told from no change, one below it from the limit. Intervals narrow with the
    # root of the number of processes and with Student's quantile: from two a side to four by far more than the root.
    distance, half = (estimate if estimate > most else most - estimate), (high - low) / 2
    of_one = half * math.sqrt(processes) / student(2 * processes - 2, 0.05)
    more = range(processes + 1, MOST_PROCESSES + 1)
    needs = next((n for n in more if of_one * student(2 * n - 2, 0.05) / math.sqrt(n) < distance), 0)
    return Judged(what, change, limit, "cannot tell", processes, needs)


def slowdown(speedup: Interval | None) -> Interval | None:
    """A speed-up as how many times longer it takes."""
    if speedup is None:
        return None
    high = math.inf if speedup.low <= 0 else 1 / speedup.low
    return Interval(1 / speedup.estimate, 1 / speedup.high if speedup.high > 0 else 0.0, high)


def more_memory(old: Trial, new: Trial, alpha: float) -> Interval | None:
    """New peak over old with its interval, processes as units; None for fewer than two of either side."""
    if min(len(old.peaks_bytes), len(new.peaks_bytes)) < 2 or min((*old.peaks_bytes, *new.peaks_bytes)) <= 0:
        return None
    logs = [[{1: math.log(peak)} for peak in trial.peaks_bytes] for trial in (new, old)]
    interval = contrast_interval(logs, (1, -1), alpha)
    return Interval(*(float(np.exp(value)) for value in (interval.estimate, interval.low, interval.high)))


def overall(judged: Sequence[Judged]) -> Verdict:
    """Worse where anything is, within where all is."""
    verdicts = [one.verdict for one in judged]
    return "worse" if "worse" in verdicts else "cannot tell" if "cannot tell" in verdicts else "within"


def percent(change: Interval | None) -> str:
    """``+3.1% [+2.2, +4.0]``."""
    if change is None or not change.is_known:
        return "not measured" if change is None else "interval too wide"
    low, high = (f"{100 * (end - 1):+.1f}" for end in (change.low, change.high))
    return f"{100 * (change.estimate - 1):+.1f}% [{low}, {high}]"


def _log(value: float) -> float:
    return math.log(value) if 0 < value < math.inf else -math.inf if value <= 0 else math.inf
