"""Foresight: a search that begins with what is known of other models, and says what it expected and what it found.

What is known comes from outside (`fettle.atlas`) as a `Foresight`: for each recipe the gain to expect and how sure that
is, the chance that it works, and the seconds of its trial. A `Guide` leaves out what has no chance of being the best by
it, and tries the rest in the order of expected improvement (Mockus, 1978) per second (Snoek, Larochelle and Adams,
*Practical Bayesian Optimization*, 2012), so that what takes a minute to compile must promise more.

A forecast is never taken for a result: what it favours is measured, and forecasts are ignored as soon as measurements
contradict them. The bundles and what is cheap to try are tried whatever is foreseen. The rest is left out only where
its chance is small by forecasts that held wherever they were checked; what no model on such a machine had is foreseen
so widely that it has one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search._evidence import Evidence
from fettle.search._space import Level, holds, valid, with_required

SLOWEST = -math.log(3)
"""Smaller gains are taken for this one: how much slower still a recipe is does not matter, and differs widely."""
LEAST = math.log(1.01)
"""Gains below this are worth no trial."""
WORTH = 0.02
"""What a recipe of another model must be expected to improve the leader by, as a log, to be begun with,"""
_LIKELY = 0.3
"""and the probability of being better that it needs;"""
IDEAS = 4
"""so many at most."""
_LUCK = 0.05
"""What a measured gain may be off by itself."""
_HELD = 2.0
"""Standard deviations that what is found may be off its forecast by."""
_OFF = 4.0
"""Mean square of the forecasts' standardised errors above which they are not reliable; 1 where they are calibrated."""
_CHANCE = 0.1
"""A move needs this probability of being better than the leader."""
_NORMAL = statistics.NormalDist()


@dataclass(frozen=True)
class Forecast:
    """What is expected of a recipe that was not tried."""

    gain: float
    """Log of the speed-up over the workload as given, `SLOWEST` at least,"""
    spread: float
    """and its standard deviation."""
    works: float
    """The chance that it runs and keeps the limits."""
    seconds: float
    """How long its trial takes."""

    def __str__(self) -> str:
        low, high = (math.exp(self.gain + side * 1.96 * self.spread) for side in (-1, 1))
        return f"{math.exp(self.gain):.2f}x [{low:.2f}, {high:.2f}]"

    def improvement(self, best: float) -> float:
        """How much it should bring beyond the gain `best`; what is worse counts as nothing, as it is not taken."""
        ahead = self.gain - best - LEAST
        z = ahead / self.spread
        return self.works * (ahead * _NORMAL.cdf(z) + self.spread * _NORMAL.pdf(z))

    def chance(self, best: float) -> float:
        """The probability that it brings more than the gain `best`, by enough to matter."""
        return self.works * _NORMAL.cdf((self.gain - best - LEAST) / self.spread)


class Foresight(Protocol):
    """What is known of other models."""

    @property
    def ideas(self) -> Sequence[Recipe]:
        """Recipes that were tried on them, the most promising first."""
        ...

    def forecast(self, recipes: Sequence[Recipe], trials: Sequence[Trial]) -> list[Forecast]:
        """What to expect of recipes here, where `trials` were measured."""
        ...


@dataclass(frozen=True)
class Foreseen:
    """A forecast beside what was found."""

    recipe: Recipe
    expected: Forecast
    trial: Trial

    @property
    def gain(self) -> float | None:
        """What was found; None where it did not run."""
        ratio = self.trial.speedup
        return max(SLOWEST, math.log(ratio.estimate)) if ratio is not None and ratio.estimate > 0 else None

    @property
    def off(self) -> float | None:
        """By how many standard deviations of what was unsure it was better than expected; None where it did not run."""
        if self.gain is None:
            return None
        return (self.gain - self.expected.gain) / math.hypot(self.expected.spread, _LUCK)

    @property
    def held(self) -> bool:
        """Whether it came as expected, as far as that was sure."""
        return self.off is not None and abs(self.off) <= _HELD

    def __str__(self) -> str:
        outcome = f"it failed: {self.trial.reason}" if self.trial.reason else "no comparison"
        if self.trial.speedup:
            outcome = f"{self.trial.speedup.estimate:.2f}x"
        return f"{self.recipe}: expected {self.expected}, found {outcome}"


@dataclass
class Guide:
    """A search's use of foresight."""

    foresight: Foresight
    say: Callable[[str], None] = lambda text: None
    foreseen: list[Foreseen] = field(default_factory=list)

    @property
    def is_reliable(self) -> bool:
        """Whether the forecasts were as close to what was measured as they said."""
        squares = [min(5.0, abs(one.off)) ** 2 for one in self.foreseen if one.off is not None]
        return bool(squares) and 2 * len(squares) >= len(self.foreseen) and statistics.fmean(squares) <= _OFF

    def begin(self, evidence: Evidence, root: Sequence[Recipe]) -> bool:
        """Measure what other models had and is likely to be better; whether there is budget left."""
        for _ in range(IDEAS):
            if (self.foreseen and not self.is_reliable) or not (batch := self._promising(evidence)):
                break
            if not self.measure(evidence, batch, root):
                return False
        if not self.is_reliable:
            why = "was wrong about this model" if self.foreseen else "expects that nothing helps here"
            self.say(f"the atlas {why}: searching as without it")
        return True

    def measure(self, evidence: Evidence, recipes: Sequence[Recipe], root: Sequence[Recipe] = ()) -> bool:
        """Measure recipes beside the workload as given and the `root`, and keep what was expected of them beside what
        is found; whether there is budget left."""
        new = [recipe for recipe in recipes if recipe not in evidence.trials]
        expected = self.foresight.forecast(new, list(evidence.trials.values()))
        going_on = evidence.measure([Recipe(), *recipes, *root])
        for recipe, forecast in zip(new, expected, strict=True):
            if recipe in evidence.trials:
                self.foreseen.append(Foreseen(recipe, forecast, evidence.trials[recipe]))
                self.say(f"atlas: {self.foreseen[-1]}")
        return going_on

    def worth(self, evidence: Evidence, moves: Mapping[Recipe, Level], leader: Trial) -> dict[Recipe, float]:
        """Expected improvement on the leader per second of those recipes that have a chance of being better.

        Where none has one, of those whose level was in a recipe that was better than foreseen.
        """
        best, recipes = -evidence.score(leader), list(moves)
        expected = dict(zip(recipes, self.foresight.forecast(recipes, list(evidence.trials.values())), strict=True))
        able = [recipe for recipe in recipes if expected[recipe].chance(best) >= _CHANCE]
        better = {level for one in self.foreseen if (one.off or 0) > _HELD for level in one.recipe.levels.items()}
        left = able or [recipe for recipe in recipes if moves[recipe] in better]
        return {recipe: expected[recipe].improvement(best) / max(expected[recipe].seconds, 1e-3) for recipe in left}

    def look_back(self, trials: Iterable[Trial]) -> None:
        """Put what would have been expected, without any trial of this model, beside trials that were measured."""
        tried = [trial for trial in trials if trial.recipe.levels]
        expected = self.foresight.forecast([trial.recipe for trial in tried], ())
        self.foreseen += [Foreseen(trial.recipe, one, trial) for trial, one in zip(tried, expected, strict=True)]

    def summary(self) -> list[str]:
        """What was expected and found, for the result: a line on all, and one on the best that was foreseen."""
        ran = [one for one in self.foreseen if one.off is not None]
        if not ran:
            return []
        best = max(ran, key=lambda one: one.expected.gain)
        held = sum(one.held for one in ran)
        kept = "" if self.is_reliable else " It was wrong too often to go by."
        return [
            f"The atlas foresaw {len(self.foreseen)} recipes: {held} of {len(ran)} that ran were as it expected, "
            f"{len(self.foreseen) - len(ran)} failed.{kept}",
            f"It expected most of {best}.",
        ]

    def _promising(self, evidence: Evidence) -> list[Recipe]:
        """The recipe of another model that should improve most on the leader for its seconds; none where none is
        likely to."""
        ideas, leader = _usable(evidence, self.foresight.ideas), evidence.leader()
        best = max(0.0, -evidence.score(leader)) if leader is not None else 0.0
        expected = self.foresight.forecast(ideas, list(evidence.trials.values()))
        worth = {
            recipe: one.improvement(best) / max(one.seconds, 1e-3) for recipe, one in zip(ideas, expected, strict=True)
            if one.improvement(best) >= WORTH and one.chance(best) >= _LIKELY
        }  # fmt: skip
        return sorted(worth, key=lambda recipe: (-worth[recipe], str(recipe)))[:1]


def _usable(evidence: Evidence, recipes: Iterable[Recipe]) -> list[Recipe]:
    """The recipes that can work in this space, each with what every recipe must have."""
    space = evidence.space
    whole = dict.fromkeys(with_required(space, recipe) for recipe in recipes)
    return [
        recipe for recipe in whole
        if recipe.levels and recipe not in evidence.trials and holds(space, recipe) and valid(space, recipe)
        and not evidence.known_wrong(recipe)
    ]  # fmt: skip
