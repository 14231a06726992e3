"""Searching: the space of valid recipes and the designs that say which of them a study tries.

Searching knows nothing of measuring: a design is handed a `Session` that evaluates recipes. `DESIGNS` has them by
name; all are called alike and return the leader.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search._space import Session, Space, holds, moved, valid, with_required
from fettle.search.auto import auto
from fettle.search.designs import Step, ablation, combinations_of, factorial, ladder, removals, steps
from fettle.search.foresight import SLOWEST, Forecast, Foreseen, Foresight, Guide


class Design(Protocol):
    """The rule that says which recipes a study tries."""

    def __call__(
        self, space: Space, session: Session, *, first: Sequence[str] = (), start: Recipe | None = None
    ) -> Trial | None:
        """Try recipes and return the best, None if none may win. `first`: techniques to try before others;
        `start`: a recipe to begin with (what it means is for the design to say)."""
        ...


DESIGNS: Mapping[str, Design] = {"auto": auto, "ladder": ladder, "factorial": factorial, "ablation": ablation}

__all__ = [
    "DESIGNS", "SLOWEST", "Design", "Forecast", "Foreseen", "Foresight", "Guide", "Session", "Space", "Step",
    "ablation", "auto", "combinations_of", "factorial", "holds", "ladder", "moved", "removals", "steps", "valid",
    "with_required",
]  # fmt: skip
