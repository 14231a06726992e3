"""The designs that follow a plan: techniques added one at a time in the usual order (ladder), or taken away one at a
time (ablation), and what each brings; every valid combination, or a balanced fraction of them (factorial)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, islice, product

import numpy as np
import numpy.typing as npt

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search._evidence import Evidence
from fettle.search._space import Level, Session, Space, moved, valid, with_required
from fettle.search.auto import auto


@dataclass(frozen=True)
class Step:
    """One recipe tried beside the one before it: a rung that was added, or a level that was taken away."""

    label: str
    """What changed, for example ``precision=bf16``; the first is ``as given``."""
    trial: Trial
    kept: bool
    """Whether it is part of what comes next."""


def ladder(space: Space, session: Session) -> Trial | None:
    """Climb the ladder and return the best of all trials; `steps` has what each rung brought."""
    evidence = Evidence(space, session)
    for _ in _climb(evidence):
        pass
    return evidence.leader()


def steps(space: Space, session: Session, *, start: Recipe | None = None) -> Iterator[Step]:
    """The rungs, each as soon as it was tried. One that fails, does not help, or cannot stand on those below is there,
    with `kept` false."""
    return _climb(Evidence(space, session), start)


def _climb(evidence: Evidence, start: Recipe | None = None) -> Iterator[Step]:
    """A rung is a technique; its levels are raced together and the best that helps is kept."""
    space = evidence.space
    bottom = with_required(space, start or Recipe())
    if not evidence.measure([Recipe(), bottom] if valid(space, bottom) else [Recipe()]):
        return
    yield Step("as given", evidence.trials[Recipe()], True)
    if bottom not in evidence.trials:
        return
    standing = evidence.trials[bottom]
    if bottom != Recipe():
        yield Step(str(bottom), standing, True)
    for name in space.choices:
        moves = {f"{name}={level}": evidence.moved(standing.recipe, name, level) for level in space.choices[name][1:]}
        rung = {
            label: recipe
            for label, recipe in moves.items()
            if recipe is not None and standing.recipe.levels.items() < recipe.levels.items()  # additions only
        }
        going_on = evidence.measure(list(rung.values()))
        tried = {label: evidence.trials[recipe] for label, recipe in rung.items() if recipe in evidence.trials}
        best = min(tried, key=lambda label: evidence.score(tried[label]), default="")
        helped = bool(tried) and evidence.beats(tried[best], standing)
        for label, trial in tried.items():
            yield Step(label, trial, helped and label == best)
        if name not in standing.recipe.levels and name not in space.required.levels:
            for level in space.choices[name][1:]:
                barred = standing.recipe.with_levels(**{name: level})
                if (label := f"{name}={level}") not in rung and not space.is_idle(barred):
                    why = space.conflict(barred) or f"it cannot stand beside {standing.recipe}"
                    yield Step(label, Trial(barred, "failed", reason=why), False)
        standing = tried[best] if helped else standing
        if not going_on:
            return


def ablation(space: Space, session: Session) -> Trial | None:
    """Remove one technique at a time from what `auto` finds; the best of what was tried."""
    winner = auto(space, session)
    evidence = Evidence(space, session)
    _remove_each(evidence, winner.recipe if winner else Recipe())
    return evidence.leader()


def removals(space: Space, session: Session, recipe: Recipe) -> list[Step]:
    """The recipe, then each variant with one technique as given (and without what needs it). `kept` says that
    the recipe is worse without it, so that it is worth its place."""
    evidence = Evidence(space, session)
    whole, without = _remove_each(evidence, recipe)
    if whole not in evidence.trials:
        return []
    steps = [Step(str(whole), evidence.trials[whole], True)]
    for name, smaller in without.items():
        if smaller in evidence.trials:
            worth = evidence.beats(evidence.trials[whole], evidence.trials[smaller])
            steps.append(Step(f"without {name}", evidence.trials[smaller], worth))
    return steps


def _remove_each(evidence: Evidence, recipe: Recipe) -> tuple[Recipe, dict[str, Recipe]]:
    """Race the recipe, its variants with one technique less, and the baseline."""
    space = evidence.space
    whole = with_required(space, recipe)
    names = [name for name in space.choices if name in whole.levels]
    moved = {name: evidence.moved(whole, name, space.default(name)) for name in names}
    without = {name: smaller for name, smaller in moved.items() if smaller is not None}
    evidence.measure([Recipe(), *([whole] if valid(space, whole) else []), *without.values()])
    return whole, without


MOST = 64
"""Trials of a factorial unless the caller says otherwise."""
_TOGETHER = 6
_LISTED, _GROWN = 20_000, 500
"""Combinations that are written out in full; of a larger space a random part stands for the whole."""
_MOST_WITH_PAIRS = 64
"""Levels whose interactions a fraction is balanced for: their number grows with the square."""


def factorial(space: Space, session: Session) -> Trial | None:
    """Measure every valid combination, or a balanced fraction when there are more than `MOST`; the best of them."""
    evidence = Evidence(space, session)
    wanted = [Recipe(), *(recipe for recipe in combinations_of(space) if recipe.levels)]
    for begin in range(0, len(wanted), _TOGETHER):
        if not evidence.measure(wanted[begin : begin + _TOGETHER]):
            break
    return evidence.leader()


def combinations_of(space: Space, most: int = MOST, among: Sequence[Recipe] | None = None) -> list[Recipe]:
    """The recipes of the factorial, or those `among` which to choose, in the order to measure them: any beginning of a
    fraction is itself balanced."""
    recipes = _listed(space) if among is None else list(among)
    return recipes if len(recipes) <= most else [recipes[row] for row in _spread(_columns(space, recipes), most)]


def _listed(space: Space) -> list[Recipe]:
    """All valid recipes; from a space too large to list, valid ones drawn at random."""
    if (every := _every(space)) is not None:
        whole = (with_required(space, recipe) for recipe in every)
        return [recipe for recipe in dict.fromkeys(whole) if valid(space, recipe)]
    names = list(space.choices)
    levels = [space.choices[name] for name in names]
    random = np.random.default_rng(0)
    picks = (tuple(one[random.integers(len(one))] for one in levels) for _ in range(_LISTED))
    drawn = (with_required(space, Recipe(dict(zip(names, row, strict=True)))) for row in picks)
    found = list(islice((recipe for recipe in dict.fromkeys(drawn) if valid(space, recipe)), _LISTED // 4))
    if len(found) >= _GROWN:
        return found
    return list(dict.fromkeys([*found, *(_grown(space, random) for _ in range(_GROWN))]))


def is_sampled(space: Space) -> bool:
    """Whether so many recipes could work that some drawn at random stand for all of them."""
    return _every(space) is None


def _every(space: Space) -> Iterator[Recipe] | None:
    """Recipes among which are those that can work: all combinations, or where those are too many, all in which no two
    levels exclude each other. None where these are too many as well."""
    if math.prod(map(len, space.choices.values())) <= _LISTED:
        return (Recipe(dict(zip(space.choices, row, strict=True))) for row in product(*space.choices.values()))
    levels = [(name, level) for name, known in space.choices.items() for level in known[1:]]
    if len(levels) > _MOST_WITH_PAIRS:
        return None
    alone = {level: moved(space, Recipe(), *level) for level in levels}
    apart = {pair for one, two in combinations(levels, 2) if not _together(space, alone, one, two)
             for pair in ((one, two), (two, one))}  # fmt: skip
    found: list[tuple[Level, ...]] = [()]
    for name, known in space.choices.items():
        own = list(product([name], known[1:]))
        more = ((*taken, level) for taken in found for level in own if not any((one, level) in apart for one in taken))
        found = list(islice(chain(found, more), _LISTED + 1))
        if len(found) > _LISTED:
            return None
    return (Recipe(dict(taken)) for taken in found)


def _together(space: Space, alone: Mapping[Level, Recipe | None], one: Level, two: Level) -> bool:
    """Whether two levels can stand together, with what they need; also where one of them cannot stand alone."""
    for first, second in ((one, two), (two, one)):
        if (before := alone[first]) is None:
            return True
        both = moved(space, before, *second)
        if both is not None and {one, two} <= set(both.levels.items()):
            return True
    return False


def _grown(space: Space, random: np.random.Generator) -> Recipe:
    """A valid recipe where those drawn at random hardly ever are, as in a pipeline of many parts: levels are taken in
    random order, each where it can stand beside those before."""
    recipe = with_required(space, Recipe())
    for name in random.permutation(list(space.choices)):
        level = space.choices[name][random.integers(len(space.choices[name]))]
        bigger = with_required(space, recipe.with_levels(**{name: level}))
        if valid(space, bigger):
            recipe = bigger
    return recipe


def _columns(space: Space, recipes: Sequence[Recipe]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """The columns of main effects in the model matrix, 1 and -1, and which products of two of them are columns, too:
    two-way interactions. These are never written out: of a large space they would take hundreds of megabytes."""
    mains: list[tuple[str, npt.NDArray[np.float64]]] = []
    for name, levels in space.choices.items():
        for level in levels[1:]:
            chosen = np.array([recipe.levels.get(name, levels[0]) == level for recipe in recipes], dtype=np.float64)
            if 0 < chosen.sum() < len(recipes):
                mains.append((name, 2 * chosen - 1))
    names = np.array([name for name, _ in mains])
    apart = (names[:, None] != names) & (len(mains) <= _MOST_WITH_PAIRS)
    return np.column_stack([np.empty((len(recipes), 0)), *(column for _, column in mains)]), np.triu(apart)


def _spread(model: tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]], most: int) -> list[int]:
    """Greedy near D-optimal choice: always the row whose outcome is least certain given those chosen.

    No prior precision stands on the mean and main effects, some on interactions, which are wanted as far as the runs
    allow (a Bayesian D-optimal design). What each chosen row tells is kept as one vector: the matrix of what they leave
    open has the square of its entries.
    """
    mains, pairs = model
    precision = np.array([1e-3] * (1 + mains.shape[1]) + [1.0] * int(pairs.sum()))
    variance = np.full(len(mains), (1 / precision).sum())  # all entries are 1 or -1
    told = np.empty((most, len(precision)))
    chosen: list[int] = []
    for count in range(most):
        row = int(np.argmax(np.round(variance, 9)))  # rounded, so that ties fall alike on every machine
        chosen.append(row)
        entries = np.concatenate([[1.0], mains[row], np.outer(mains[row], mains[row])[pairs]])
        along = entries / precision - told[:count].T @ (told[:count] @ entries)
        told[count] = along / math.sqrt(1 + entries @ along)
        tells = told[count, 0] + mains @ told[count, 1 : 1 + mains.shape[1]]
        if pairs.any():
            beside = np.zeros(pairs.shape)
            beside[pairs] = told[count, 1 + mains.shape[1] :]
            tells += ((mains @ beside) * mains).sum(1)
        variance -= tells**2  # one product for all rows: computing them anew takes minutes
        variance[row] = -np.inf
    return chosen
