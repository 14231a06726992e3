"""What to expect of a recipe on a model that the atlas has not seen, and how sure that is.

Log speed-ups, none taken for less than `SLOWEST`, are a Gaussian process (Rasmussen and Williams, *Gaussian Processes
for Machine Learning*, 2006). Its covariance is that of a ridge regression with a coefficient for each level and each
pair of levels, which vary smoothly from model to model with their features:

    cov(recipe on model, recipe' on model')  =  a² * (sum over the levels that both have of
                                                          w² + m² * same machine + o² * own
                                                      + b * sum of w w' over the pairs of levels that both have
                                                          * (c + (1 - c) * own))
    own  =  d * likeness + (1 - d) * same

So a recipe without levels has a speed-up of 1 exactly, what all models gain is learned from all of them (w), what all
gain on this machine from those on it (m: 16 bits are slow where no unit multiplies them), what alike ones gain counts
more (d: their operators, sizes and machines), and each has something of its own, which no other tells and which is why
a forecast is never sure. A level's w, m and o are found from what it changes a time by, as a log, in trials with it
over trials that differ in nothing else: its mean, and its standard deviation between machines and between models of
one machine. So a level that does much the same to all models is foreseen closely. The
other numbers, the reach of the likeness and the noise are those of a small grid under which the rows are likeliest.
Trials of the model in question are added as they come.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky, solve_triangular

from fettle.atlas.table import Row, Subject, rows_of, weights_of
from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search import SLOWEST, Forecast

Numbers = NDArray[np.float64]

MOST = 2_000
"""Rows that are gone by, those of the models and machines most like the one in question."""
_TUNED_ON = 250
"""Rows that the numbers of the grid are chosen on."""
_LOGS = {"parameters": 1.0, "flops": 1.0, "samples": 1.0, "calls": 0.7}
"""Decades by which two models differ by one."""
_SHARES = {"matrix": 0.25, "pointwise": 0.25, "layout": 0.25, "index": 0.25,
           "convolution": 0.4, "attention": 0.4, "recurrent": 0.3}  # fmt: skip
_OTHER_MACHINE = 1.0
"""Added to the squared distance of models on two machines."""
_USUAL_WORTH = 0.3
"""What a level changes a time by, as a log, where nothing is known of it."""
_NORMAL = 1.96
_LEAST_ERROR = 0.01
_WORKS = 0.9
"""What is expected of a recipe to work where nothing is known of it."""


@dataclass(frozen=True)
class _Numbers:
    """The covariance's numbers, as above."""

    scale: float
    pairs: float
    common: float
    alike: float
    reach: float
    noise: float


class _Parts(NamedTuple):
    """By level, and at the end for one that no row has: what it changes a time by, as a log,"""

    worth: Numbers
    machine: Numbers
    """and the standard deviation of that between machines,"""
    model: Numbers
    """and between models of one."""


_GRID = [_Numbers(*values) for values in itertools.product(
    (0.7, 1.0), (0.15, 0.5, 1.0), (0.1, 0.5), (0.3, 0.7), (0.8, 2.0), (0.04, 0.1))]  # fmt: skip


class Predictor:
    """What an atlas foresees for one model on one machine: the foresight of `fettle.search.Guide`."""

    def __init__(
        self,
        rows: Sequence[Row],
        about: Subject,
        *,
        max_error: float | None = None,
        guess_s: Callable[[Recipe], float] = lambda recipe: 1.0,
    ) -> None:
        """`guess_s`: seconds that a recipe's trial takes for all that is known without the atlas."""
        self.about, self.max_error, self._guess_s = about, max_error, guess_s
        rows = [row for row in rows if (row.mode, row.device) == (about.mode, about.device)]
        subjects = {(row.fingerprint, row.machine, row.torch): row for row in rows}
        *points, here = _points([*subjects.values(), about])
        at = dict(zip(subjects, points, strict=True))
        near = {key: _distance(row, about, at[key] - here) for key, row in subjects.items()}
        rows = sorted(rows, key=lambda row: near[row.fingerprint, row.machine, row.torch])[:MOST]
        self._keys = keys = list(dict.fromkeys((row.fingerprint, row.machine, row.torch) for row in rows))
        self.models = len({row.fingerprint for row in rows})
        self._rows = rows
        self._apart = np.array(
            [[_distance(subjects[a], subjects[b], at[a] - at[b]) for b in keys] for a in keys]
        ).reshape(len(keys), len(keys))
        self._far = np.array([near[key] for key in keys])
        self._beside = np.array([[float(a[1:] == b[1:]) for b in keys] for a in keys]).reshape(len(keys), len(keys))
        self._here = np.array([float(key[1:] == (about.machine, about.torch)) for key in keys])
        own = (about.fingerprint, weights_of(about.fingerprint))
        self._mine = np.array([key[1] == about.machine and key[0] in own for key in keys], dtype=float)
        self._same = np.eye(len(keys))
        self._whose = np.array([keys.index((row.fingerprint, row.machine, row.torch)) for row in rows], dtype=int)
        self._recipes = [Recipe.parse(row.recipe) for row in rows]
        levels = sorted({level for recipe in self._recipes for level in recipe.levels.items()})
        self._column = {level: place for place, level in enumerate(levels)}
        self._known = [place for place, row in enumerate(rows) if row.gain is not None and self._recipes[place].levels]
        self._gains = np.maximum(SLOWEST, [rows[place].gain or 0.0 for place in self._known])
        self._errors = np.array([_error(rows[place]) for place in self._known])
        self._levels = self._one_hot(self._recipes)
        self._parts = self._found_parts()
        if self._known:
            self._fit()

    def __len__(self) -> int:
        return len(self._known)

    @cached_property
    def ideas(self) -> Sequence[Recipe]:
        """Recipes that were tried on other models, the most promising here first."""
        known = sorted({recipe for recipe in self._recipes if recipe.levels}, key=str)
        if not self._known:
            return known
        promised = {recipe: item.gain * item.works
                    for recipe, item in zip(known, self.forecast(known, ()), strict=True)}  # fmt: skip
        return sorted(known, key=lambda recipe: -promised[recipe])

    def forecast(self, recipes: Sequence[Recipe], trials: Sequence[Trial]) -> list[Forecast]:
        """What to expect of recipes, with what `trials` of this very model have shown."""
        own = [row for row in rows_of(self.about, trials) if row.gain is not None and row.recipe != str(Recipe())]
        gains, errors = [max(SLOWEST, row.gain or 0.0) for row in own], [_error(row) for row in own]
        mine = self._one_hot([Recipe.parse(row.recipe) for row in own])
        wanted = self._one_hot(recipes)
        mean, variance = self._conditional(wanted, mine, np.array(gains), np.array(errors))
        works, seconds = self._works(wanted, trials), self._seconds(wanted, recipes)
        columns = np.maximum(SLOWEST, mean), np.sqrt(np.maximum(0.0, variance) + self._numbers.noise**2), works, seconds
        return [Forecast(*map(float, each)) for each in zip(*columns, strict=True)]

    # -- speed -------------------------------------------------------------------------------------------------------

    def _one_hot(self, recipes: Sequence[Recipe]) -> Numbers:
        """Levels by recipe; one column stands for a level that no row has, so that it is like nothing."""
        columns = np.zeros((len(recipes), len(self._column) + 1))
        for place, recipe in enumerate(recipes):
            for level in recipe.levels.items():
                columns[place, self._column.get(level, len(self._column))] += 1
        return columns

    def _found_parts(self) -> _Parts:
        """What each level changes a time by, from pairs of trials that differ in nothing else, held near the usual
        where few tell."""
        gains = {
            (self._whose[place], self._recipes[place]): self._gains[known] for known, place in enumerate(self._known)
        }
        gains |= {(whose, Recipe()): 0.0 for whose in self._whose}
        changes: dict[tuple[str, str], dict[int, list[float]]] = {level: {} for level in self._column}
        for (whose, recipe), gain in gains.items():
            for level in recipe.levels.items():
                without = gains.get((whose, recipe.without(level[0])))
                if without is not None:
                    changes[level].setdefault(whose, []).append(gain - without)
        machines = [key[1:] for key in self._keys]
        found = [_parts_of([(machines[whose], statistics.fmean(some)) for whose, some in by_model.items()])
                 for by_model in changes.values()]  # fmt: skip
        return _Parts(*np.array([*found, _parts_of([])]).T)

    def _fit(self) -> None:
        """Choose the numbers of the covariance, and solve for the rows."""
        step = max(1, math.ceil(len(self._known) / _TUNED_ON))
        part = np.arange(0, len(self._known), step)
        self._numbers = max(_GRID, key=lambda numbers: self._likelihood(numbers, part))
        self._factor = self._cholesky(self._numbers, np.arange(len(self._known)))
        self._solved = solve_triangular(self._factor, self._gains, lower=True)

    def _cholesky(self, numbers: _Numbers, part: NDArray[Any]) -> Numbers:
        rows = np.array(self._known)[part]
        levels, whose = self._levels[rows], self._whose[rows]
        beside, own = (each[np.ix_(whose, whose)] for each in (self._beside, _own(self._apart, self._same, numbers)))
        matrix = self._shared(levels, levels, numbers, beside, own)
        matrix[np.diag_indices_from(matrix)] += self._errors[part] ** 2 + numbers.noise**2
        return np.asarray(cholesky(matrix, lower=True), dtype=np.float64)

    def _likelihood(self, numbers: _Numbers, part: NDArray[Any]) -> float:
        factor = self._cholesky(numbers, part)
        gains = self._gains[part]
        fit = gains @ cho_solve((factor, True), gains)
        return -0.5 * float(fit) - float(np.log(np.diag(factor)).sum())

    def _conditional(self, asked: Numbers, mine: Numbers, gains: Numbers, errors: Numbers) -> tuple[Numbers, Numbers]:
        """Mean and variance of the gains asked for, given the rows and what is known of this model."""
        numbers, rows = self._numbers, np.array(self._known)
        own = _own(self._far, self._mine, numbers)
        levels = self._levels[rows]
        beside, own = (each[self._whose[rows]][:, None] for each in (self._here, own))
        to_asked = solve_triangular(self._factor, self._shared(levels, asked, numbers, beside, own), lower=True)
        mean = to_asked.T @ self._solved
        variance = np.diag(self._shared(asked, asked, numbers)) - (to_asked**2).sum(axis=0)
        if not len(mine):
            return mean, variance
        to_mine = solve_triangular(self._factor, self._shared(levels, mine, numbers, beside, own), lower=True)
        left = self._shared(mine, mine, numbers) - to_mine.T @ to_mine
        left[np.diag_indices_from(left)] += errors**2 + (0.3 * numbers.noise) ** 2
        factor = cholesky(left, lower=True)
        across = solve_triangular(factor, self._shared(mine, asked, numbers) - to_mine.T @ to_asked, lower=True)
        news = solve_triangular(factor, gains - to_mine.T @ self._solved, lower=True)
        return mean + across.T @ news, variance - (across**2).sum(axis=0)

    def _shared(
        self, one: Numbers, other: Numbers, numbers: _Numbers, beside: Numbers | float = 1.0, own: Numbers | float = 1.0
    ) -> Numbers:
        """The covariance of recipes: by default on one model, else by whether they ran on one machine (`beside`) and
        how much of their models' own they share."""
        worth, machine, model = self._parts
        squares = (one * worth**2) @ other.T
        pairs = (((one * worth) @ other.T) ** 2 - squares) / 2
        alone = squares + beside * ((one * machine**2) @ other.T) + own * ((one * model**2) @ other.T)
        together = numbers.pairs * pairs * (numbers.common + (1 - numbers.common) * own)
        return np.asarray(numbers.scale**2 * (alone + together))

    # -- whether it works, and what it costs -------------------------------------------------------------------------

    def _weights(self, asked: Numbers) -> Numbers:
        """By recipe asked for and row: how alike recipe and model are."""
        of_model = np.maximum(0.05, np.exp(-0.5 * self._far[self._whose]))
        return np.asarray(_close(asked, self._levels) * of_model[None, :])

    def _works(self, asked: Numbers, trials: Sequence[Trial]) -> Numbers:
        """The chance that it runs and keeps the limit on the error."""
        weights = self._weights(asked)
        able = np.array([self._is_able(row.status, row.error) for row in self._rows], dtype=float)
        total, good = weights.sum(axis=1) + 1, weights @ able + _WORKS
        if trials:
            close = 3 * _close(asked, self._one_hot([trial.recipe for trial in trials]))
            total = total + close.sum(axis=1)
            good = good + close @ np.array([trial.ok for trial in trials], dtype=float)
        return np.asarray(good / total, dtype=np.float64)

    def _is_able(self, status: str, error: float | None) -> bool:
        if error is None or self.max_error is None:
            return status == "measured" or (status == "rejected" and self.max_error is None)
        return status != "failed" and error <= self.max_error

    def _seconds(self, asked: Numbers, recipes: Sequence[Recipe]) -> Numbers:
        """What a trial takes: the workload as given here, and what the recipe added to it where it was tried."""
        weights = self._weights(asked)
        more = np.array([
            max(0.0, row.start_s - row.given_start_s)
            if row.start_s is not None and row.given_start_s is not None else math.nan
            for row in self._rows
        ])  # fmt: skip
        known = np.where(np.isnan(more), 0.0, 1.0)
        weights = weights * known[None, :]
        guess, baseline_s = np.array([self._guess_s(recipe) for recipe in recipes]), self._guess_s(Recipe())
        weighted = weights @ np.where(known > 0, more, 0.0)
        return np.asarray((weighted + weights.sum(axis=1) * baseline_s + guess) / (weights.sum(axis=1) + 1))


def _own(apart: Numbers, same: Numbers, numbers: _Numbers) -> Numbers:
    return np.asarray(numbers.alike * np.exp(-0.5 * apart / numbers.reach**2) + (1 - numbers.alike) * same)


def _parts_of(changes: Sequence[tuple[tuple[str, ...], float]]) -> tuple[float, float, float]:
    """A level's `_Parts` from what it changed the time of each model by, with the model's machine."""
    by_machine: dict[tuple[str, ...], list[float]] = {}
    for where, change in changes:
        by_machine.setdefault(where, []).append(change)
    means = [statistics.fmean(some) for some in by_machine.values()]
    centre, usual = statistics.fmean(means) if means else 0.0, _USUAL_WORTH**2
    worth = (len(means) * centre**2 + usual) / (len(means) + 1)
    off = [change - statistics.fmean(some) for some in by_machine.values() for change in some]
    model = (sum(each**2 for each in off) + usual) / (len(off) - len(means) + 1)
    machine = (sum((mean - centre) ** 2 for mean in means) + 2 * max(usual, worth)) / max(1, len(means))
    return math.sqrt(worth), math.sqrt(machine), math.sqrt(model)


def _close(one: Numbers, other: Numbers) -> Numbers:
    """By pair of recipes: the fourth power of the share of their levels that both have."""
    both = one @ other.T
    either = one.sum(axis=1)[:, None] + other.sum(axis=1)[None, :] - both
    return np.asarray(np.divide(both, either, out=np.zeros_like(both), where=either > 0) ** 4)


def _points(subjects: Sequence[Subject]) -> Numbers:
    """Models by the features that any of them has, as if all were known.

    What is not known of one is taken for the median of the others: distances over what each two have in common need not
    be those of any points, and a likeness that goes by them is no covariance.
    """
    columns = []
    for names, change in ((_LOGS, lambda value: math.log10(1 + value)), (_SHARES, float)):
        for name, unit in names.items():
            values = [getattr(one, name) for one in subjects]
            known = [change(value) / unit for value in values if value is not None]
            if known:
                usual = statistics.median(known)
                columns.append([usual if value is None else change(value) / unit for value in values])
    scale = math.sqrt((len(_LOGS) + len(_SHARES)) / max(1, len(columns)))
    return scale * np.array(columns, dtype=np.float64).reshape(len(columns), len(subjects)).T


def _distance(one: Subject, other: Subject, way: Numbers) -> float:
    """Squared: `way` from one model to the other, and what machines differ by."""
    return float(way @ way) + _OTHER_MACHINE * (one.machine != other.machine)


def _error(row: Row) -> float:
    """Standard error of the gain."""
    if not row.low or not row.high:
        return 0.2
    return max(_LEAST_ERROR, (math.log(row.high) - math.log(row.low)) / 2 / _NORMAL)
