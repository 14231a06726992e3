"""The second dimension of a ladder: the largest batch that fits at each of its steps, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from fettle.errors import UsageError
from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.techniques import LARGEST, enlarged
from fettle.tuning import Session
from fettle.units import size_text

_MOST_TRIES = 10


@dataclass(frozen=True)
class Grown:
    """The largest batch that fits at a step."""

    factor: int
    """How many times the batch as given; 0 where not even that fits."""
    rows: int
    why: str
    """Why no larger one."""
    speedup: Interval | None = None
    """Rows a second at it, over the workload as given with its own batch."""
    per_second: float = math.nan
    peak_bytes: int | None = None


def check_growth(session: Session, limit_bytes: float) -> None:
    """Raise `UsageError` where no batch of this workload can grow up to that limit."""
    if session.facts.generates:
        raise UsageError("`grow_batch`: text is measured at several numbers of rows anyway")
    if session.facts.device == "cpu" and math.isinf(limit_bytes):
        raise UsageError("`grow_batch=device`: a CPU has no memory of its own: name a limit, `grow_batch='2GiB'`")


def about_tries(limit_bytes: float) -> int:
    """About how many larger batches are tried at a step: a straight line soon shows the largest, where a full device
    shows nothing of how much was missing."""
    return 3 if math.isfinite(limit_bytes) else 6


def grown(session: Session, recipe: Recipe, limit_bytes: float) -> Grown:
    """Find the largest batch at a recipe that was measured; each try runs beside the workload as given."""
    baseline = session.standings.known[Recipe()]
    session.held.close()  # of the device's memory as much as can be

    def tried(factor: int) -> Trial | None:
        larger = Recipe({**recipe.levels, **enlarged(factor).levels})
        if larger not in session.standings.known and not session.spent():
            rules = replace(session.rules, deadline=session.costs.deadline())
            session.keep(session.run(list(dict.fromkeys([Recipe(), larger])), rules))
        return session.standings.known.get(larger)

    factor, why = largest(tried, limit_bytes)
    if not factor:
        return Grown(0, 0, why)
    trial = tried(factor)
    assert trial is not None
    ratio = trial.speedup if trial.recipe.levels else Interval(1.0, 1.0, 1.0)
    rate = baseline.throughput * ratio.estimate if ratio is not None else math.nan
    return Grown(factor, round(trial.samples), why, ratio, rate, trial.peak_bytes)


def largest(tried: Callable[[int], Trial | None], limit_bytes: float) -> tuple[int, str]:
    """The largest factor whose peak of memory stays within the limit, and why no larger one does. `tried` measures one;
    it returns None where there is no time left.

    A peak is close to a straight line over the batch: two of them say which factor to try next, and each one that is
    tried says it better. Where a device is full there is no peak, and the gap is halved.
    """
    peaks: dict[int, int] = {}
    fits, too_large, guess, why = 0, LARGEST + 1, 1, f"{LARGEST} times the batch is the most that is tried"
    for _ in range(_MOST_TRIES):
        trial = tried(guess)
        if trial is None:
            return fits, "there was no time for a larger one"
        if trial.status == "failed":
            too_large, why = guess, f"x{guess} failed: {trial.reason}"
        elif trial.peak_bytes is None and math.isfinite(limit_bytes):
            return fits, "what it needs was not measured"
        else:
            peaks[guess] = trial.peak_bytes or 0
            if peaks[guess] > limit_bytes:
                too_large, why = guess, f"x{guess} needs {size_text(peaks[guess])}"
            else:
                fits = guess
        if too_large - fits <= 1:
            break
        line = _line(peaks) if math.isfinite(limit_bytes) and trial.status != "failed" else None
        if line is None:
            guess = (fits + too_large) // 2 if too_large <= LARGEST else min(2 * fits, LARGEST)
            continue
        offset, slope = line
        guess = math.floor((limit_bytes - offset) / slope)
        if guess <= fits:
            return fits, f"x{fits + 1} would need about {size_text(offset + slope * (fits + 1))}"
        guess = min(guess, too_large - 1)
    return fits, why


def _line(peaks: dict[int, int]) -> tuple[float, float] | None:
    """Offset and slope of the line through the two largest; None where there are none or it does not rise."""
    if len(peaks) < 2:
        return None
    one, two = sorted(peaks)[-2:]
    slope = (peaks[two] - peaks[one]) / (two - one)
    return (peaks[two] - slope * two, slope) if slope > 0 else None
