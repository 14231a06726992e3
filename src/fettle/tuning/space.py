"""The space of recipes of one workload: the levels that work here and that the user allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fettle.errors import UsageError
from fettle.recipe import Recipe, technique_and_part
from fettle.result import LeftOut
from fettle.search import Space
from fettle.techniques import (
    Facts,
    Technique,
    bundles,
    canonical,
    conflict,
    factors,
    find,
    idle,
    needs_of,
    only_saving,
    preconditions,
)

_ONLY_SAVES = "only saves memory, which is neither the goal nor limited"
_LEAST_SHARE = 0.01
"""A part of a pipeline that takes less of the call's time is not tuned: all of it would hardly be measured."""


def space_for(
    facts: Facts,
    allowed: Mapping[str, Sequence[str]],
    ruled_out: Callable[[Recipe], str] = lambda recipe: "",
    cost: Callable[[Recipe], int] | None = None,
    memory_counts: bool = False,
) -> tuple[Space, list[LeftOut]]:
    """The space of recipes that can work here and that the user allows, and what was left out with the rule.

    `ruled_out` knows of more recipes that cannot work, beyond what the catalogue's own rules say; `cost` is
    `Space.cost` where that is not what the levels alone cost. `memory_counts` where it is the goal or limited.
    """
    choices: dict[str, tuple[str, ...]] = {}
    left_out: list[LeftOut] = []
    required = dict(preconditions(facts).levels)
    allowed = _by_factor(allowed, facts)
    offered = bundles(facts)
    for name, technique, own in factors(facts):
        if facts.mode not in technique.modes:
            if name in allowed:
                raise UsageError(f"the technique {name} is for {' and '.join(technique.modes)} only")
            continue
        usable = [technique.default]
        beside = [] if name in allowed else [Recipe(), *offered]
        for level in technique.levels(own):
            if level.name == technique.default:
                continue
            saves = [technique.only_saves_memory(level.name, recipe) for recipe in beside]
            why = level.why_not or _useless(own, saves, memory_counts)
            if not why and name in allowed and level.name not in allowed[name]:
                why = "not among the levels that are allowed"
            if not why:
                usable.append(level.name)
                if unsaved := ruled_out(Recipe({name: level.name})):
                    why = f"{unsaved}, unless another technique saves it"
            if why:
                left_out.append(LeftOut(name, level.name, why))
        if name in allowed:
            _pin(name, technique, allowed[name], own, usable, required)
        choices[name] = tuple(usable)

    def idle_in(recipe: Recipe) -> list[str]:
        return [name for name in idle(recipe) if name not in required]

    def why_not(recipe: Recipe) -> str:
        for name, level in required.items():
            if recipe.levels and recipe.levels.get(name, find(name).default) != level:
                return f"{name}={level} is required"
        for name in idle_in(recipe):
            return f"{name}={recipe.levels[name]} changes nothing beside the rest"
        for name in () if memory_counts else only_saving(recipe):
            if name not in allowed:
                return f"{name}={recipe.levels[name]} {_ONLY_SAVES}"
        return conflict(recipe, facts) or ruled_out(recipe)

    space = Space(
        choices=choices,
        conflict=why_not,
        needs=needs_of(facts),
        required=canonical(Recipe(required)),
        cost=cost or level_cost,
        is_idle=lambda recipe: bool(idle_in(recipe)),
        bundles=[canonical(Recipe({**recipe.levels, **required})) for recipe in _possible(offered, choices, facts)],
    )
    return space, left_out


def _possible(offered: Iterable[Recipe], choices: Mapping[str, Sequence[str]], facts: Facts) -> list[Recipe]:
    """The bundles whose levels are all in the space; in a pipeline without those of parts that have no choice."""
    able = [
        Recipe({name: level for name, level in bundle.levels.items() if len(choices[name]) > 1 or not facts.parts})
        for bundle in offered
    ]
    return [one for one in dict.fromkeys(able) if all(level in choices[name] for name, level in one.levels.items())]


def level_cost(recipe: Recipe) -> int:
    """What a recipe costs to start: 1 seconds, 2 tens of seconds, 3 minutes."""
    return max((find(name).level_cost(level) for name, level in recipe.levels.items()), default=1)


def _useless(facts: Facts, saves: Sequence[bool], memory_counts: bool) -> str:
    """Why a level is not worth a trial for a part of a pipeline or a whole workload; empty where it is. `saves`:
    whether it only saves memory, alone and beside each bundle; empty where the user named it."""
    if any(saves[:1]):
        return f"it {_ONLY_SAVES}" if all(saves) and not memory_counts else ""
    return f"the part takes {facts.share:.2%} of the call's time" if saves and facts.share < _LEAST_SHARE else ""


def _by_factor(allowed: Mapping[str, Sequence[str]], facts: Facts) -> Mapping[str, Sequence[str]]:
    """The user's choice by factor: a technique named alone is meant for every part that can have one of its levels.

    Raises `UsageError` for a part that there is not."""
    choices: dict[str, Sequence[str]] = {}
    for name, levels in allowed.items():
        technique, part = technique_and_part(name)
        if part and part not in facts.parts:
            raise UsageError(conflict(Recipe({name: levels[0]}), facts))
        own = [(factor, kind, one) for factor, kind, one in factors(facts) if kind.name == technique]
        able = [factor for factor, kind, one in own if any(not kind.why_not(level, one) for level in levels)]
        for factor in [name] if part or not facts.parts else able or [own[0][0]]:
            choices.setdefault(factor, levels)
    return choices


def _pin(
    name: str, technique: Technique, levels: Sequence[str], facts: Facts, usable: list[str], required: dict[str, str]
) -> None:
    """Take the user's choice for one technique: it is an error when none of the levels can be had; a lone one is
    required."""
    default = technique.default
    usable += [level for level in levels if level not in usable and not technique.why_not(level, facts)]
    possible = [level for level in levels if level in usable]
    if not possible:
        raise UsageError(f"{name}={levels[0]} cannot be used here: {technique.why_not(levels[0], facts)}")
    if len(possible) == 1:
        required[name] = possible[0]
        usable[:] = list(dict.fromkeys([default, possible[0]]))
    elif default not in possible:
        required.setdefault(name, possible[0])
