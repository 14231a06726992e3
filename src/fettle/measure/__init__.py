"""Measuring: the worker process, the clock, memory, accuracy, the statistics, the race.

Other rooms use `race`, which measures recipes side by side, and the plain data it returns.
"""

from fettle.measure._accuracy import judge
from fettle.measure._entrants import Held
from fettle.measure._process import Worker, WorkerError, close_all
from fettle.measure._rules import Entry, Judge, Progress, Rules
from fettle.measure._statistics import log_interval, ratio_interval, verdict
from fettle.measure._trial import Accuracy, Interval, Startup, Trial
from fettle.measure.race import race

__all__ = [
    "Accuracy", "Entry", "Held", "Interval", "Judge", "Progress", "Rules", "Startup", "Trial", "Worker",
    "WorkerError", "close_all", "judge", "log_interval", "race", "ratio_interval", "verdict",
]  # fmt: skip
