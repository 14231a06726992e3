"""The space of valid recipes: the levels that can be used here, and what cannot stand together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fettle.measure import Trial
from fettle.recipe import Recipe


@dataclass(frozen=True)
class Space:
    """What a design may try. Levels in `choices` exclude what the rules or the user left out."""

    choices: Mapping[str, tuple[str, ...]]
    """Levels by technique in the order to try them, the default level first; techniques in catalogue order."""
    conflict: Callable[[Recipe], str]
    """Why a recipe cannot work, or an empty string."""
    needs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By technique: levels of others that it cannot do without."""
    required: Recipe = field(default_factory=Recipe)
    """Levels in every recipe but the baseline: preconditions (eval mode) and what the user pinned."""
    cost: Callable[[Recipe], int] = lambda recipe: 1
    """What a trial costs to start: 1 seconds, 2 tens of seconds, 3 minutes."""
    bundles: Sequence[Recipe] = ()
    """Combinations known to work well together on such a machine, to be tried early."""

    def default(self, technique: str) -> str:
        """The level that stands for the workload as it was given; empty for a technique that is not in the space."""
        return self.choices.get(technique, ("",))[0]


class Session(Protocol):
    """What a design is given to measure with. Trials are remembered: asking again costs nothing."""

    def measure(self, recipes: Sequence[Recipe]) -> list[Trial]:
        """Race the recipes side by side with the baseline; one trial each, in order. Trials that were measured
        before (also by an earlier run of the study) are returned as they are. When the budget is spent, those not
        yet begun are left out of the answer."""
        ...

    def score(self, trial: Trial) -> float:
        """The goal as a number, smaller is better, infinite for a trial that may not win. For time goals it is the
        negative log of the speed-up."""
        ...

    def noise(self, one: Trial, other: Trial) -> float:
        """Half the confidence interval of the difference of two scores; 0 where scores have none."""
        ...

    def spent(self) -> bool:
        """Whether the budget is used up."""
        ...
