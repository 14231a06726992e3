"""What trying recipes should cost, from what trials have cost so far, and how many can still be tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.tuning._budget import FEWEST_ROUNDS, Budget, start_s, turn_s
from fettle.tuning.space import level_cost
from fettle.tuning.standings import Standings

_EXTRA_START_S = {1: 0.0, 2: 6.0, 3: 30.0}
"""What a recipe of each cost needs beyond the workload as given until it is ready, as long as none was measured."""

_FEW = 4
"""Recipes that ran, below which time for another one is worth more than time for further processes of the best."""


@dataclass(frozen=True)
class Costs:
    """Asked again and again while `standings` learn of more trials."""

    standings: Standings
    budget: Budget
    saved_s: float = 0.0
    """Seconds that a start of the search takes less than one of the final race."""
    abreast: int = 1
    """Starts of the search that are made side by side."""
    confirms: bool = True
    """Whether a final race follows, for which time is kept back."""

    def of(self, recipe: Recipe) -> int:
        """How expensive a recipe is to start, as `Space.cost`. Where a process of the workload as given takes longer to
        be ready than the most expensive level adds to that, all cost about alike: none comes first for being cheap."""
        baseline = self.standings.known.get(Recipe())
        if baseline is not None and start_s(baseline) > max(_EXTRA_START_S.values()):
            return 2
        return level_cost(recipe)

    def how_many_fit(self, recipes: Sequence[Recipe], left_s: float) -> int:
        """How many of these can be raced in the time that is left: as many as can be started, run in the fewest rounds,
        and started once more in the final race should one of them lead. The first recipe of all need not leave time
        for that: an unconfirmed winner is more than none. What was not measured is taken to be no slower than the
        workload as given."""
        baseline = self.standings.known.get(Recipe())
        if baseline is None or math.isinf(left_s):
            return len(recipes)
        left_s -= FEWEST_ROUNDS * turn_s(baseline)
        finalists = self.standings.finalists()
        reserved_s = max(map(start_s, finalists), default=0.0)
        for number, recipe in enumerate(recipes):
            each_s = self._start_s(recipe, baseline)
            left_s -= each_s / min(self.abreast, len(recipes)) + FEWEST_ROUNDS * turn_s(baseline)
            is_first = number == 0 and not finalists
            if left_s < (0.0 if is_first or not self.confirms else max(0.0, each_s - reserved_s)):
                return number
        return len(recipes)

    def seconds_for(self, recipe: Recipe, rounds: int) -> float:
        """Seconds that a recipe should take to start and to run so many rounds. The baseline must be known."""
        baseline = self.standings.known[Recipe()]
        return self._start_s(recipe, baseline) + rounds * turn_s(baseline)

    def seconds_for_each(self, recipes: Sequence[Recipe], rounds: int) -> list[float]:
        """The same of many recipes. All that is known is looked through once for those that cost alike."""
        costs = list(map(level_cost, recipes))
        seconds = {cost: self.seconds_for(one, rounds) for cost, one in dict(zip(costs, recipes, strict=True)).items()}
        return [seconds[cost] for cost in costs]

    def _start_s(self, recipe: Recipe, baseline: Trial) -> float:
        """What starting as expensive a recipe has typically cost; where none was, a guess on the low side."""
        cost = level_cost(recipe)
        alike = sorted(
            trial.start_s for known, trial in self.standings.known.items()
            if known.levels and level_cost(known) == cost and math.isfinite(trial.start_s)
        )  # fmt: skip
        whole_s = alike[len(alike) // 2] if alike else start_s(baseline) + _EXTRA_START_S[cost]
        return max(0.0, whole_s - self.saved_s)

    def deadline(self) -> float:
        """When to begin the final race, or to end where none follows."""
        known = self.standings.known
        if (baseline := known.get(Recipe())) is None or not self.confirms:
            return self.budget.end
        few = sum(trial.status != "failed" for trial in known.values()) - 1 < _FEW
        return self.budget.deadline([baseline, *self.standings.finalists()], few=few)

    def left_s(self, deadline: float | None = None) -> float:
        """Seconds until then, by default until the final race must begin."""
        return (self.deadline() if deadline is None else deadline) - self.budget.started - self.budget.elapsed_s
