"""Measuring: the worker process, the clock, memory, accuracy, the statistics, the race.

Other rooms use `race`, which measures recipes side by side, and the plain data it returns.
"""

from fettle.measure._trial import Accuracy, Interval, Startup, Trial

__all__ = ["Accuracy", "Interval", "Startup", "Trial"]
