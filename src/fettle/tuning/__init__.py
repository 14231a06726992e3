"""Tuning: the main job, from a workload to a verified recipe. `tune` reads from top to bottom.

Other rooms use `tune` with its `Options`, and the `Session` that a study measures with.
"""

from fettle.tuning._arguments import check_options, check_ranks, check_techniques, writable
from fettle.tuning._events import Event, OnProgress
from fettle.tuning.kept import atlas_rows, recalled, studies_in
from fettle.tuning.model import another_hour, widened
from fettle.tuning.options import Effort, Options
from fettle.tuning.session import WAITING, Session
from fettle.tuning.space import space_for
from fettle.tuning.standings import misses_of
from fettle.tuning.tune import guide_for, tune

__all__ = [
    "WAITING", "Effort", "Event", "OnProgress", "Options", "Session", "another_hour", "atlas_rows",
    "check_options", "check_ranks", "check_techniques", "guide_for", "misses_of", "recalled", "space_for", "studies_in",
    "tune", "widened", "writable",
]  # fmt: skip
