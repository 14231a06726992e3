"""What a study knows of its recipes: their trials, what all races say together, which is best, which may be better."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from fettle.measure import Judge, Trial
from fettle.recipe import Recipe
from fettle.result import TIMES, Goal, Limits
from fettle.study import Study
from fettle.techniques import PYTHON, find, kind_of
from fettle.tuning import _limits
from fettle.tuning.model import Fit, Races

FINALISTS = 4
"""Most recipes that meet in the final race, as far as there is time."""
GAIN_OF_SHARING = math.log(1.15)
"""What a level that helps beside a neighbour (fewer threads, a stream a core) must gain there before it counts. Without
this, two of 28 studies beside neighbours announced a stream a core, by 3% and more, which is 8% slower on the quiet
machine (``bench/busy.py``)."""


@dataclass
class Standings:
    """The recipes of a study and their order."""

    goal: Goal
    limits: Limits
    races: Races
    confidence: float = 0.95
    judge: Judge = field(default_factory=Judge)
    known: dict[Recipe, Trial] = field(default_factory=dict)
    """Every recipe that was measured, by this run of the study or an earlier one."""
    fit: Fit | None = None
    """What all races so far say together."""

    def add(self, trials: Iterable[Trial]) -> None:
        """Take a race's trials into account: every known trial then says what all races say of its speed."""
        self.races.add(trials)
        self.fit = self.races.fit()
        if self.fit is None:
            return
        for recipe, trial in self.known.items():
            speedup = self.fit.speedup(recipe, confidence=self.confidence) if recipe.levels else None
            if speedup is not None:
                self.known[recipe] = replace(trial, speedup=speedup)

    def recall(self, study: Study, environments: Collection[str] = ()) -> list[Trial]:
        """Take what earlier runs of a study measured, and return its trials; those of other environments only as far as
        they are named."""
        ours = (PYTHON.default, *environments)
        trials = [trial for trial in study.trials() if trial.recipe.levels.get(PYTHON.name, PYTHON.default) in ours]
        for trial in trials:
            self.known[trial.recipe] = self.judged(trial)
        again = study.notes("again in race ")  # what was known by then ran in these
        kept = [trial for note in (*again, study.note("final race"), study.note("last race"))
                for trial in read_trials(note)]  # fmt: skip
        self.add([*self.known.values(), *kept])
        return trials

    def confirmed(self, trials: Sequence[Trial]) -> list[Trial]:
        """The final race's trials with what this race alone says of them, processes spread as in the whole study."""
        self.add(trials)
        alone = self.races.of_race(trials[0].race, self.fit) if self.fit is not None else None
        if alone is None:
            return list(trials)
        return [replace(trial, speedup=alone.speedup(trial.recipe, confidence=self.confidence) or trial.speedup)
                if trial.recipe.levels else trial for trial in trials]  # fmt: skip

    def best(self) -> Trial | None:
        """The trial with the best score, the simpler recipe where two are equal within noise; None if none may win."""
        able = [trial for trial in self.known.values() if math.isfinite(self.score(trial))]
        return min(able, key=self.rank, default=None)

    def finalists(self) -> list[Trial]:
        """The best, then one of another kind (another runtime, other threads), then more that may be better for all
        that the races say or came within 5% of the best: four at most."""
        able = [trial for trial in self.known.values() if trial.recipe.levels and math.isfinite(self.score(trial))]
        ranked = sorted(able, key=self.rank)
        near = [trial for trial in ranked if not self.beats(ranked[0], trial, math.log(1.05))]
        other = next((trial for trial in near if kind_of(trial.recipe) != kind_of(ranked[0].recipe)), None)
        if other is not None:
            near = [near[0], other, *(trial for trial in near[1:] if trial is not other)]
        return near[:FINALISTS]

    def score(self, trial: Trial) -> float:
        """The goal as a number, smaller is better; infinite where the trial may not win."""
        score = math.inf if self.misses(trial) else _limits.score(trial, self.goal)
        shared = not trial.is_quiet and not self.races.elapsed and self.goal in TIMES
        if shared and any(find(name).helps_when_shared for name in trial.recipe.levels):
            score += GAIN_OF_SHARING
        return score

    def rank(self, trial: Trial) -> tuple[float, int]:
        """The score, and at equal score how many levels differ from the workload as given: least first."""
        return self.score(trial), len(trial.recipe.levels)

    def beats(self, one: Trial, other: Trial, least: float = 0.0) -> bool:
        """Whether one is better than the other by more than the noise of both and by more than `least` (a log)."""
        ours, theirs = self.score(one), self.score(other)
        if math.isinf(ours) or math.isinf(theirs):
            return ours < theirs
        return theirs - ours > max(least, self.noise(one, other))

    def noise(self, one: Trial, other: Trial) -> float:
        """Half the confidence interval of the difference of two scores, as far as they are times; 0 for other goals."""
        if self.fit is None or self.goal not in TIMES:
            return 0.0
        apart = self.fit.log_ratio(one.recipe, other.recipe, self.confidence)
        return (apart.high - apart.low) / 2 if apart is not None else 0.0

    def misses(self, trial: Trial) -> str:
        """Which limit a trial breaks that its status does not tell of, as a phrase; empty when it keeps them.

        The workload as given is measured whatever its answers: only here may they cost it the win.
        """
        broken = _limits.misses(trial, self.limits)
        baseline = self.known.get(Recipe())
        if broken or trial.recipe.levels or baseline is None or baseline.status == "failed":
            return broken
        return self.judge.reason(baseline.accuracy)

    def judged(self, trial: Trial) -> Trial:
        """A trial of an earlier run under today's limits on accuracy."""
        if trial.status == "failed" or not trial.recipe.levels:
            return trial
        reason = self.judge.reason(trial.accuracy)
        return replace(trial, status="rejected" if reason else "measured", reason=reason)


def read_trials(notes: Any) -> list[Trial]:
    """Trials that were kept as a note of the study; none where there is none or it cannot be read."""
    try:
        return [Trial.from_json(item) for item in notes or ()]
    except (TypeError, KeyError, AttributeError, ValueError, msgspec.ValidationError):
        return []
