"""The space of valid recipes: the levels that can be used here, what cannot stand together, and the moves in it: change
one technique to one level, and whatever that entails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Protocol

from fettle.measure import Trial
from fettle.recipe import Recipe

Level = tuple[str, str]
"""A technique and the level that it is set to; the default level drops it."""
_TOGETHER = {1: 6, 2: 3, 3: 2}
"""Recipes raced together, by what the most expensive costs to start: the fewer, the more is known for the next."""


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
    is_idle: Callable[[Recipe], bool] = lambda recipe: False
    """Whether a level of a recipe changes nothing beside the others; a conflict, too."""
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


def with_required(space: Space, recipe: Recipe) -> Recipe:
    """The recipe with the preconditions in it; they override. Default levels are left out."""
    levels = {**recipe.levels, **space.required.levels}
    return Recipe({name: level for name, level in levels.items() if level != space.default(name)})


def valid(space: Space, recipe: Recipe) -> bool:
    """Whether the recipe can work."""
    return not space.conflict(recipe)


def holds(space: Space, recipe: Recipe) -> bool:
    """Whether the recipe has all that is required and no level beyond the choices; the workload as given always may
    stand."""
    required, choices = space.required.levels, space.choices
    may_be = all(level in (*choices.get(name, ()), required.get(name)) for name, level in recipe.levels.items())
    return may_be and (not recipe.levels or with_required(space, recipe) == recipe)


def moved(space: Space, recipe: Recipe, technique: str, level: str) -> Recipe | None:
    """The recipe with `technique` at `level`, or None where that cannot be had.

    What the level needs comes along unless another level of it is there already. What conflicts with it gives way:
    so exclusive techniques are exchanged in one move, never by a detour through something slower.
    """
    recipe = with_required(space, recipe)
    if technique in space.required.levels:
        return None
    if level == space.default(technique):
        smaller = recipe.without(technique, *_dependents(space, technique))
        return smaller if valid(space, smaller) else None
    # First keep the level of a needed technique that is there; if that cannot work, take the level that is asked for.
    for keep in (True, False):
        bigger = recipe.with_levels(**_closure(space, technique, level, recipe, keep))
        if holds(space, bigger) and valid(space, bigger):
            return bigger
    return _exchanged(space, recipe, technique, level)


def _exchanged(space: Space, recipe: Recipe, technique: str, level: str) -> Recipe | None:
    """Add the level and drop as little as makes it valid: one technique, else two, else all that is not required."""
    keep = {technique, *_closure(space, technique, level, Recipe(), True), *space.required.levels}
    loose = [name for name in recipe.levels if name not in keep]
    for size in sorted({1, 2, len(loose)}):
        for names in combinations(loose, size):
            removed = {other for name in names for other in (name, *_dependents(space, name))} - {technique}
            smaller = recipe.without(*removed)
            bigger = smaller.with_levels(**_closure(space, technique, level, smaller, True))
            if holds(space, bigger) and valid(space, bigger):
                return bigger
    return None


def _closure(space: Space, technique: str, level: str, recipe: Recipe, keep: bool) -> dict[str, str]:
    """The level with all it needs, directly or not."""
    levels = {technique: level}
    waiting = [technique]
    while waiting:
        for name, needed in space.needs.get(waiting.pop(), {}).items():
            if name not in levels and name in space.choices:
                levels[name] = recipe.levels.get(name, needed) if keep else needed
                waiting.append(name)
    return levels


def _dependents(space: Space, technique: str) -> list[str]:
    """Techniques that cannot stand without this one."""
    found: list[str] = []
    waiting = [technique]
    while waiting:
        name = waiting.pop()
        for other, needs in space.needs.items():
            if name in needs and other not in found and other not in space.required.levels:
                found.append(other)
                waiting.append(other)
    return found


def batches(space: Space, recipes: Sequence[Recipe]) -> Iterator[list[Recipe]]:
    """The recipes in groups to be raced together, cheap ones first, each with its like."""
    unique = list(dict.fromkeys(recipes))
    for cost in sorted({space.cost(recipe) for recipe in unique}):
        alike = [recipe for recipe in unique if space.cost(recipe) == cost]
        size = _TOGETHER.get(cost, 2)
        yield from (alike[begin : begin + size] for begin in range(0, len(alike), size))
