"""The settings of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fettle.recipe import Recipe
from fettle.result import Limits, limits_given
from fettle.studies import designs
from fettle.workload import AUTO

ROUNDS = 12
"""Rounds of a race. How much two processes of the same code differ is more than what so many leave open."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a study."""

    design: str = "factorial"
    techniques: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    """Levels that are varied, by technique; of techniques that are not named all, unless `only`. One level pins it."""
    only: bool = False
    """Vary no technique but those that `techniques` or `order` name."""
    arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Factors outside of the recipe: values by argument of the factory, the usual one first."""
    pythons: Sequence[str] = ()
    """Other environments, ``PATH`` or ``NAME=PATH`` of an interpreter: levels of one factor beside ours."""
    order: Sequence[str] = ()
    """Techniques in the order of the ladder's steps; those that are not named come after them as the field has them."""
    start: Recipe | None = None
    """What an ablation takes apart, a sensitivity is asked around and a ladder stands on."""
    grow_batch: float | None = None
    """For a ladder, bytes of memory up to which the batch is made larger at each step; infinite for all of a device."""
    cells: int | None = None
    """Most combinations of each workload. None: as many as the design has."""
    rounds: int = ROUNDS
    budget_s: float | None = None
    """Seconds: of a design that takes longer, the best fraction that fits. None or 0 for no limit."""
    mode: str = AUTO
    max_error: float | None = None
    """Above it a trial is marked as inaccurate; its time counts. None: the usual one, see `Limits.max_error`."""
    max_metric_drop: float | None = None
    """How far the workload's metric may fall."""
    confidence: float = 0.95
    output: Path = Path("fettle-study")
    storage: str | None = None
    """An Optuna storage that others may work at too: combinations are claimed before they are measured."""
    name: str = ""
    """Name of the study in that storage: by it workers find what they are to measure, and it has trials of its own."""
    atlas: Path | None = None
    """An atlas, from which a search knows where to begin, and whose forecasts are put beside what was found."""
    trial_timeout_s: float = 900.0
    under_load: bool = False
    polite: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget_s", self.budget_s or None)

    @property
    def limits(self) -> Limits:
        """What an accurate trial keeps."""
        return limits_given(max_error=self.max_error, max_metric_drop=self.max_metric_drop)

    @property
    def is_shared(self) -> bool:
        """Whether others may measure the same combinations; the steps of a ladder are each machine's own."""
        return self.storage is not None and self.design not in designs.STEPS
