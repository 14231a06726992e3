"""The table of a study: one row an experiment, with the level of each factor and what came out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MACHINE = "machine"
"""The factor whose levels are kinds of machines."""


@dataclass(frozen=True)
class Response:
    """What came out of an experiment. All are analysed as logarithms, so that effects are ratios."""

    name: str
    larger_is_better: bool = False
    better: str = "better"
    """What a ratio above 1 is called: ``faster``, ``less memory``."""


@dataclass(frozen=True)
class Experiment:
    """One row."""

    levels: Mapping[str, str]
    """Levels by factor."""
    values: Mapping[str, float]
    """By response; what is missing or not a positive number is not an observation of it."""
    group: str = ""
    """The model it was made on. Groups are analysed apart."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """By response: standard error of its logarithm, where it was measured."""
    reason: str = ""
    """Why it failed."""
    rounds: Sequence[tuple[int, float]] = ()
    """The first response by round of its race."""
    machine: str = ""
    """The kind of machine that it was made on,"""
    host: str = ""
    """and the name of the very one, as far as they are known."""

    def value(self, response: str) -> float | None:
        """The response, where it is a number that has a logarithm."""
        value = self.values.get(response, math.nan)
        return value if math.isfinite(value) and value > 0 else None


@dataclass(frozen=True)
class Table:
    """Experiments with their factors."""

    factors: Mapping[str, tuple[str, ...]]
    """Levels by factor. The first is how it was given: effects are against it."""
    responses: tuple[Response, ...]
    experiments: tuple[Experiment, ...]
    apart: frozenset[str] = frozenset()
    """Factors whose levels did not run side by side (a batch size: another workload, another race). What they bring by
    themselves has no interval; what they change of the others has."""
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> list[str]:
        """In the order of their first experiments."""
        return list(dict.fromkeys(experiment.group for experiment in self.experiments))

    def of(self, group: str) -> list[Experiment]:
        return [experiment for experiment in self.experiments if experiment.group == group]

    def label(self, experiment: Experiment) -> str:
        """What differs from how it was given: ``precision=bf16 batch=4``."""
        levels = experiment.levels
        changed = [f"{name}={levels[name]}" for name, known in self.factors.items() if levels[name] != known[0]]
        return " ".join(changed) or "as given"
