"""Tuning: the main job, from a workload to a verified recipe. `tune` tells it from top to bottom.

Other rooms use `tune`, and the `Session` that a study measures with.
"""

from fettle.tuning.session import WAITING, Event, Session, Tell
from fettle.tuning.tune import tune

__all__ = ["WAITING", "Event", "Session", "Tell", "tune"]
