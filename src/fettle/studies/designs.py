"""Which combinations a study measures, how many they are and how long that takes, before they are measured."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from fettle.errors import UsageError
from fettle.recipe import Recipe
from fettle.search import Space, combinations_of, moved, valid, with_required
from fettle.studies.model import LEAST_FREEDOM
from fettle.units import count_text, seconds_text

LONG_S = 3600.0
"""A study that takes longer is begun when somebody has agreed to that."""


@dataclass(frozen=True)
class Part:
    """One workload."""

    name: str
    cells: int
    """Combinations; of a ladder or an ablation about how many."""
    known: int
    """How many of them are measured already."""
    seconds: float
    """What the rest is expected to take."""


@dataclass(frozen=True)
class Plan:
    """All workloads of a study."""

    design: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def is_long(self) -> bool:
        """Whether somebody should agree first."""
        return self.seconds > LONG_S

    def __str__(self) -> str:
        cells, known = (sum(getattr(part, name) for part in self.parts) for name in ("cells", "known"))
        many = count_text(cells, "combination") + (f" of {len(self.parts)} workloads" if len(self.parts) > 1 else "")
        about = "about " if self.design in STEPS else ""
        measured = f", {known} of them measured already" if known else ""
        return f"{self.design}: {about}{many}{measured}; the rest takes about {seconds_text(self.seconds)}"


STEPS = ("ladder", "ablation")
"""Designs whose next recipe depends on what the ones before showed."""
MOST = 20_000
"""Combinations that are written out; of a space that has more a random part stands for the whole."""


def cells(design: str, space: Space, start: Recipe, most: int | None = None, *, least: int = 2) -> list[Recipe]:
    """The recipes of a design, the workload as given first, each with what every recipe must have; no more than `most`.

    `start` is what the sensitivity to each level is asked around. Any beginning of a fraction is itself balanced.
    Raises `UsageError` where there are fewer than `least`.
    """
    recipes = [Recipe(), *(recipe for recipe in _DESIGNS[design](space, start, most) if recipe.levels)]
    recipes = list(dict.fromkeys(recipes))[:most]
    if len(recipes) < least:
        raise UsageError("there is nothing to vary: no technique that may vary has a second level here")
    return recipes


def fewer(design: str, space: Space, cells: Sequence[Recipe], most: int) -> list[Recipe]:
    """No more than `most` of a design's recipes, the workload as given first; of many combinations a balanced
    fraction."""
    if design in ("factorial", "fraction"):
        cells = list(dict.fromkeys([Recipe(), *combinations_of(space, most, cells)]))
    return list(cells[:most])


def beginning(space: Space, start: Recipe) -> Recipe:
    """The recipe that a study is made about, with what every recipe must have. Raises `UsageError` for one that cannot
    work here."""
    whole = with_required(space, start)
    if not valid(space, whole):
        raise UsageError(f"the recipe {whole} cannot work here: {space.conflict(whole)}")
    return whole


def about(design: str, space: Space, start: Recipe | None) -> int:
    """About how many recipes a ladder or an ablation measures: the levels, or what the recipe has of them."""
    if design == "ablation" and start is not None:
        return 2 + len(start.levels)
    return 2 + sum(len(levels) - 1 for levels in space.choices.values())


def _factorial(space: Space, start: Recipe, most: int | None) -> list[Recipe]:
    """Every valid combination, in random order: what changes while a study runs must not look like a factor."""
    whole = combinations_of(space, MOST)
    if most is not None and most < len(whole):
        return combinations_of(space, most, whole)  # a fraction, which is balanced
    random.Random(0).shuffle(whole)
    return whole


def _fraction(space: Space, start: Recipe, most: int | None) -> list[Recipe]:
    """As few combinations as tell main effects and two-way interactions, and how sure they are."""
    counts = [len(levels) - 1 for levels in space.choices.values()]
    columns = 1 + sum(counts) + sum(one * two for one, two in combinations(counts, 2))
    return combinations_of(space, most or min(MOST, columns + 2 * LEAST_FREEDOM))


def _pairs(space: Space, start: Recipe, most: int | None) -> list[Recipe]:
    """Each level alone, and each two together: interactions about the workload as given, with nothing averaged."""
    alone = _sensitivity(space, Recipe(), most)
    both = []
    for one, two in combinations(_levels(space), 2):
        first = moved(space, Recipe(), *one) if one[0] != two[0] else None
        recipe = moved(space, first, *two) if first is not None else None
        if recipe is not None and {one, two} <= set(recipe.levels.items()):
            both.append(recipe)
    random.Random(0).shuffle(both)
    return alone + both


def _sensitivity(space: Space, start: Recipe, most: int | None) -> list[Recipe]:
    """One level changed at a time, about the workload as given or a recipe."""
    middle = beginning(space, start)
    about = (moved(space, middle, *level) for level in _levels(space))
    return [middle, *(recipe for recipe in about if recipe is not None)]


def _levels(space: Space) -> list[tuple[str, str]]:
    return [(name, level) for name, levels in space.choices.items() for level in levels[1:]]


_DESIGNS: Mapping[str, Callable[[Space, Recipe, int | None], Sequence[Recipe]]] = {
    "factorial": _factorial,
    "fraction": _fraction,
    "pairs": _pairs,
    "sensitivity": _sensitivity,
}
NAMES = ("ladder", "factorial", "fraction", "ablation", "pairs", "sensitivity")


def check(design: str, most: int | None) -> None:
    """Raise `UsageError` for an unknown design, and for an impossible number of combinations."""
    if design not in NAMES:
        raise UsageError(f"unknown design {design!r}: there are {', '.join(NAMES)}")
    if most is not None and (most < 2 or design in STEPS):
        why = f"`design={design}` goes step by step" if design in STEPS else "a study needs at least two combinations"
        raise UsageError(f"`cells={most}`: {why}")


def fitting(seconds: Sequence[float], budget_s: float) -> int:
    """How many of these, in their order, fit into a budget."""
    spent = 0.0
    for count, each in enumerate(seconds):
        spent += each
        if spent > budget_s or math.isnan(spent):
            return count
    return len(seconds)
