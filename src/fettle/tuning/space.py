"""The space of recipes of one workload: the levels that work here and that the user allows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fettle.errors import UsageError
from fettle.recipe import Recipe
from fettle.result import LeftOut
from fettle.search import Space
from fettle.techniques import CATALOGUE, Facts, Technique, bundles, canonical, conflict, find, idle, preconditions


def space_for(
    facts: Facts,
    allowed: Mapping[str, Sequence[str]],
    ruled_out: Callable[[Recipe], str] = lambda recipe: "",
    cost: Callable[[Recipe], int] | None = None,
) -> tuple[Space, list[LeftOut]]:
    """The space of recipes that can work here and that the user allows, and what was left out with the rule.

    `ruled_out` knows of more recipes that cannot work, beyond what the catalogue's own rules say; `cost` is
    `Space.cost` where that is not what the levels alone cost.
    """
    choices: dict[str, tuple[str, ...]] = {}
    left_out: list[LeftOut] = []
    required = dict(preconditions(facts).levels)
    for technique in CATALOGUE:
        usable = [technique.default]
        if facts.mode not in technique.modes:
            if technique.name in allowed:
                raise UsageError(f"the technique {technique.name} is for {' and '.join(technique.modes)} only")
            continue
        for level in technique.levels(facts):
            permitted = technique.name not in allowed or level.name in allowed[technique.name]
            if level.name == technique.default:
                continue
            if level.why_not:
                left_out.append(LeftOut(technique.name, level.name, level.why_not))
            elif not permitted:
                left_out.append(LeftOut(technique.name, level.name, "not among the levels that are allowed"))
            else:
                usable.append(level.name)
                if why := ruled_out(Recipe({technique.name: level.name})):
                    left_out.append(LeftOut(technique.name, level.name, f"{why}, unless another technique saves it"))
        if technique.name in allowed:
            _pin(technique, allowed[technique.name], facts, usable, required)
        choices[technique.name] = tuple(usable)
    useful = [
        bundle for bundle in bundles(facts) if all(level in choices[name] for name, level in bundle.levels.items())
    ]

    def why_not(recipe: Recipe) -> str:
        for name, level in required.items():
            if recipe.levels and recipe.levels.get(name, find(name).default) != level:
                return f"{name}={level} is required"
        for name in idle(recipe):
            if name not in required:
                return f"{name}={recipe.levels[name]} changes nothing beside the rest"
        return conflict(recipe, facts) or ruled_out(recipe)

    space = Space(
        choices=choices,
        conflict=why_not,
        needs={technique.name: technique.needs for technique in CATALOGUE if technique.needs},
        required=canonical(Recipe(required)),
        cost=cost or level_cost,
        bundles=[canonical(Recipe({**recipe.levels, **required})) for recipe in useful],
    )
    return space, left_out


def level_cost(recipe: Recipe) -> int:
    """What a recipe costs to start: 1 seconds, 2 tens of seconds, 3 minutes."""
    return max((find(name).level_cost(level) for name, level in recipe.levels.items()), default=1)


def _pin(
    technique: Technique, levels: Sequence[str], facts: Facts, usable: list[str], required: dict[str, str]
) -> None:
    """Take the user's choice for one technique: it is an error when none of the levels can be had; a lone one is
    required."""
    name, default = technique.name, technique.default
    usable += [level for level in levels if level not in usable and not technique.why_not(level, facts)]
    possible = [level for level in levels if level in usable]
    if not possible:
        raise UsageError(f"{name}={levels[0]} cannot be had here: {technique.why_not(levels[0], facts)}")
    if len(possible) == 1:
        required[name] = possible[0]
        usable[:] = list(dict.fromkeys([default, possible[0]]))
    elif default not in possible:
        required.setdefault(name, possible[0])
