"""Measuring: the worker process, the clock, memory, accuracy, the statistics, the race.

Other rooms use `race`, which measures recipes side by side, and the plain data it returns.
"""

from fettle.estimates import Interval
from fettle.measure._load import Load, busy_load
from fettle.measure._pace import FAR
from fettle.measure._priority import READY, may_go_first, prefer
from fettle.measure._process import Worker, WorkerError, close_all, fork_server
from fettle.measure._rules import Candidate, Judge, Progress, Rules, Stop
from fettle.measure._runners import Held
from fettle.measure._statistics import (
    ENOUGH,
    contrast_interval,
    is_vague,
    log_interval,
    paired,
    pareto,
    places,
    ratio_interval,
    verdict,
)
from fettle.measure._trial import (
    Accuracy,
    Slice,
    Startup,
    Trial,
    by_process,
    by_round,
    fetching,
    log_times,
    process_logs,
    typed,
)
from fettle.measure._watch import Patience, Surroundings
from fettle.measure.race import race

__all__ = [
    "ENOUGH", "FAR", "READY", "Accuracy", "Candidate", "Held", "Interval", "Judge", "Load", "Patience", "Progress",
    "Rules", "Slice", "Startup", "Stop", "Surroundings", "Trial", "Worker", "WorkerError", "busy_load", "by_process",
    "by_round", "close_all", "contrast_interval", "fetching", "fork_server", "is_vague", "log_interval", "log_times",
    "may_go_first", "paired", "pareto", "places", "prefer", "process_logs", "race", "ratio_interval", "typed",
    "verdict",
]  # fmt: skip
