"""Moves in the space of recipes: change one technique to one level, and whatever that entails."""

from __future__ import annotations

from itertools import combinations

from fettle.recipe import Recipe
from fettle.search._space import Space


def with_required(space: Space, recipe: Recipe) -> Recipe:
    """The recipe with the preconditions in it; they override. Default levels are left out."""
    levels = {**recipe.levels, **space.required.levels}
    return Recipe({name: level for name, level in levels.items() if level != space.default(name)})


def valid(space: Space, recipe: Recipe) -> bool:
    """Whether the recipe can work."""
    return not space.conflict(recipe)


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
        if with_required(space, bigger) == bigger and valid(space, bigger):
            return bigger
    return _exchanged(space, recipe, technique, level)


def _exchanged(space: Space, recipe: Recipe, technique: str, level: str) -> Recipe | None:
    """Add the level and drop as little as makes it valid: one technique, else two, else all that is not required."""
    keep = {technique, *_closure(space, technique, level, Recipe(), True), *space.required.levels}
    loose = [name for name in recipe.levels if name not in keep]
    for size in sorted({1, 2, len(loose)}):
        for names in combinations(loose, size):
            gone = {other for name in names for other in (name, *_dependents(space, name))} - {technique}
            smaller = recipe.without(*gone)
            bigger = smaller.with_levels(**_closure(space, technique, level, smaller, True))
            if with_required(space, bigger) == bigger and valid(space, bigger):
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
