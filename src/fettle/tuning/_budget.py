"""The time that a study may take."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from fettle.measure import Trial


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

    def affords(self, seconds: float = 0.0) -> bool:
        """Whether so many seconds more are inside the budget."""
        return self.seconds is None or self.elapsed_s + seconds < self.seconds

    def deadline(self, finalists: list[Trial]) -> float:
        """`time.monotonic()` at which to begin the last race of `finalists`, so that it ends inside the budget.

        It starts each of them again and runs a few rounds; no more than half the budget is kept back for it.
        """
        if self.seconds is None:
            return math.inf
        starts = sum(trial.startup.load_s + trial.startup.total_s + 3.0 for trial in finalists)
        rounds = sum(trial.time_ms / 1e3 for trial in finalists if trial.ok) * 4
        return self.started + self.seconds - min(starts + rounds + 5.0, 0.5 * self.seconds)
