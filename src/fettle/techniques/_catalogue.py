"""What can be asked of recipes by the catalogue: each function here asks the techniques, and knows none by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fettle.errors import UsageError
from fettle.recipe import Recipe
from fettle.techniques._base import CATALOGUE, Technique
from fettle.techniques._facts import Facts

_MOST_BUNDLES = 8


def find(name: str) -> Technique:
    """The technique of that name; KeyError when there is none."""
    for technique in CATALOGUE:
        if technique.name == name:
            return technique
    raise KeyError(name)


def changed(recipe: Recipe) -> Iterator[tuple[Technique, str]]:
    """The techniques that a recipe changes with their levels. One that comes from a file may name others: not these."""
    for technique in CATALOGUE:
        level = recipe.levels.get(technique.name, technique.default)
        if level != technique.default:
            yield technique, level


def canonical(recipe: Recipe, facts: Facts | None = None) -> Recipe:
    """The same recipe without default levels, so that equal recipes compare equal; with `facts` also without those that
    the workload has already."""
    levels = {name: level for name, level in recipe.levels.items() if level != find(name).default}
    return Recipe({n: level for n, level in levels.items() if facts is None or not find(n).is_met(level, facts)})


def idle(recipe: Recipe) -> list[str]:
    """Techniques whose levels work and change nothing beside the recipe's others."""
    return [technique.name for technique, _ in changed(recipe) if technique.is_idle(recipe)]


def known_levels() -> dict[str, list[str]]:
    """Every level that any technique has on any machine, by technique."""
    return {technique.name: list(technique.every_level()) for technique in CATALOGUE}


def respelled(levels: Mapping[str, str]) -> dict[str, str]:
    """The levels of a recipe, old spellings replaced by today's."""
    old = {technique.old_name: technique for technique in CATALOGUE if technique.old_name}
    renamed = {old[name].name: old[name].old_levels.get(level, level) for name, level in levels.items() if name in old}
    return {**{name: level for name, level in levels.items() if name not in old}, **renamed}


def check_names(recipe: Recipe) -> None:
    """Raise `UsageError` for a technique or level that is not in the catalogue on any machine."""
    known = known_levels()
    for name, level in recipe.levels.items():
        if name not in known:
            raise UsageError(f"unknown technique {name!r}: there are {', '.join(known)}")
        if level not in known[name]:
            levels = known[name]
            few = levels if len(levels) <= 20 else [*levels[:3], "...", levels[-1]]  # threads go up to 256
            raise UsageError(f"{name} has no level {level!r}: there are {', '.join(few)}")


def conflict(recipe: Recipe, facts: Facts) -> str:
    """Why `recipe` cannot work on this workload and machine, naming the level at fault; empty when it can."""
    for technique in CATALOGUE:
        level = recipe.levels.get(technique.name, technique.default)
        if facts.mode not in technique.modes:
            wrong_mode = f"it is for {' and '.join(sorted(technique.modes))} only"
            why_not = "" if level == technique.default else wrong_mode
        else:
            why_not = technique.why_not(level, facts) or technique.conflict(level, recipe, facts)
        if why_not:
            return f"{technique.name}={level}: {why_not}"
    return ""


def preconditions(facts: Facts) -> Recipe:
    """The levels without which no recipe gives right answers on this workload."""
    return canonical(Recipe({technique.name: technique.precondition(facts) for technique in CATALOGUE}))


def kind_of(recipe: Recipe) -> tuple[str, ...]:
    """What kind of execution a recipe is, see `Technique.kind`."""
    return tuple(kind for technique, level in changed(recipe) if (kind := technique.kind(level)))


def bundles(facts: Facts) -> list[Recipe]:
    """Four to eight recipes without conflict on these facts, those that promise most for their cost first."""
    techniques = [technique for technique in CATALOGUE if facts.mode in technique.modes]
    usual = {technique.name: technique.usual(facts) for technique in techniques}
    offered = [bundle for technique in techniques for bundle in technique.bundles(facts)]
    found: dict[Recipe, None] = {}
    for bundle in sorted(offered, key=lambda bundle: bundle.place):
        recipe = canonical(Recipe({**usual, **bundle.levels}))
        recipe = recipe.without(*idle(recipe))
        if not conflict(recipe, facts) and (facts.ranks == 1 or uses_ranks(recipe)):
            found[recipe] = None
    return list(found)[:_MOST_BUNDLES]


# -- what a trial of a recipe takes ----------------------------------------------------------------------------------


def environment(recipe: Recipe, facts: Facts) -> dict[str, str]:
    """The variables that a process of this recipe must start with."""
    variables: dict[str, str] = {}
    for technique, level in changed(recipe):
        variables |= technique.code(level, recipe, facts).environment
    return variables


def is_calibrated(recipe: Recipe) -> bool:
    """Whether it looks at the values of sample batches: these must not judge it."""
    return any(level in technique.calibrated for technique, level in changed(recipe))


def batch_factor(recipe: Recipe) -> int:
    """How many batches as given are one batch of this recipe."""
    return max((technique.batch_factor(level) for technique, level in changed(recipe)), default=1)


def uses_ranks(recipe: Recipe) -> bool:
    """Whether it runs on all ranks that a study may use, and not on one."""
    return any(technique.uses_ranks(level) for technique, level in changed(recipe))


def learned_types() -> dict[str, Any]:
    """What levels may learn and hand on, by key: the type it must have."""
    return {technique.learns.key: technique.learns.type for technique in CATALOGUE if technique.learns}


def handed_on(recipe: Recipe, learned: Mapping[str, Any]) -> dict[str, Any]:
    """That part of what was `learned` which the levels of this recipe go by."""
    keys = [technique.learns.key for technique, level in changed(recipe)
            if technique.learns and level in technique.learns.levels]  # fmt: skip
    return {key: learned[key] for key in keys if learned.get(key)}
