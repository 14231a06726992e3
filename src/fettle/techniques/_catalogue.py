"""What can be asked of recipes by the catalogue: each function here asks the techniques, and knows none by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from fettle.errors import UsageError
from fettle.procs.interpreter import OURS
from fettle.recipe import Recipe, factor_name, technique_and_part
from fettle.techniques._base import BOTH, CATALOGUE, Code, Level, Technique
from fettle.techniques._facts import Facts

_MOST_BUNDLES = 8


def find(name: str) -> Technique:
    """The technique of that name, which may be that of a factor; KeyError when there is none."""
    plain, _ = technique_and_part(name)
    for technique in (*CATALOGUE, PYTHON):
        if technique.name == plain:
            return technique
    raise KeyError(name)


def changed(recipe: Recipe) -> Iterator[tuple[Technique, str]]:
    """The techniques that a recipe changes with their levels, part by part in a pipeline. One that comes from a file
    may name others: not these."""
    for _, technique, level in changed_by_part(recipe):
        yield technique, level


def changed_by_part(recipe: Recipe) -> Iterator[tuple[str, Technique, str]]:
    """The same with the part of a pipeline first; empty for the whole call."""
    for part in ("", *recipe.parts):
        for technique in CATALOGUE:
            level = recipe.levels.get(factor_name(technique.name, part), technique.default)
            if level != technique.default:
                yield part, technique, level


def codes(recipe: Recipe, facts: Facts) -> Iterator[tuple[str, str, Code]]:
    """The part of a pipeline, a title and the lines of all that a recipe changes, in the same order."""
    for part, technique, level in changed_by_part(recipe):
        own, beside = (facts.parts[part], recipe.of_part(part)) if part else (facts, recipe)
        yield part, f"{technique.title}: {level}", technique.code(level, beside, replace(own, learned=facts.learned))


def factors(facts: Facts) -> Iterator[tuple[str, Technique, Facts]]:
    """What a recipe may set here: the name, the technique, and the facts that it goes by.

    In a pipeline the techniques of a module are there once for each part."""
    for technique in CATALOGUE:
        if facts.parts and technique.of_module:
            for part, own in facts.parts.items():
                yield factor_name(technique.name, part), technique, own
        else:
            yield technique.name, technique, facts


def canonical(recipe: Recipe, facts: Facts | None = None) -> Recipe:
    """The same recipe without default levels, so that equal recipes compare equal; with `facts` also without those that
    the workload has already."""
    levels = {name: level for name, level in recipe.levels.items() if level != find(name).default}
    if facts is not None:
        seen = {name: facts.parts.get(technique_and_part(name)[1], facts) for name in levels}
        levels = {name: level for name, level in levels.items() if not find(name).is_met(level, seen[name])}
    return Recipe(levels)


def for_parts(levels: Mapping[str, str], facts: Facts) -> dict[str, str]:
    """Levels in which a technique of a module, named alone, is meant for every part of a pipeline that can have it."""
    found = {}
    for name, technique, own in factors(facts):
        level = levels.get(name, levels.get(technique.name))
        if level is not None and (name == technique.name or name in levels or not technique.why_not(level, own)):
            found[name] = level
    return found


def needs_of(facts: Facts) -> dict[str, dict[str, str]]:
    """By factor: levels of others that it cannot do without, in the same part where there are parts, and that can be
    had here: weights in 16 bits as given need no conversion."""
    found: dict[str, dict[str, str]] = {}
    for name, technique, own in factors(facts):
        for other, level in technique.needs.items():
            of = own if find(other).of_module else facts
            if not find(other).why_not(level, of):
                found.setdefault(name, {})[factor_name(other, of.part)] = level
    return found


def idle(recipe: Recipe) -> list[str]:
    """Techniques whose levels work and change nothing beside the recipe's others."""
    return [
        factor_name(technique.name, part)
        for part, technique, _ in changed_by_part(recipe)
        if technique.is_idle(recipe.of_part(part) if part else recipe)
    ]


def only_saving(recipe: Recipe) -> list[str]:
    """Techniques whose levels only save memory beside the recipe's others."""
    return [
        factor_name(technique.name, part)
        for part, technique, level in changed_by_part(recipe)
        if technique.only_saves_memory(level, recipe.of_part(part) if part else recipe)
    ]


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
    for factor, level in recipe.levels.items():
        name, part = technique_and_part(factor)
        if name not in known:
            raise UsageError(f"unknown technique {name[:60]!r}: there are {', '.join(known)}")
        if factor_name(name, part) != factor:
            raise UsageError(f"{factor!r} names no part of a pipeline: write {factor_name(name, part or 'PART')}")
        if part and not find(name).of_module:
            raise UsageError(f"{factor}: {name} is set for the whole call, not for one part of it")
        if level not in known[name]:
            levels = known[name]
            few = levels if len(levels) <= 20 else [*levels[:3], "...", levels[-1]]  # threads go up to 256
            raise UsageError(f"{name} has no level {level[:60]!r}: there are {', '.join(few)}")


def conflict(recipe: Recipe, facts: Facts) -> str:
    """Why `recipe` cannot work on this workload and machine, naming the level at fault; empty when it can."""
    if unknown := [part for part in recipe.parts if part not in facts.parts]:
        there_are = f"there are {', '.join(facts.parts)}" if facts.parts else "the workload names none"
        return f"there is no part {unknown[0]!r}: {there_are}"
    if facts.parts:
        for name in recipe.levels:
            if find(name).of_module and "[" not in name:
                return f"{name} is set for each part of a pipeline: {name}[{next(iter(facts.parts))}]"
    seen = {part: recipe.of_part(part) for part in facts.parts} if recipe.parts else {}
    for name, technique, own in factors(facts):
        level, applies = recipe.levels.get(name, technique.default), facts.mode in technique.modes
        if level == technique.default and (not applies or technique.precondition(own) == level):
            continue
        if applies:
            why_not = technique.why_not(level, own) or technique.conflict(level, seen.get(own.part, recipe), own)
        else:
            why_not = f"it is for {' and '.join(sorted(technique.modes))} only"
        if why_not:
            return f"{name}={level}: {why_not}"
    return ""


def preconditions(facts: Facts) -> Recipe:
    """The levels without which no recipe gives right answers on this workload."""
    return canonical(Recipe({name: technique.precondition(own) for name, technique, own in factors(facts)}))


def keeps_memory(facts: Facts) -> dict[str, str]:
    """The levels under which what one call frees is kept for the next."""
    levels = {technique: technique.keeps_memory(facts) for technique in CATALOGUE}
    return {technique.name: level for technique, level in levels.items() if level != technique.default}


def kind_of(recipe: Recipe) -> tuple[str, ...]:
    """What kind of execution a recipe is, see `Technique.kind`."""
    return tuple(kind for technique, level in changed(recipe) if (kind := technique.kind(level)))


def bundles(facts: Facts) -> list[Recipe]:
    """Four to eight recipes without conflict on these facts, those that promise most for their cost first."""
    if facts.parts:
        return _bundles_of_parts(facts)
    techniques = [technique for technique in CATALOGUE if facts.mode in technique.modes]
    usual = _usual(facts)
    offered = [bundle for technique in techniques for bundle in technique.bundles(facts)]
    found: dict[Recipe, None] = {}
    for bundle in sorted(offered, key=lambda bundle: bundle.place):
        recipe = canonical(Recipe({**usual, **bundle.levels}), facts)
        recipe = recipe.without(*idle(recipe))
        if not conflict(recipe, facts) and (facts.ranks == 1 or facts.mode == "inference" or uses_ranks(recipe)):
            found[recipe] = None
    return list(found)[:_MOST_BUNDLES]


def _usual(facts: Facts) -> dict[str, str]:
    """By factor the level that belongs to every bundle here; the default where that cannot be used."""
    found = {}
    for name, technique, own in factors(facts):
        if facts.mode in technique.modes:
            level = technique.usual(own)
            found[name] = technique.default if technique.why_not(level, own) else level
    return found


def _bundles_of_parts(facts: Facts) -> list[Recipe]:
    """The bundles of a pipeline: the first of every part together, then the others of the part that takes longest
    beside the first of the others. The fourth is the second of every part together, the fifth the first of that part
    alone: a part that another runtime cannot run spoils whatever it is in."""
    usual = _usual(facts)
    offered = {part: bundles(own) for part, own in facts.parts.items()}

    def joined(chosen: Mapping[str, Recipe]) -> Recipe:
        levels = {name: level for name, level in usual.items() if technique_and_part(name)[1] not in chosen}
        for part, bundle in chosen.items():
            levels |= {factor_name(n, part): level for n, level in bundle.levels.items() if find(n).of_module}
        return canonical(Recipe(levels), facts)

    longest = next(iter(offered))
    first = {part: found[0] for part, found in offered.items() if found}
    chosen = [{**first, longest: bundle} for bundle in offered[longest]] or [first]
    chosen.insert(3, {part: found[1] for part, found in offered.items() if len(found) > 1})
    chosen.insert(4, {part: bundle for part, bundle in first.items() if part == longest})
    recipes = [recipe.without(*idle(recipe)) for recipe in map(joined, chosen)]
    return list(dict.fromkeys(recipe for recipe in recipes if not conflict(recipe, facts)))[:_MOST_BUNDLES]


# -- what a trial of a recipe takes ----------------------------------------------------------------------------------


def environment(recipe: Recipe, facts: Facts) -> dict[str, str]:
    """The variables that a process of this recipe must start with."""
    return {name: value for *_, code in codes(recipe, facts) for name, value in code.environment.items()}


def is_calibrated(recipe: Recipe) -> bool:
    """Whether it looks at the values of sample batches: these must not judge it."""
    return any(level in technique.calibrated for technique, level in changed(recipe))


_COMPILES = ("torch._inductor.compile_fx", "fettle.techniques._first_compile")


def imports_of(recipe: Recipe) -> tuple[str, ...]:
    """Modules that do what its lines do for seconds before they begin with the model, and that start no thread."""
    levels = list(changed(recipe))
    compiles = any(level in technique.compiles for technique, level in levels)
    exports = any(level in technique.exports for technique, level in levels)
    return (("torch._dynamo",) if compiles or exports else ()) + (_COMPILES if compiles else ())


def batch_factor(recipe: Recipe) -> int:
    """How many batches as given are one batch of this recipe."""
    return max((technique.batch_factor(level) for technique, level in changed(recipe)), default=1)


def run_by(recipe: Recipe, packages: Mapping[str, str]) -> dict[str, str]:
    """Those of `packages`, versions by name, that the levels of a recipe run by; those of another environment belong to
    its name."""
    if PYTHON.name in recipe.levels:
        return {}
    names = (name for technique, level in changed(recipe) for name in technique.packages_of(level))
    return {name: packages[name] for name in names if name in packages}


def uses_ranks(recipe: Recipe) -> bool:
    """Whether it runs on all ranks that a study may use, and not on one."""
    return any(technique.uses_ranks(level) for technique, level in changed(recipe))


def learned_types(names: Iterable[str]) -> dict[str, Any]:
    """Of `names` those under which levels hand on what they learned: the type that it must have."""
    kinds = {technique.learns.key: technique.learns.type for technique in CATALOGUE if technique.learns}
    return {name: kinds[key] for name in names if (key := technique_and_part(name)[0]) in kinds}


def handed_on(recipe: Recipe, learned: Mapping[str, Any]) -> dict[str, Any]:
    """That part of what was `learned` which the levels of this recipe go by."""
    keys = [
        factor_name(technique.learns.key, part) for part, technique, level in changed_by_part(recipe)
        if technique.learns and level in technique.learns.levels
    ]  # fmt: skip
    return {key: learned[key] for key in keys if learned.get(key)}


class _Python(Technique):
    """The environment that a recipe runs in: a factor of a study, and nothing that could be applied to a model. It is
    not in the catalogue, which is what a recipe may name on any machine."""

    name = "python"
    order = 0
    modes = BOTH
    rung = 0
    title = "Environment"
    default = OURS

    def levels(self, facts: Facts) -> list[Level]:
        return [Level(self.default, "the interpreter that fettle runs by")]


PYTHON = _Python()
"""Its levels are those that a study is given: names of `fettle.procs.interpreter.Interpreter`."""
