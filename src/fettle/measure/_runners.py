"""The processes of a race that run, and what they have measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from fettle.generate.speed import TextTimes
from fettle.measure._load import Load
from fettle.measure._process import Worker, close_each
from fettle.measure._rules import Candidate
from fettle.measure._trial import Slice, Trial, log_times
from fettle.measure.messages import Prepared
from fettle.recipe import Recipe


@dataclass
class Held:
    """Processes that a study keeps from one race to the next: the workload as given and the leader run in each, and are
    started once. Close it."""

    runners: dict[Recipe, Runner] = field(default_factory=dict)

    def take(self, recipe: Recipe) -> Runner | None:
        """A runner with nothing measured yet; None where there is none or it has died."""
        kept = self.runners.get(recipe)
        if kept is None:
            return None
        if kept.worker.wait(0) is not None:
            self.runners.pop(recipe).worker.close()
            return None
        return Runner(kept.candidate, kept.worker, kept.answer, kept.rejected, time.monotonic(), kept.process,
                      kept.started_s)  # fmt: skip

    def keep(self, recipes: Collection[Recipe]) -> None:
        """End all processes but those of these recipes."""
        over = [recipe for recipe in self.runners if recipe not in recipes]
        close_each(self.runners.pop(recipe).worker for recipe in over)

    def close(self) -> None:
        """End the processes."""
        self.keep(())


@dataclass
class Runner:
    """One process of a candidate."""

    candidate: Candidate
    worker: Worker
    answer: Prepared
    rejected: str
    began: float
    process: str = ""
    started_s: float = 0.0
    slices: list[Slice] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    """What others had of the machine in each slice."""
    turns_s: list[float] = field(default_factory=list)
    """What each slice took of the race's time."""
    samples_ns: list[int] = field(default_factory=list)
    energy_j: list[float] = field(default_factory=list)
    texts: list[TextTimes] = field(default_factory=list)
    """How texts came, where the workload writes some."""
    failure: str = ""

    def log_times(self, *, elapsed: bool) -> dict[int, float]:
        """Log time of one row by round, `elapsed` with the waiting in it."""
        return log_times(self.slices, self.answer.samples, elapsed=elapsed)


@dataclass
class Started:
    """A candidate in the race: its processes, the first of which stands for all where they cannot differ."""

    runners: list[Runner]
    live: bool = True
    elapsed: bool = False
    """Go by time elapsed, with what others took in it."""
    number: int = 0
    """Its place among the candidates."""
    trial: Trial = field(init=False, compare=False, repr=False)
    """What is known of it, as soon as it has been timed."""

    @property
    def first(self) -> Runner:
        return self.runners[0]

    @property
    def rejected(self) -> str:
        return next((runner.rejected for runner in self.runners if runner.rejected), "")

    @property
    def failure(self) -> str:
        return next((runner.failure for runner in self.runners if runner.failure), "")

    def process_logs(self) -> list[dict[int, float]]:
        """Log time of one row by round, for each process that has been timed."""
        return [log for runner in self.runners if (log := runner.log_times(elapsed=self.elapsed))]

    @property
    def per_sample(self) -> dict[int, float]:
        """Log time of one row by round, the mean over the processes that have been timed."""
        logs = self.process_logs()
        rounds = [key for key in logs[0] if all(key in log for log in logs)] if logs else []
        return {key: statistics.fmean(log[key] for log in logs) for key in rounds}
