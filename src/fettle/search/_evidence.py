"""What a design has measured so far, and what may be concluded from it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

from fettle.measure import FAR, Trial
from fettle.recipe import Recipe
from fettle.search._space import Session, Space, moved, with_required

OVERWHELMING = math.log(3)
"""A recipe that is this much slower than the leader by all evidence is not tried. Interactions were found to change a
gain by up to 2.4 times (bfloat16 with channels_last on ResNet-50, see the docs on searching)."""
_FAILED = 1e9
"""Subtracted from what is expected of a level that failed: tried last, but tried."""
_TIE = math.log(1.1)
"""Trials further apart than this are not tied, however noisy they are: the estimates are the best that there is."""


class Evidence:
    """The trials of one run of a design. All conclusions are functions of the trials alone, so a run that is
    resumed on a session that remembers draws the same ones."""

    def __init__(self, space: Space, session: Session) -> None:
        self.space = space
        self.session = session
        self.trials: dict[Recipe, Trial] = {}
        self.moved = functools.cache(functools.partial(moved, space))

    def measure(self, recipes: Sequence[Recipe]) -> bool:
        """Race what is new among the recipes; whether all were measured. If not, the budget is spent.

        What does not fit is asked for again as long as something does: a trial may show that less time has to be kept
        back for the final race than was feared.
        """
        new = [recipe for recipe in dict.fromkeys(recipes) if recipe not in self.trials]
        while new:
            trials = {trial.recipe: trial for trial in self.session.measure(new)}
            if not trials:
                return False
            self.trials |= trials
            new = [recipe for recipe in new if recipe not in trials]
        return True

    def leader(self) -> Trial | None:
        """The simplest recipe that cannot be told from the best by more than noise; None if none may win.

        Ties are judged against the best, not against the leader before: a row of ties cannot drift downhill.
        """
        running = [trial for trial in self.trials.values() if math.isfinite(self.score(trial))]
        if not running:
            return None
        best = min(running, key=lambda trial: (self.score(trial), len(trial.recipe.levels), str(trial.recipe)))
        tied = [trial for trial in running if not self.beats(best, trial)]
        return min(tied, key=lambda trial: (len(trial.recipe.levels), self.score(trial), str(trial.recipe)))

    def beats(self, one: Trial, other: Trial) -> bool:
        """Whether one is better than the other by more than the noise of both."""
        ours, theirs = self.score(one), self.score(other)
        if math.isinf(ours) or math.isinf(theirs):
            return ours < theirs
        return theirs - ours > min(_TIE, self.session.noise(one, other))

    def score(self, trial: Trial) -> float:
        score = self.session.score(trial)
        return math.inf if math.isnan(score) else score

    def is_hopeless(self, recipe: Recipe, leader: Trial) -> bool:
        """Whether the recipe would have to be three times as fast as all evidence says to be the best. For time goals.

        Either the gains of its levels, added up, leave it that far behind the leader; or a larger recipe that has all
        its levels is that far behind, though it is no slower than the workload as given: then nothing in it hurts.
        """
        if not self._is_time(leader):
            return False
        expected, known = self.expected(recipe, leader.recipe)
        if known and -_FAILED / 2 < expected < -OVERWHELMING:
            return True
        return any(
            recipe.levels.items() <= trial.recipe.levels.items()
            and OVERWHELMING < self.score(trial) - self.score(leader) < math.inf
            and self.score(trial) <= 0
            for trial in self.trials.values()
        )

    def _is_time(self, trial: Trial) -> bool:
        """Whether the score is that of a time goal, -log(speedup)."""
        ratio = trial.speedup
        return ratio is not None and ratio.estimate > 0 and math.isclose(
            self.score(trial), -math.log(ratio.estimate), rel_tol=1e-6, abs_tol=1e-9
        )  # fmt: skip

    def outcomes(self, technique: str, level: str) -> Iterator[tuple[Trial, Trial]]:
        """All pairs of trials before and after this move, in whatever order they were measured."""
        for before in self.trials.values():
            if before.recipe != with_required(self.space, before.recipe):
                continue  # the baseline without the preconditions: the move would be blamed for those
            recipe = self.moved(before.recipe, technique, level)
            if recipe in self.trials and recipe != before.recipe and math.isfinite(self.score(before)):
                yield before, self.trials[recipe]

    def gain(self, technique: str, level: str, near: Recipe) -> float | None:
        """What setting this level brought where the technique was as given, in the unit of the score, in the context
        most like `near`; None if that was never measured."""
        pairs = [
            (_distance(after.recipe, before.recipe), _distance(before.recipe, near), self.score(before), after)
            for before, after in self.outcomes(technique, level)
            if before.recipe.levels.get(technique, self.space.default(technique)) == self.space.default(technique)
        ]
        if not pairs:
            return None
        _, _, before_score, after = min(pairs, key=lambda item: item[:3])
        return -math.log(FAR) if after.too_slow else before_score - self.score(after)

    def expected(self, recipe: Recipe, leader: Recipe) -> tuple[float, bool]:
        """What going from the leader to the recipe should bring if gains simply add up, and whether every level that
        it adds was measured somewhere."""
        total, known = 0.0, True
        for sign, new, old in ((1, recipe, leader), (-1, leader, recipe)):
            for name in set(new.levels.items()) - set(old.levels.items()):
                gain = self.gain(*name, near=leader)
                known = known and (gain is not None or sign < 0)
                if gain is not None and math.isfinite(gain):
                    total += sign * gain
                elif gain is not None and sign > 0:  # it failed there: nothing to hope for, though not impossible
                    total -= _FAILED
        return total, known

    def known_wrong(self, recipe: Recipe) -> bool:
        """Whether the recipe holds everything that made another one inaccurate: errors add up, they rarely heal.

        A cause that is accurate in some larger recipe (a bundle, say) is acquitted.
        """
        required = set(self.space.required.levels.items())
        levels = set(recipe.levels.items()) - required
        accurate = [set(trial.recipe.levels.items()) for trial in self.trials.values() if trial.ok]
        causes = [
            set(trial.recipe.levels.items()) - required for trial in self.trials.values() if trial.status == "rejected"
        ]
        return any(cause and cause <= levels and not any(cause <= held for held in accurate) for cause in causes)


def _distance(one: Recipe, other: Recipe) -> int:
    return len(set(one.levels.items()) ^ set(other.levels.items()))
