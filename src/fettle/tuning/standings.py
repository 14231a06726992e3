"""What a study knows of its recipes: their trials, what all races say together, which is best, which may be better; the
goal and the limits as numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from fettle.generate.speed import Generation
from fettle.measure import FAR, Judge, Trial
from fettle.recipe import Recipe, technique_and_part
from fettle.result import TIMES, Goal, Limits, call_ms, goal_figure
from fettle.study import Study
from fettle.techniques import PYTHON, batch_factor, find, kind_of, known_levels
from fettle.tuning.model import Fit, Races

FINALISTS = 4
"""Most recipes that meet in the final race, as far as there is time."""
SIMPLER = 0.03
"""A recipe that cannot be told from the best and is simpler wins up to this loss."""
GAIN_OF_SHARING = math.log(1.15)
"""What a level that helps beside a neighbour (fewer threads, a stream a core) must gain there before it counts. Without
this, two of 28 studies beside neighbours announced a stream a core, by 3% and more, which is 8% slower on the quiet
machine (``bench/busy.py``)."""

_LATE = re.compile(r"timed out after (\d+) s in (?:build|probe|prepare)\b")
"""Why a recipe failed that was not ready in time."""


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
    allowed: Callable[[Recipe], bool] = field(default=lambda recipe: True)
    """Whether a recipe may win: an earlier run of the study may have tried what this one was not allowed."""

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

    def recall(
        self, study: Study, environments: Collection[str] | None = (), *, anew: bool = True, timeout_s: float = 0.0
    ) -> list[Trial]:
        """Take what earlier runs of a study measured, and return its trials; those of other environments only as far as
        they are named, or all. What could not be compared is to be measured `anew`, so it is not known; nor is the
        workload as given where it failed, nor what was not ready in time where `timeout_s` is longer today, nor
        what was too slow where such a recipe may win today."""
        trials, named = _in_catalogue(study.trials()), (PYTHON.default, *(environments or ()))
        if environments is not None:
            trials = [trial for trial in trials if trial.recipe.levels.get(PYTHON.name, PYTHON.default) in named]
        for trial in trials:
            self.known[trial.recipe] = self.judged(trial)
        repeated = study.notes("again in race ")  # the races in which known recipes ran again
        kept = self.raced(*repeated, study.note("final race"), study.note("last race"))
        self.add([*self.known.values(), *kept])
        able = self.longest_ms is not None
        again = [recipe for recipe, trial in self.known.items()
                 if _may_tell_more(trial, timeout_s) or (trial.too_slow and not able)]  # fmt: skip
        for recipe in again if anew else ():
            del self.known[recipe]
        return trials

    def raced(self, *notes: Any) -> list[Trial]:
        """Trials that were kept as notes of a study, but for those of recipes that run by other versions today."""
        kept = _in_catalogue(trial for note in notes for trial in read_trials(note))
        today = {recipe: trial.versions for recipe, trial in self.known.items()}
        return [trial for trial in kept if not trial.versions or today.get(trial.recipe) in ({}, trial.versions)]

    def confirmed(self, trials: Sequence[Trial], *, drifts: bool = True) -> list[Trial]:
        """The final race's trials with what this race alone says of them, processes spread as in the whole study, and
        drifting so unless that is left out."""
        self.add(trials)
        alone = self.races.of_race(trials[0].race, self.fit, drifts=drifts) if self.fit is not None else None
        if alone is None:
            return list(trials)
        return [replace(trial, speedup=alone.speedup(trial.recipe, confidence=self.confidence) or trial.speedup)
                if trial.recipe.levels else trial for trial in trials]  # fmt: skip

    @property
    def longest_ms(self) -> float | None:
        """What a call may take with nothing else known of a recipe; None where a slow one may win, too."""
        baseline = self.known.get(Recipe())
        if self.goal not in TIMES or baseline is None or not baseline.slices or math.isinf(self.score(baseline)):
            return None
        return FAR * max(one.ms for one in baseline.slices)

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

    def pick(self, able: Sequence[Trial]) -> Trial:
        """The fastest of these by all races together; of those that cannot be told from it and lose no more than
        `SIMPLER` the one that changes least."""
        known = [self.known.get(trial.recipe, trial) for trial in able]
        best = min(known, key=self.rank)
        tied = [
            trial for trial in known
            if trial is best
            or (not self.beats(best, trial) and self.score(trial) - self.score(best) <= math.log1p(SIMPLER))
        ]  # fmt: skip
        simplest = min(tied, key=lambda trial: (len(trial.recipe.levels), self.score(trial)))
        return next(trial for trial in able if trial.recipe == simplest.recipe)

    def score(self, trial: Trial) -> float:
        """The goal as a number, smaller is better; infinite where the trial may not win."""
        may_win = self.allowed(trial.recipe) and not self.misses(trial)
        score = score_of(trial, self.goal) if may_win else math.inf
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

    def foreseen_failure(self, recipe: Recipe) -> str:
        """Why a recipe would fail, where two with levels that share their failures (`Technique.shared_failures`) have;
        empty where nothing of the kind is known."""
        failed = [trial for trial in self.known.values() if trial.status == "failed"]
        for name, level in recipe.levels.items():
            for text, levels in find(name).shared_failures.items() if failed else ():
                alike = [one.reason for one in failed if text in one.reason and one.recipe.levels.get(name) in levels]
                if level in levels and len(alike) > 1:
                    return alike[0]
        return ""

    def misses(self, trial: Trial) -> str:
        """Which limit a trial breaks that its status does not show, as a phrase; empty when it keeps them.

        The workload as given is measured whatever its answers: only here may they cost it the win.
        """
        broken = misses_of(trial, self.limits, self.goal)
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


def _may_tell_more(trial: Trial, timeout_s: float) -> bool:
    """Whether a recipe is worth another trial, with `timeout_s` to get ready."""
    if trial.status != "failed":
        return bool(trial.recipe.levels) and not trial.is_compared
    late = _LATE.match(trial.reason)
    return not trial.recipe.levels or (late is not None and int(late[1]) < round(timeout_s))


def _in_catalogue(trials: Iterable[Trial]) -> list[Trial]:
    """Those whose techniques and levels this version of fettle has: another one may have worked at the study."""
    known = known_levels()
    return [
        trial for trial in trials
        if all(name == PYTHON.name or level in known.get(technique_and_part(name)[0], ())
               for name, level in trial.recipe.levels.items())
    ]  # fmt: skip


def read_trials(notes: Any) -> list[Trial]:
    """Trials that were kept as a note of the study; none where there is none or it cannot be read."""
    try:
        return [Trial.from_json(item) for item in notes or ()]
    except (TypeError, KeyError, AttributeError, ValueError, msgspec.ValidationError):
        return []


def score_of(trial: Trial, goal: Goal) -> float:
    """The goal as a number, smaller is better; infinite where the trial does not have it."""
    if not trial.ok:
        return math.inf
    if (figure := goal_figure(goal, trial)) is not None:
        return math.inf if math.isnan(figure) else math.log(figure)
    # Speed-ups are per row, and a call of more rows takes longer.
    slower = batch_factor(trial.recipe) if goal == "latency" else 1
    return math.log(slower / trial.speedup.estimate) if trial.speedup is not None else math.inf


def misses_of(trial: Trial, limits: Limits, goal: Goal) -> str:
    """Which limit on time or memory a trial breaks, as a phrase; empty when it keeps them."""
    return next((phrase for factor, phrase in _beside_limits(trial, limits, goal) if not factor <= 1), "")


def distance(trial: Trial, limits: Limits, goal: Goal) -> float:
    """How far a trial is from keeping the limits: the log of the largest factor that one is missed by; 0 for none."""
    factors = [1.0, *(factor for factor, _ in _beside_limits(trial, limits, goal))]
    if limits.max_error is not None:
        factors.append(trial.accuracy.error / limits.max_error)
    return math.log(max(math.inf if math.isnan(factor) else factor for factor in factors))


def _beside_limits(trial: Trial, limits: Limits, goal: Goal) -> Iterator[tuple[float, str]]:
    """For each limit on time or memory: by which factor a trial is beyond it, up to 1 where it keeps it and NaN where
    that is not known, and what to say of it."""
    text, mib, peak = trial.generation or Generation(), 2**20, trial.peak_bytes
    if (most := limits.max_latency_ms) is not None:
        took_ms, each = call_ms(goal, trial), " a text" if goal in ("ttft", "tpot") else ""
        unknown = "the time of a whole call is not known: measure again in another `output`"
        yield took_ms / most, unknown if math.isnan(took_ms) else f"{took_ms:.3g} ms{each} is above {most:g} ms"
    if (most := limits.max_memory_bytes) is not None and peak is None:
        yield math.nan, "its peak memory is not known"
    elif most is not None and peak is not None:
        yield peak / most, f"{peak / mib:.0f} MiB is above {most / mib:.0f} MiB"
    if (most := limits.max_ttft_ms) is not None:
        yield text.ttft_ms / most, f"{text.ttft_ms:.3g} ms to the first token are above {most:g} ms"
    if (most := limits.max_tpot_ms) is not None:
        yield text.tpot_ms / most, f"{text.tpot_ms:.3g} ms per output token are above {most:g} ms"
    if (least := limits.min_throughput) is not None:
        # Of whole texts, also where the race goes by a part of them.
        rate, unit = (text.throughput, "tokens") if trial.generation else (trial.throughput, "samples")
        yield least / rate if rate > 0 else math.nan, f"{rate:.3g} {unit} a second are below {least:g}"
