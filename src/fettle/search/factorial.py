"""The factorial: every valid combination, or a balanced fraction of them, so that effects can be told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, islice, product

import numpy as np
import numpy.typing as npt

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search._evidence import Evidence
from fettle.search._moves import valid, with_required
from fettle.search._space import Session, Space

MOST = 64
"""Trials of a factorial unless the caller says otherwise."""
_TOGETHER = 6
_LISTED = 20_000
"""Combinations that are written out in full; of a larger space a random part stands for the whole."""


def factorial(
    space: Space, session: Session, *, first: Sequence[str] = (), start: Recipe | None = None, most: int = MOST
) -> Trial | None:
    """Measure every valid combination, or a balanced fraction when there are more than `most`; the best of them."""
    evidence = Evidence(space, session)
    recipes = [recipe for recipe in combinations_of(space, most) if recipe.levels]
    wanted = [Recipe(), *([with_required(space, start)] if start else []), *recipes]
    for begin in range(0, len(wanted), _TOGETHER):
        if not evidence.measure(wanted[begin : begin + _TOGETHER]):
            break
    return evidence.leader()


def combinations_of(space: Space, most: int = MOST, seed: int = 0) -> list[Recipe]:
    """The recipes of the factorial in the order to measure them: any beginning of a fraction is itself balanced."""
    recipes = _listed(space, seed)
    return recipes if len(recipes) <= most else [recipes[row] for row in _spread(_columns(space, recipes), most)]


def _listed(space: Space, seed: int) -> list[Recipe]:
    """All valid recipes; from a space too large to list, valid ones drawn at random."""
    names = list(space.choices)
    levels = [space.choices[name] for name in names]
    if math.prod(len(one) for one in levels) <= _LISTED:
        rows = product(*levels)
        drawn = (with_required(space, Recipe(dict(zip(names, row, strict=True)))) for row in rows)
        return [recipe for recipe in dict.fromkeys(drawn) if valid(space, recipe)]
    random = np.random.default_rng(seed)
    picks = (tuple(one[random.integers(len(one))] for one in levels) for _ in range(_LISTED))
    drawn = (with_required(space, Recipe(dict(zip(names, row, strict=True)))) for row in picks)
    return list(islice((recipe for recipe in dict.fromkeys(drawn) if valid(space, recipe)), _LISTED // 4))


def _columns(space: Space, recipes: Sequence[Recipe]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The model matrix, and the prior precision of each column: none on the mean and main effects, some on two-way
    interactions, which are wanted as far as the runs allow (a Bayesian D-optimal design)."""
    mains: list[tuple[str, npt.NDArray[np.float64]]] = []
    for name, levels in space.choices.items():
        for level in levels[1:]:
            chosen = np.array([recipe.levels.get(name, levels[0]) == level for recipe in recipes], dtype=np.float64)
            if 0 < chosen.sum() < len(recipes):
                mains.append((name, 2 * chosen - 1))
    pairs = [one * two for (a, one), (b, two) in combinations(mains, 2) if a != b]
    matrix = np.column_stack([np.ones(len(recipes)), *(column for _, column in mains), *pairs])
    return matrix, np.array([1e-3] * (1 + len(mains)) + [1.0] * len(pairs))


def _spread(model: tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]], most: int) -> list[int]:
    """Greedy near D-optimal choice: always the row whose outcome is least certain given those chosen."""
    matrix, precision = model
    spread = np.diag(1 / precision)
    left = np.ones(len(matrix), dtype=bool)
    chosen: list[int] = []
    for _ in range(most):
        variance = np.where(left, np.einsum("ij,jk,ik->i", matrix, spread, matrix, optimize=True), -np.inf)
        row = int(np.argmax(np.round(variance, 9)))  # rounded, so that ties fall alike on every machine
        chosen.append(row)
        left[row] = False
        along = spread @ matrix[row]
        spread -= np.outer(along, along) / (1 + matrix[row] @ along)
    return chosen
