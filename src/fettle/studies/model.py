"""The model of one response in one group: the logarithm as a sum of main effects and two-way interactions.

Each level but the given one has a column, and so has each pair of them (treatment coding: Montgomery, *Design and
Analysis of Experiments*). A main effect stands before any interaction that it is part of (strong heredity), and
interactions come in the order of their parents' main effects: this choice does not look at the interactions themselves,
so it does not bend their intervals. A column that the experiments cannot tell from those before it is left out, with
the reason.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fettle.errors import needing
from fettle.estimates import student
from fettle.studies.table import Experiment, Response, Table

if TYPE_CHECKING:
    from statsmodels.regression.linear_model import RegressionResults

Vector = npt.NDArray[np.float64]
Level = tuple[str, str]
"""A factor and one of its levels."""
Term = tuple[Level, ...]
"""What a column stands for: nothing (the mean), one level, or two of different factors."""

ALPHA = 0.05
"""Chance of error that intervals and claims allow."""
LEAST_FREEDOM = 4
"""Experiments beyond the number of columns from which their scatter says how sure the effects are."""
NEVER_APART = "never varied apart from other levels"
_SAME = 1e-8


@dataclass(frozen=True)
class Estimate:
    """A contrast of the fit, on the scale of logarithms; above 0 is a gain."""

    gain: float
    error: float
    """Standard error; infinite where nothing shows it."""
    freedom: float
    """Degrees of freedom of that."""

    @property
    def reach(self) -> float:
        """Half the confidence interval, by Student's t."""
        if not (math.isfinite(self.error) and self.freedom > 0):
            return math.inf
        return student(min(self.freedom, 1e9), ALPHA) * self.error

    def p(self) -> float:
        """Probability of a gain or loss as large by chance alone; NaN where nothing shows it."""
        from scipy.special import stdtr

        if not (math.isfinite(self.error) and self.freedom > 0):
            return math.nan
        if self.error == 0:
            return 1.0 if self.gain == 0 else 0.0
        return float(2 * stdtr(min(self.freedom, 1e9), -abs(self.gain) / self.error))


@dataclass(frozen=True)
class Model:
    """The fit, and what it was fitted to."""

    response: Response
    levels: Mapping[str, tuple[str, ...]]
    """The factors that vary, with the levels that were seen; the first stands for `given`."""
    rows: Sequence[Experiment]
    terms: Sequence[Term]
    """Every level but the first of each factor, then every two of different factors: those in `columns`, the others
    in `left_out`."""
    columns: Sequence[Term]
    left_out: Mapping[Term, str]
    """Why the experiments cannot tell an effect."""
    apart: frozenset[str]
    """Factors whose levels did not run side by side, `Table.apart`."""
    x: Vector
    y: Vector
    """Cost: the logarithm of the response, with its sign changed where larger is better."""
    results: RegressionResults
    covariance: Vector
    freedom: float
    """Degrees of freedom of `covariance`; infinite where it is from the errors of measuring, as too few experiments are
    left over."""
    scatter: Vector | None = None
    """In a mixed model, the part of `covariance` that is not from how the random draws differ, with `freedom`;"""
    draws: int = 0
    """and how many draws there are."""

    def gain(self, weights: Mapping[Term, float]) -> Estimate | None:
        """The gain that a weighted sum of columns stands for; None where one of them was left out."""
        if any(term not in self.columns for term, weight in weights.items() if weight):
            return None
        contrast = np.array([weights.get(term, 0.0) for term in self.columns])
        known = self.freedom > 0
        error = math.sqrt(max(0.0, float(contrast @ self.covariance @ contrast))) if known else math.inf
        return Estimate(-float(contrast @ self.results.params), error, self._freedom(contrast))

    def _freedom(self, contrast: Vector) -> float:
        """Degrees of freedom of a contrast; Satterthwaite's where its variance has two sources."""
        if self.scatter is None:
            return self.freedom
        whole, own = (float(contrast @ part @ contrast) for part in (self.covariance, self.scatter))
        inner, between = own**2 / self.freedom, max(0.0, whole - own) ** 2 / (self.draws - 1)
        return whole**2 / (inner + between) if whole > 0 else self.freedom

    def main(self, level: Level, at: Level | None = None) -> Estimate | None:
        """What a level brings over how the factor was given, on average over the levels of the others that it was seen
        with, each counting alike however often it was tried; or only where one other factor is `at` a level."""
        weights: dict[Term, float] = {(level,): 1.0}
        for name in self.levels:
            if name == level[0]:
                continue
            others = {row.levels[name] for row in self.rows if row.levels[level[0]] == level[1]}
            if at is not None and name == at[0]:
                if at[1] not in others or self.pair(level, at) in self.left_out:
                    return None
                others = {at[1]}
            for other in others - {self.levels[name][0]}:
                term = self.pair(level, (name, other))
                if term in self.columns:
                    weights[term] = 1 / len(others)
        return self.gain(weights)

    def beside(self, level: Level, other: Level | None) -> Estimate | None:
        """What a level brings with all other factors as given, or all but one."""
        weights: dict[Term, float] = {(level,): 1.0}
        if other is not None:
            weights[self.pair(level, other)] = 1.0
        return self.gain(weights)

    def pair(self, one: Level, two: Level) -> Term:
        """Two levels in the order of their factors."""
        names = list(self.levels)
        return (one, two) if names.index(one[0]) < names.index(two[0]) else (two, one)

    def cells(self) -> list[list[int]]:
        """The places of the rows that are alike in all factors, by cell."""
        rows_of: dict[tuple[str, ...], list[int]] = {}
        for place, row in enumerate(self.rows):
            rows_of.setdefault(tuple(row.levels[name] for name in self.levels), []).append(place)
        return list(rows_of.values())


def holds(row: Experiment, term: Term) -> bool:
    """Whether an experiment had all these levels."""
    return all(row.levels[name] == level for name, level in term)


def fit(table: Table, group: str, response: Response, first: Collection[str] = ()) -> Model | None:
    """Fit the model by least squares. None where nothing varied, or too little was measured to say anything. Where
    there is no room for all pairs of factors, that of `first` is among those that are in.

    Raises `UsageError` where statsmodels is not installed.
    """
    rows = [row for row in table.of(group) if row.value(response.name) is not None]
    present = {name: {row.levels[name] for row in rows} for name in table.factors}
    levels = {
        name: tuple(level for level in all_of if level in present[name])
        for name, all_of in table.factors.items()
        if len(present[name]) > 1
    }
    if not levels or len(rows) < 3:
        return None
    sign = -1.0 if response.larger_is_better else 1.0
    y = sign * np.log([row.value(response.name) or math.nan for row in rows])
    if float(np.ptp(y)) < _SAME:
        return None
    errors = [row.errors.get(response.name, math.nan) for row in rows]
    measured = np.array(errors) if all(map(math.isfinite, errors)) else None

    mains: list[Term] = [((name, level),) for name, known in levels.items() for level in known[1:]]
    pairs: dict[tuple[str, str], list[Term]] = {
        (one, two): [((one, a), (two, b)) for a in levels[one][1:] for b in levels[two][1:]]
        for one, two in combinations(levels, 2)
    }
    columns: dict[Term, Vector] = {(): np.ones(len(rows))}
    columns |= {term: np.array([holds(row, term) for row in rows], np.float64) for term in mains}
    columns |= {(one, two): columns[one,] * columns[two,] for terms in pairs.values() for one, two in terms}
    tested = {column.tobytes() for column in columns.values() if column.any()}
    # No experiment need be spare where each comes with its error, and there are enough for all effects.
    spare = 0 if measured is not None and len(tested) <= len(rows) else LEAST_FREEDOM
    chosen = _Columns(columns)
    chosen.add([(), *mains], len(rows))
    by_parents = _by_parents(chosen, levels, y)
    for pair in sorted(pairs, key=lambda pair: (set(pair) != set(first), by_parents(pair))):
        chosen.add(pairs[pair], len(rows) - spare)

    x = np.column_stack([chosen.values[term] for term in chosen.values])
    results = statsmodels().api.OLS(y, x).fit()
    freedom = float(len(rows) - x.shape[1])
    covariance, left = _covariance(results, x, measured, freedom)
    return Model(
        response, levels, rows, tuple(filter(None, columns)), tuple(chosen.values), chosen.left_out, table.apart, x, y,
        results, covariance, left,
    )  # fmt: skip


class _Columns:
    """The columns of the model, as they are taken in from all that there are."""

    def __init__(self, every: Mapping[Term, Vector]) -> None:
        self.every = every
        self.values: dict[Term, Vector] = {}
        self.left_out: dict[Term, str] = {}
        self._basis: list[Vector] = []

    def add(self, terms: Sequence[Term], most: int) -> None:
        """Take in what can be told apart from all before, as long as there are fewer than `most`."""
        for term in terms:
            rest = column = self.every[term]
            for _ in range(2):  # twice, against Gram-Schmidt's rounding
                for unit in self._basis:
                    rest = rest - (unit @ rest) * unit
            length = float(np.linalg.norm(rest))
            orphan = next((level for level in term if len(term) > 1 and (level,) not in self.values), None)
            if not column.any():
                self.left_out[term] = "never tried together"
            elif orphan is not None:  # heredity: a pair is in only with both of its levels
                self.left_out[term] = self.left_out[orphan,]
            elif length <= _SAME * max(1.0, float(np.linalg.norm(column))):
                self.left_out[term] = NEVER_APART
            elif len(self.values) >= most:
                self.left_out[term] = "too few experiments for so many effects"
            else:
                self._basis.append(rest / length)
                self.values[term] = column


def _by_parents(chosen: _Columns, levels: Mapping[str, Sequence[str]], y: Vector) -> Any:
    """The order of interactions: by the smaller, then the larger of their factors' main effects, largest first."""
    terms = list(chosen.values)
    solved = np.linalg.lstsq(np.column_stack(list(chosen.values.values())), y, rcond=None)[0]
    size = dict.fromkeys(levels, 0.0)
    for term, value in zip(terms, solved, strict=True):
        if term:
            size[term[0][0]] = max(size[term[0][0]], abs(float(value)))
    return lambda pair: tuple(-round(value, 12) for value in sorted((size[pair[0]], size[pair[1]])))


def _covariance(results: RegressionResults, x: Vector, measured: Vector | None, freedom: float) -> tuple[Vector, float]:
    """The coefficients' covariance, and its degrees of freedom: from how the experiments scatter about the fit, or
    where too few are left over for that from what measuring says of each."""
    inverse = np.asarray(results.normalized_cov_params)
    if freedom >= LEAST_FREEDOM:
        return np.asarray(results.cov_params()), freedom
    if measured is not None:
        half = inverse @ x.T * measured
        return half @ half.T, math.inf
    return (np.asarray(results.cov_params()), freedom) if freedom > 0 else (np.full_like(inverse, math.inf), 0.0)


def statsmodels() -> Any:
    """The library, imported where a study is analysed. Raises `UsageError` where it is not installed."""
    with needing("study", "effects need statsmodels"):
        import statsmodels.api
    return statsmodels
