"""The time that a study may take, and what its final race will take of it, from what measuring has cost so far."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fettle.measure import Rules, Trial

ROUNDS = 6
"""Rounds of the final race that time is kept back for. It ends earlier or later, as its data say."""
FEWEST_ROUNDS = 3
"""Rounds after which a race can be stopped."""
REPLICATES = 2
"""Processes of each finalist in the final race, as far as time allows."""
MOST_REPLICATES = 5
"""Processes of each whose speed-up the first ones leave open, where there is time left."""
REPLICATES_S = 60.0
"""Most seconds that starting the second and further processes may take."""
GRACE = 0.1
"""Share of the budget that the confirmation of the winner may run over: what is reserved for it is an estimate."""
_SLICE_S = Rules.slice_s


@dataclass(frozen=True)
class Budget:
    """Seconds that may be spent, counted from the start; None for no limit."""

    seconds: float | None
    started: float
    """`time.monotonic()` then."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        """Seconds until the budget is used up, negative afterwards."""
        return math.inf if self.seconds is None else self.seconds - self.elapsed_s

    @property
    def end(self) -> float:
        """`time.monotonic()` when the budget is used up."""
        return math.inf if self.seconds is None else self.started + self.seconds

    @property
    def grace_s(self) -> float:
        """How long after its end something that has begun may go on."""
        return 30.0 if self.seconds is None else min(30.0, GRACE * self.seconds)

    def deadline(self, finalists: Sequence[Trial], *, few: bool = False) -> float:
        """`time.monotonic()` at which to begin the final race, so that it ends inside the budget.

        `finalists` are the baseline and those that would be measured again now, the leader first. What is kept back
        is enough for all of them where that is no more than a third of the budget, a sixth while `few` recipes were
        tried, as another one may bring more than further processes do; and else for the leader and the baseline in one
        process each. Where that is more than half of the budget nothing is kept back: the winner is not confirmed, and
        the result says so. Of the baseline alone there is nothing to confirm.
        """
        if self.seconds is None or len(finalists) < 2:
            return self.end
        least = race_s(finalists[:2], FEWEST_ROUNDS)
        full = race_s(finalists) + replicates_s(finalists, REPLICATES - 1)
        reserve = min(full, max(least, self.seconds / (6 if few else 3)))
        return self.end if least > 0.5 * self.seconds else self.end - reserve


def start_s(trial: Trial) -> float:
    """Seconds that one more process of the trial's recipe is expected to need until it is ready to be timed."""
    known = trial.start_s if math.isfinite(trial.start_s) else trial.startup.load_s + trial.startup.total_s + 5.0
    if not math.isfinite(known):
        return 10.0
    # Compiled code is in the cache by then; tracing, loading and warming up is what no cache saves.
    saved = 0.5 * trial.startup.first_call_s if trial.startup.cache == "cold" else 0.0
    return max(1.0, known - saved)


def turn_s(trial: Trial) -> float:
    """Seconds of one slice of the trial's recipe in a round."""
    if math.isfinite(trial.turn_s):
        return trial.turn_s
    return max(_SLICE_S, trial.time_ms / 1e3 if math.isfinite(trial.time_ms) else 0.0) + 0.05


def race_s(trials: Sequence[Trial], rounds: int = ROUNDS) -> float:
    """Seconds of a race of these. The first is the workload as given, whose process runs already (`Held`); the others
    have a new one each."""
    return sum(map(start_s, trials[1:])) + rounds * sum(map(turn_s, trials))


def replicates_s(trials: Sequence[Trial], copies: int) -> float:
    """Seconds that `copies` further processes of each of these add to a race, no more than may be spent on them."""
    starts = sum(start_s(trial) for trial in trials)
    sets = min(copies, int(REPLICATES_S // starts))
    return sets * (starts + ROUNDS * sum(turn_s(trial) for trial in trials))


@dataclass(frozen=True)
class FinalRacePlan:
    """What the final race can be in the time that is left."""

    finalists: int
    """How many of the best are measured again beside the baseline, the leader first."""
    replicates: int
    """Processes of each finalist."""
    extras: int
    """How many cheap rungs of the ladder there is time for beside them."""
    spare_s: float = math.inf
    """Seconds that are left over."""


def plan_final_race(
    left_s: float, baseline: Trial, best: Sequence[Trial], extras: int, most: int = REPLICATES
) -> FinalRacePlan | None:
    """The largest final race that fits into `left_s`: first the leader and the baseline, then a second finalist, if
    only for `FEWEST_ROUNDS`, then more processes of these, up to `most` each, then further finalists in as many, then
    up to `extras` cheap rungs in one process each. None when not even the first fits.

    What lies within the error of the best is worth little more than it: how much it is worth, one process each of many
    would leave open.
    """
    if race_s([baseline, best[0]], FEWEST_ROUNDS) > left_s:
        return None

    def cost_s(finalists: int, copies: int) -> float:
        field = [baseline, *best[:finalists]]
        return race_s(field) + replicates_s(field, copies - 1)

    two = min(2, len(best))
    finalists = two if race_s([baseline, *best[:two]], FEWEST_ROUNDS) <= left_s else 1
    copies = 1
    for size in [*((two, copies) for copies in range(1, most + 1)), *((n, most) for n in range(3, len(best) + 1))]:
        if cost_s(*size) > left_s:
            break
        finalists, copies = size
    left_s -= cost_s(finalists, copies)
    each = start_s(baseline) + ROUNDS * turn_s(baseline)
    fit = extras if math.isinf(left_s) else min(extras, max(0, int(left_s // each)))
    return FinalRacePlan(finalists, copies, fit, max(0.0, left_s - fit * each))
