"""Searching: the space of valid recipes and the designs that say which of them a study tries.

Searching knows nothing of measuring: a design is handed a `Session` that evaluates recipes. `DESIGNS` has them by
name; all are called alike and return the leader.
"""

from collections.abc import Callable, Mapping

from fettle.measure import Trial
from fettle.search._space import Session, Space, holds, moved, valid, with_required
from fettle.search.auto import auto
from fettle.search.designs import Step, ablation, combinations_of, factorial, is_sampled, ladder, removals, steps
from fettle.search.foresight import SLOWEST, Forecast, Foreseen, Foresight, Guide

Design = Callable[[Space, Session], Trial | None]
"""The rule that says which recipes a study tries: it returns the best, None if none may win."""
DESIGNS: Mapping[str, Design] = {"auto": auto, "ladder": ladder, "factorial": factorial, "ablation": ablation}

__all__ = [
    "DESIGNS", "SLOWEST", "Design", "Forecast", "Foreseen", "Foresight", "Guide", "Session", "Space", "Step",
    "ablation", "auto", "combinations_of", "factorial", "holds", "is_sampled", "ladder", "moved", "removals", "steps",
    "valid", "with_required",
]  # fmt: skip
