"""Foresight: a search that begins with what is known of other models, and says what it expected and what it found.

What is known comes from outside (`fettle.atlas`) as a `Foresight`: for each recipe the gain to expect and how sure that
is, the chance that it works, and the seconds of its trial. A `Guide` chooses by expected improvement (Mockus, 1978) per
second (Snoek, Larochelle and Adams, *Practical Bayesian Optimization*, 2012), so that what takes a minute to compile
must promise more.

A forecast is never taken for a result: what it favours is measured, and forecasts are ignored as soon as measurements
contradict them. No level is left untried either: one that is expected to bring nothing is tried at least beside others
in one recipe, and dropped only where that came as expected. So a wrong atlas costs time, never the result.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
"""What a trial must be expected to improve the leader by, as a log, to be among those that are begun with."""
RACES = 4
"""Most races that are begun with, as long as they promise something."""
_SHORTLIST = 48
_STEPS = 3
"""How many moves away from what other models had recipes are thought of."""
_LUCK = 0.05
"""What a measured gain may be off by itself."""
_OFF = 4.0
"""Mean square of the forecasts' standardised errors above which they are not reliable; 1 where they are calibrated."""
_CLOSE = 0.6
"""Largest standard deviation of a forecast that a measurement can contradict."""
_SLOW = -math.log(1.5)
"""A level that is expected to bring less than this gain hides what others bring."""
_MINUTE_S = 60.0
_ENOUGH = 3
"""Forecasts that must have been checked."""
_CHANCE = 0.1
"""A move needs this probability of being better than the leader."""
_TOGETHER = {1: 6, 2: 4, 3: 3}
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

    def forecast(
        self, recipes: Sequence[Recipe], trials: Sequence[Trial], believed: Mapping[Recipe, float] | None = None
    ) -> list[Forecast]:
        """What to expect of recipes here, where `trials` were measured and the gains in `believed` are assumed."""
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
    def held(self) -> bool:
        """Whether it came as expected, as far as that was sure."""
        return self.gain is not None and abs(self.gain - self.expected.gain) <= 2 * self.unsure

    @property
    def better(self) -> bool:
        """Whether it was better than expected, by more than that was unsure."""
        return self.gain is not None and self.gain > self.expected.gain and not self.held

    @property
    def slow(self) -> bool:
        """Whether it was expected to be slow, and is."""
        return self.gain is not None and max(self.gain, self.expected.gain) < _SLOW

    @property
    def unsure(self) -> float:
        """Standard deviation of what was expected from what is found."""
        return math.hypot(self.expected.spread, _LUCK)

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
        off = [min(5.0, abs(one.gain - one.expected.gain) / one.unsure)
               for one in self.foreseen if one.gain is not None]  # fmt: skip
        if len(off) < _ENOUGH or 2 * len(off) < len(self.foreseen):
            return False
        return sum(z * z for z in off) / len(off) <= _OFF

    def begin(self, evidence: Evidence, root: Sequence[Recipe]) -> bool:
        """Measure what promises most for its seconds, a few races at most; whether there is budget left."""
        beside = [Recipe(), *root]
        for _ in range(RACES):
            batch = self._promising(evidence)
            if not batch:
                break
            if not self.measure(evidence, batch, beside):
                return False
            if len(self.foreseen) >= _ENOUGH and not self.is_reliable:
                self.say("the atlas was wrong about this model: searching as without it")
                break
        return evidence.measure(beside)

    def measure(self, evidence: Evidence, recipes: Sequence[Recipe], beside: Sequence[Recipe] = ()) -> bool:
        """Measure recipes, and keep what was expected of them beside what is found; whether there is budget left."""
        new = [recipe for recipe in recipes if recipe not in evidence.trials]
        expected = self.foresight.forecast(new, list(evidence.trials.values()))
        going_on = evidence.measure([*beside, *recipes])
        for recipe, forecast in zip(new, expected, strict=True):
            if recipe in evidence.trials:
                self.foreseen.append(Foreseen(recipe, forecast, evidence.trials[recipe]))
                self.say(f"atlas: {self.foreseen[-1]}")
        return going_on

    def worth(
        self, evidence: Evidence, moves: Mapping[Recipe, Level], leader: Trial
    ) -> tuple[dict[Recipe, float], bool]:
        """Expected improvement on the leader per second of those recipes that have a chance of being better, and
        whether there are any.

        Where none has one, of those that only the atlas argues against: their level was tried beside others only, and
        that did not come as expected; or they drop a level that every confirmed forecast had.
        """
        best = -evidence.score(leader)
        recipes = list(moves)
        expected = dict(zip(recipes, self.foresight.forecast(recipes, list(evidence.trials.values())), strict=True))
        able = [recipe for recipe in recipes if expected[recipe].chance(best) >= _CHANCE]
        left = able or [recipe for recipe in recipes if self._is_open(evidence, moves[recipe], leader)]
        worth = {recipe: expected[recipe].improvement(best) / max(expected[recipe].seconds, 1e-3) for recipe in left}
        return worth, bool(able)

    def _is_open(self, evidence: Evidence, move: Level, leader: Trial) -> bool:
        name, level = move
        if level == evidence.space.default(name):
            known = evidence.gain(name, leader.recipe.levels.get(name, level), leader.recipe) is not None
            return not known and not any(one.held and name not in one.recipe.levels for one in self.foreseen)
        tried = any(trial.recipe.levels.get(name) == level for trial in evidence.trials.values())
        return tried and move not in self._confirmed

    def untested(self, evidence: Evidence, base: Recipe, known: Collection[Level] | None = None) -> list[Recipe]:
        """Recipes, as few as possible, that between them hold all levels but the `known` ones, by default those that a
        measurement has confirmed; none that was tried.

        What is expected to slow a model down stands apart: beside it nobody sees what the others bring. So does each
        level that was in a recipe that failed, and in none that ran.
        """
        space, known = evidence.space, self._confirmed if known is None else known
        left = [
            (name, level) for name, levels in space.choices.items() for level in levels[1:]
            if (name, level) not in known and name not in space.required.levels and base.levels.get(name) != level
        ]  # fmt: skip
        if not left:
            return []
        alone = [evidence.moved(Recipe(), *level) or Recipe() for level in left]
        gains = self.foresight.forecast(alone, list(evidence.trials.values()))
        failed = {level for one in self.foreseen if one.gain is None for level in one.recipe.levels.items()}
        ran = {level for trial in evidence.trials.values() if trial.ok for level in trial.recipe.levels.items()}
        groups: dict[Level | bool, list[Level]] = {False: [], True: []}  # by whether slow; a failure's suspects alone
        for level, expected in zip(left, gains, strict=True):
            groups.setdefault(level if level in failed - ran else expected.gain < _SLOW, []).append(level)
        recipes: list[Recipe] = []
        for group in groups.values():
            while group:
                recipe, added = base, list[Level]()
                for level in group:
                    bigger = evidence.moved(recipe, *level)
                    if bigger is not None and {level, *added} <= set(bigger.levels.items()):
                        recipe, added = bigger, [*added, level]
                group = [level for level in group if level not in added] if added else []
                recipes += [recipe] if added else []
        return [one for one in dict.fromkeys(recipes) if one not in evidence.trials and not evidence.known_wrong(one)]

    @property
    def _confirmed(self) -> set[Level]:
        """Levels of recipes that came as expected, where the forecast was narrow or both are slow, less those of
        recipes that were better than expected."""
        sure = [one for one in self.foreseen if one.held and (one.unsure <= _CLOSE or one.slow)]
        return {level for one in sure for level in one.recipe.levels.items()} - {
            level for one in self.foreseen if one.better for level in one.recipe.levels.items()
        }

    def look_back(self, trials: Iterable[Trial]) -> None:
        """Put what would have been expected, without any trial of this model, beside trials that were measured."""
        tried = [trial for trial in trials if trial.recipe.levels]
        expected = self.foresight.forecast([trial.recipe for trial in tried], ())
        self.foreseen += [Foreseen(trial.recipe, one, trial) for trial, one in zip(tried, expected, strict=True)]

    def summary(self) -> list[str]:
        """What was expected and found, for the result: a line on all, and one on the best that was foreseen."""
        ran = [one for one in self.foreseen if one.gain is not None]
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
        """The next race: one recipe after the other, each as if the ones before had come as expected.

        The first race checks the atlas as well: the best in it also runs with all other levels, as many together as can
        be, and the atlas is judged by three recipes at least.
        """
        trials = list(evidence.trials.values())
        leader = evidence.leader()
        best = max(0.0, -evidence.score(leader)) if leader is not None else 0.0
        pool = self._pool(evidence, trials)
        batch: list[Recipe] = []
        believed: dict[Recipe, float] = {}
        while pool:
            ranked = sorted(
                zip(pool, self.foresight.forecast(pool, trials, believed), strict=True),
                key=lambda item: (-item[1].improvement(best) / max(item[1].seconds, 1e-3), str(item[0])),
            )
            pool = [recipe for recipe, _ in ranked[:_SHORTLIST]]
            recipe, expected = ranked[0]
            if expected.improvement(best) < WORTH:
                break
            batch.append(pool.pop(0))
            believed[recipe] = expected.gain
            best = max(best, expected.gain)  # what comes next must bring more than that (Kriging believer)
            if len(batch) >= min(_TOGETHER.get(evidence.space.cost(one), 3) for one in batch):
                break
        if batch and not self.foreseen:
            batch += self._checks(evidence, believed)
            batch += [recipe for recipe in pool if recipe not in batch][: max(0, _ENOUGH - len(batch))]
        return batch

    def _checks(self, evidence: Evidence, believed: Mapping[Recipe, float]) -> list[Recipe]:
        """The best of a race with the levels that no other recipe in it has, where that takes less than a minute and
        the forecast is narrow enough to be contradicted."""
        best = max(believed, key=lambda recipe: believed[recipe])
        tried = {level for recipe in believed for level in recipe.levels.items()}
        if not (checks := self.untested(evidence, best, tried)):
            return []
        expected = self.foresight.forecast(checks, list(evidence.trials.values()))
        close = [
            recipe for recipe, one in zip(checks, expected, strict=True)
            if (one.spread <= _CLOSE or one.gain < _SLOW) and one.seconds < _MINUTE_S
        ]  # fmt: skip
        return close[: max(0, _TOGETHER[1] - len(believed))]

    def _pool(self, evidence: Evidence, trials: Sequence[Trial]) -> list[Recipe]:
        """Recipes that could be next: what other models had, bundles, and what lies a few moves from the best."""
        space = evidence.space
        moves = [(name, level) for name, levels in space.choices.items() for level in levels]
        pool: dict[Recipe, float] = {}
        leader = evidence.leader()
        near = [leader.recipe] if leader is not None else []
        thought = _usable(evidence, [*near, *space.bundles, *self.foresight.ideas])
        for _ in range(_STEPS):
            new = [recipe for recipe in thought if recipe not in pool]
            expected = self.foresight.forecast(new, trials)
            pool |= {recipe: one.works * one.gain for recipe, one in zip(new, expected, strict=True)}
            best = sorted(pool, key=lambda recipe: (-pool[recipe], str(recipe)))[:4]
            moved = [evidence.moved(recipe, *move) for recipe in best for move in moves]
            thought = _usable(evidence, [recipe for recipe in moved if recipe is not None])
        return [recipe for recipe in pool if recipe not in evidence.trials]


def _usable(evidence: Evidence, recipes: Iterable[Recipe]) -> list[Recipe]:
    """The recipes that can work in this space, each with what every recipe must have."""
    space = evidence.space
    whole = dict.fromkeys(with_required(space, recipe) for recipe in recipes)
    return [
        recipe for recipe in whole
        if recipe.levels and holds(space, recipe) and valid(space, recipe) and not evidence.known_wrong(recipe)
    ]  # fmt: skip
