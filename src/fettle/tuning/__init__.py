"""Tuning: the main job, from a workload to a verified recipe. `tune` tells it from top to bottom.

Other rooms use `tune`, `save`, and the `Session` that a study measures with.
"""

from fettle.tuning._arguments import MODES
from fettle.tuning._files import recipe_file, save
from fettle.tuning.session import Event, Session, Tell
from fettle.tuning.tune import tune

__all__ = ["MODES", "Event", "Session", "Tell", "recipe_file", "save", "tune"]
