"""Finding the commit that made a target slower, by races of commits, with the error rate of the whole search."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fettle.errors import UsageError
from fettle.files import plain
from fettle.gate import history
from fettle.gate.judging import percent, slowdown
from fettle.gate.racing import Ground, Settings, Side, ground_for, repository_for, revision
from fettle.gate.revisions import Repository
from fettle.machine import this_machine
from fettle.measure import Interval, Trial, contrast_interval, process_logs
from fettle.tuning import OnProgress
from fettle.units import count_text

LOOKS = (4, 8, 12)
"""Processes of each commit in the races of one question: each race is a new one, and the next is made where the last
could not tell."""


@dataclass(frozen=True)
class Step:
    """A question of the search, and its answer."""

    commit: str
    name: str
    change: Interval | None
    """Time over that of GOOD."""
    verdict: str
    """``slow``, ``fast``, ``cannot tell``, or why it was left out."""


@dataclass(frozen=True)
class Bisection:
    """What a search found."""

    good: str
    bad: str
    commits: int
    """How many it looked for the culprit among."""
    change: Interval | None
    """Time of BAD over that of GOOD."""
    steps: Sequence[Step]
    suspects: Sequence[str]
    """Names of the commits of which one is the culprit; one where it was found, none where BAD is not slower."""
    sentence: str
    error_rate: str
    notes: Sequence[str] = ()

    @property
    def found(self) -> bool:
        """Whether one commit is the culprit."""
        return len(self.suspects) == 1


def bisect(
    target: str, good: str, bad: str, settings: Settings | None = None, on_progress: OnProgress = lambda event: None
) -> Bisection:
    """Find the commit after `good`, up to `bad`, along first parents, that made the target slower.

    First GOOD and BAD are raced: the search begins where BAD is slower for certain and by more than `fail_slower`. Then
    the middle commit of what is left is raced beside both, and is slow or fast where its time is certainly above or
    below the middle of theirs. Every race has its share of the error rate, 1 - `confidence` in all: Bonferroni over the
    questions that the search can ask and the races that each may take. That holds where one commit made the difference;
    where several did, a commit in the middle may be near neither, and the range is all that is reported.

    What is known goes into the history at once, and an interrupted search goes on from there. Raises `UsageError` where
    GOOD or BAD does not run.
    """
    settings = settings or Settings()
    ground = ground_for(target, settings, on_progress)
    repository = repository_for(ground)
    first, last = repository.resolve(good), repository.resolve(bad)
    commits = repository.between(first, last)
    search = _Search(ground, repository, target, first, last, 1 + math.ceil(math.log2(len(commits))))
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(revision(ground, repository, commit)) for commit in (first, last)]
        return search.run(ends, commits)


@dataclass
class _Search:
    ground: Ground
    repository: Repository
    target: str
    good: str
    bad: str
    questions: int

    @property
    def alpha(self) -> float:
        """Error rate of one race."""
        return (1 - self.ground.settings.confidence) / (self.questions * len(LOOKS))

    def run(self, ends: Sequence[Side], commits: Sequence[str]) -> Bisection:
        step = self.ask(self.bad, ends)
        steps = [step]
        # suspects[-1] is slow, and what stands before suspects[0] is fast
        suspects, left_out = list(commits) if step.verdict == "slow" else [], set[str]()
        while len(suspects) > 1:
            able = [commit for commit in suspects[:-1] if commit not in left_out]
            if not able:
                break
            middle = able[(len(able) - 1) // 2]
            step = self._ask_middle(middle, ends)
            steps.append(step)
            if step.verdict == "slow":
                suspects = suspects[: suspects.index(middle) + 1]
            elif step.verdict == "fast":
                suspects = suspects[suspects.index(middle) + 1 :]
            elif step.verdict == "cannot tell":
                break
            else:
                left_out.add(middle)
        names = [self.repository.name(commit) for commit in suspects]
        return Bisection(
            ends[0].label, ends[1].label, len(commits), steps[0].change, steps, names,
            _sentence(names, steps), self._error_rate(), self.ground.notes,
        )  # fmt: skip

    def ask(self, commit: str, sides: Sequence[Side]) -> Step:
        """Race the sides until the answer is certain, or the looks are used up. What was answered to the same question,
        asked as strictly, is not asked again."""
        name, settings = self.repository.name(commit), self.ground.settings
        asked = (self.target, this_machine().id, f"{self.good}..{self.bad}", commit,
                 settings.fail_slower, settings.confidence, settings.under_load, settings.how)  # fmt: skip
        for entry in history.read(self.ground.folder):
            answered = (entry.target, entry.machine, entry.bisect, entry.new_commit,
                        entry.limit, entry.confidence, entry.under_load, entry.how)  # fmt: skip
            if answered == asked and entry.verdict in ("slow", "fast"):
                return Step(commit, name, entry.time, entry.verdict)
        change, verdict = None, "cannot tell"
        for processes in LOOKS:
            trials = self.ground.race(sides, self.ground.rules(processes))
            suspect = trials[-1]
            if not suspect.ok:
                if commit == self.bad:
                    raise UsageError(f"{name}: {suspect.reason}")
                return Step(commit, name, None, f"left out: {suspect.reason}")
            change, verdict = slowdown(suspect.speedup), self._answer(trials)
            if verdict != "cannot tell":
                break
        history.keep(self.ground.folder, self._entry(trials[0], suspect, name, commit, change, verdict))
        return Step(commit, name, change, verdict)

    def _ask_middle(self, commit: str, ends: Sequence[Side]) -> Step:
        name = self.repository.name(commit)
        try:
            with revision(self.ground, self.repository, commit) as side:
                return self.ask(commit, [*ends, side])
        except UsageError as error:
            if name not in str(error) and repr(name) not in str(error):  # of the ends, or of all
                raise
            return Step(commit, name, None, f"left out: {error}")

    def _answer(self, trials: Sequence[Trial]) -> str:
        """Whether BAD is slower than GOOD by the limit; or a third commit than the middle of both."""
        settings = self.ground.settings
        logs = [process_logs(trial, elapsed=settings.under_load) for trial in trials]
        if min(map(len, logs)) < 2:
            raise UsageError("the race had no time for several processes of each commit: give it a larger `budget`")
        if (ratio := trials[-1].speedup) is None or not ratio.is_known:  # as a gate says of what is shown
            return "cannot tell"
        of_ends = len(trials) == 2
        weights, limit = ((-1, 1), math.log(1 + settings.fail_slower)) if of_ends else ((-0.5, -0.5, 1), 0.0)
        contrast = contrast_interval(logs, weights, self.alpha)
        if contrast.low > 0 and contrast.estimate > limit:
            return "slow"
        return "fast" if contrast.high < limit else "cannot tell"

    def _error_rate(self) -> str:
        rate = 1 - self.ground.settings.confidence
        return (
            f"Error rate of the whole search: at most {rate:.3g}, if one commit made the difference "
            f"({count_text(self.questions, 'question')}, up to {len(LOOKS)} races each, {self.alpha:.2g} a race)."
        )

    def _entry(
        self, old: Trial, new: Trial, name: str, commit: str, change: Interval | None, verdict: str
    ) -> history.Entry:
        return history.Entry(
            history.now(), self.target, this_machine().id, self.repository.name(self.good), name, verdict,
            round(old.time_ms, 6), round(new.time_ms, 6), change, limit=self.ground.settings.fail_slower,
            processes=new.processes, old_commit=self.good, new_commit=commit, bisect=f"{self.good}..{self.bad}",
            confidence=self.ground.settings.confidence, under_load=self.ground.settings.under_load,
            how=self.ground.settings.how,
        )  # fmt: skip


def _sentence(names: Sequence[str], steps: Sequence[Step]) -> str:
    """What a search with these steps leaves of the commits, by their names."""
    change = percent(steps[0].change)
    if steps[0].verdict == "fast":
        return f"BAD is not slower than GOOD by the limit ({change}): there is nothing to find"
    if not names:
        return f"it cannot be told whether BAD is slower than GOOD ({change}): nothing was searched"
    if len(names) == 1:
        return f"{names[0]} made it slower: {change} from GOOD to BAD"
    unclear = steps[-1].verdict == "cannot tell"  # else nobody was left to ask
    why = "is near neither GOOD nor BAD, or too noisy to say which" if unclear else "could not be measured"
    return f"one of {len(names)} commits, {names[0]} to {names[-1]}, made it slower; what lies between {why}"


def bisection_json(bisection: Bisection) -> dict[str, Any]:
    """A bisection as plain data."""
    return {**plain(bisection), "found": bisection.found}
