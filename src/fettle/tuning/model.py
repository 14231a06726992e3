"""One model over all races of a study: how fast each recipe is against each other one, and how sure that is.

A race says how far apart its processes were, on rounds in which both ran. Across races nothing is compared directly:
the workload as given may be eight times slower in one beside a busy neighbour. Instead

    log time of a process in a race  =  recipe + race + process + drift + noise

is fitted to all races at once by generalised least squares, where recipes and races are fixed effects and processes
random ones with one spread for the whole study (a linear mixed model: Searle, Casella and McCulloch, *Variance
Components*, 1992). Races are tied together by the recipes that ran in several: the workload as given and the leader
run in each. The spread between processes is what makes the weighted squares add up to their degrees of freedom (Paule
and Mandel, *J. Res. NBS* 87, 1982), drawn towards `PRIOR_SPREAD` as if `PRIOR_WEIGHT` more differences had shown that:
it carries the spread where few recipes ran in several processes. What a recipe does from race to race, beside the
others, that its rounds do not show is its drift: more of it the further it is from them (`PRIOR_STRETCH`), and a
little by chance (`PRIOR_DRIFT`). How much there is of both is found likewise, from contrasts of processes with
themselves, with the same weight on what is known; what one race says alone is as uncertain as that, too. What a host
does for longer than a study is in the interval of every ratio (`LASTING_STRETCH`). Processes that are far from what the
rest says weigh less (P. J. Huber, *Ann. Math. Statist.* 35, 1964).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fettle.estimates import student
from fettle.measure import ENOUGH, Interval, Slice, Trial, by_process, log_times, paired, places
from fettle.recipe import Recipe

Numbers = NDArray[np.floating[Any]]
Places = NDArray[np.intp]

PRIOR_SPREAD = 0.03
"""Standard deviation of the log time between processes of the same code, where a study has not shown it: with this one
intervals held the truth as often as they say in simulated studies (``bench/busy_simulation.py``)."""
PRIOR_DRIFT = 0.01
"""The same of one recipe from race to race, beside others that are about as fast."""
PRIOR_STRETCH = 0.04
"""By what share a race stretches or shrinks all differences between log times. Quiet races of the same recipes in other
hours, on shared machines of several kinds, scattered by this share of the log of their speed-up (46 degrees of
freedom), and two recipes that both were twelve times as fast as the model as given moved together (the five tables
``bench/results/busy*.json`` with races, as of 27 November 2026)."""
LASTING_STRETCH = PRIOR_STRETCH / 2
"""The part of it that lasts for longer than a study, which no study sees: it is in every ratio, whatever the races
show. Of 52 intervals from quiet times (docs/evidence.md) 44 hold the race at once afterwards without it, 47 with it."""
PRIOR_WEIGHT = 3.0
BUSY_ERROR, UNHINDERED_ERROR = 0.05, 0.12
"""Error of a time that was measured on a busy machine: in any case, and as a share of the log of the waiting that was
taken out. It belongs to the recipe: another process of it has the same. The nine cases of docs/evidence.md in which
slices went first were off by 0.034 in the mean and scattered by 0.06."""
QUOTA_ERROR = 0.03
"""The same where a quota stopped its threads, all at once. The ten cases of ``bench/quota_error.py`` were off by 0.012
in the mean and scattered by 0.014."""
_SMALLEST_NOISE = 0.002
_FAR = 3.0
"""Standard deviations from which a process weighs less."""
_TELLS = 0.01
"""What the prior makes of a contrast over its noise, as variances, from which it says something about that part."""
_MOST = 1e4
"""Times the prior variance that one is looked for up to."""
_FEWEST_TO_JUDGE = 4
"""Degrees of freedom from which it can be told that a process is far from the rest."""


@dataclass(frozen=True)
class Point:
    """One process in one race."""

    race: tuple[int, int]
    """Its number, and that of a party in it: on a machine that was quiet for some of its processes and not for others
    no rounds connect them."""
    process: str
    recipe: Recipe
    value: float
    """Log time, less the mean of its party."""
    variance: float
    """Variance of `value`, from the scatter of its rounds."""
    off: float = 0.0
    """Standard deviation of what `value` is off by where the machine was not quiet."""


@dataclass(frozen=True)
class Part:
    """A variance that the races have shown, or what is known of it from elsewhere."""

    variance: float
    freedom: float
    """Degrees of freedom that it is known with."""


@dataclass(frozen=True)
class Fit:
    """What the races say together."""

    recipes: Mapping[Recipe, int]
    """Their places among the effects."""
    solved: _Solved
    noise: Sequence[Shared]
    of_spread: Sequence[Shared]
    """What of the points' variance comes of the spread, and what of the drift."""
    of_drift: Sequence[Shared]
    spread: Part
    """Between processes of the same recipe."""
    drift: Part
    """From race to race, what rounds do not show: a host that moves its cores changes recipes differently. Its unit is
    what `PRIOR_STRETCH` and `PRIOR_DRIFT` make of each."""

    def speedup(self, recipe: Recipe, over: Recipe = Recipe(), confidence: float = 0.95) -> Interval | None:  # noqa: B008
        """How many times as fast one recipe is as another; None where no chain of races connects them."""
        log = self.log_ratio(recipe, over, confidence)
        return None if log is None else Interval(*(math.exp(min(700.0, x)) for x in (log.estimate, log.low, log.high)))

    def log_ratio(self, recipe: Recipe, over: Recipe, confidence: float = 0.95) -> Interval | None:
        """Log of the ratio of times, `over` / `recipe`, with its interval by Student's t, whose degrees of freedom are
        those of both parts (F. E. Satterthwaite, *Biometrics Bulletin* 2, 1946)."""
        if recipe not in self.recipes or over not in self.recipes:
            return None
        one, other = self.recipes[over], self.recipes[recipe]
        weights = self.solved.contrast(one, other)
        if weights is None:
            return None
        estimate = float(self.solved.effects[one] - self.solved.effects[other])
        noise, of_spread, of_drift = (
            sum(part.of(weights) for part in parts) for parts in (self.noise, self.of_spread, self.of_drift)
        )
        variance = noise + of_spread + of_drift + (LASTING_STRETCH * estimate) ** 2
        unsure = of_spread**2 / self.spread.freedom + of_drift**2 / self.drift.freedom
        freedom = variance**2 / unsure if unsure > 0 else math.inf
        half = student(freedom, 1 - confidence) * math.sqrt(variance)
        return Interval(estimate, estimate - half, estimate + half)


@dataclass
class Races:
    """The races of a study, as points of the model."""

    elapsed: bool = False
    """Go by time elapsed beside whatever else the machine did."""
    trials: dict[int, dict[Recipe, Trial]] = field(default_factory=dict)
    """Trials by race."""
    _points: dict[int, list[Point]] = field(default_factory=dict)

    def add(self, trials: Iterable[Trial]) -> None:
        """Trials of one race or of several; each race may come in parts."""
        for trial in trials:
            if trial.slices:
                self.trials.setdefault(trial.race, {})[trial.recipe] = trial
                self._points.pop(trial.race, None)

    def fit(self) -> Fit | None:
        """What all of it says; None before the first race."""
        points = [point for race in self.trials for point in self._points_of(race)]
        return fit(points) if points else None

    def of_race(self, race: int, every: Fit, *, drifts: bool = True) -> Fit | None:
        """What one race says alone, with the spread of processes that `every` race has shown, and their drift unless
        it is left out."""
        points = self._points_of(race)
        drift = every.drift if drifts else Part(0.0, math.inf)
        return fit(points, known=(every.spread, drift)) if points else None

    def _points_of(self, race: int) -> list[Point]:
        if race not in self._points:
            self._points[race] = points_of(race, list(self.trials.get(race, {}).values()), elapsed=self.elapsed)
        return self._points[race]


def points_of(race: int, trials: Sequence[Trial], *, elapsed: bool = False) -> list[Point]:
    """The processes of a race as points."""
    logs: dict[str, dict[int, float]] = {}
    recipes: dict[str, Recipe] = {}
    slices: dict[str, list[Slice]] = {}
    for trial in trials:
        for process, turns in by_process(trial.slices).items():
            if log := log_times(turns, trial.samples, elapsed=elapsed):
                logs[process], recipes[process], slices[process] = log, trial.recipe, turns
    names, points = list(logs), []
    for number, party in enumerate(places(list(logs.values()))):
        if len(party) == 1 and len(logs) > 1:  # it met nobody, and says nothing
            continue
        for index, value in party.items():
            process = names[index]
            # A difference has the noise of both: half of its variance is this one's, the mean over the others.
            met = [paired(logs[process], logs[other]) for other in names if other != process]
            noise = [_median_variance(values) / 2 for values in met if len(values) > 1]
            variance = max(statistics.median(noise) if noise else 0.1**2, _SMALLEST_NOISE**2)
            off = 0.0 if elapsed else _busy_error(slices[process])
            points.append(Point((race, number), process, recipes[process], value, variance, off))
    return points


def fit(points: Sequence[Point], *, known: tuple[Part, Part] | None = None) -> Fit:
    """Fit the model to the points. Spread and drift that are `known` are not estimated.

    Most points of a large study are of recipes that ran once: no matrix has both a row and a column for each of these.
    """
    recipe, race = _numbers([point.recipe for point in points]), _numbers([point.race for point in points])
    process = _numbers([point.process for point in points])
    design = np.array([recipe, recipe.max() + 1 + race])
    values = np.array([point.value for point in points])
    # What a race does to all processes of a recipe, by how far it is from the others and by chance.
    both = _numbers(list(zip(recipe, race, strict=True)))
    together = [Shared(race, PRIOR_STRETCH * values), Shared(both, np.full(len(points), PRIOR_DRIFT))]
    # A recipe's error from waiting that was taken out is the same in all its processes and races.
    variances, off = np.array([point.variance for point in points]), np.array([point.off for point in points])
    noise = [Shared(np.arange(len(points)), np.sqrt(variances)), Shared(recipe, off)]
    alike = [Shared(process, np.ones(len(points)))]
    left = _left(design)
    weights = np.ones(len(points))
    for _ in range(2):
        own, drifts, lasts = (_times(parts, 1 / np.sqrt(weights)) for parts in (noise, together, alike))
        if known is None:
            # With what each process is like taken out, contrasts are of processes with themselves, in other races.
            drift = _shown(np.vstack([design, design.max() + 1 + process]), values, own, drifts, 1.0)
            beside = [*own, *_times(drifts, math.sqrt(drift.variance))]
            spread = _shown(design, values, beside, lasts, PRIOR_SPREAD)
        else:
            spread, drift = known
        of_spread, of_drift = _times(lasts, math.sqrt(spread.variance)), _times(drifts, math.sqrt(drift.variance))
        solved = _Solved(design, values, [*own, *of_spread, *of_drift])
        if left < _FEWEST_TO_JUDGE:
            break
        # Told by how far the middle ones are, or one that is far would widen the spread and hide in it.
        usual = 1.4826 * float(np.median(np.abs(solved.residuals))) * math.sqrt(len(points) / left)
        far = np.abs(solved.residuals) / np.maximum(usual, np.sqrt(variances + off**2 + PRIOR_SPREAD**2))
        if (far <= _FAR).all():
            break
        weights = np.where(far > _FAR, np.maximum(0.02, (_FAR / np.maximum(far, 1e-12)) ** 2), 1.0)
    names = {one: place for place, one in enumerate(dict.fromkeys(point.recipe for point in points))}
    return Fit(names, solved, own, of_spread, of_drift, spread, drift)


def _numbers(labels: Sequence[Hashable]) -> Places:
    """The labels as numbers, in order of appearance."""
    numbers = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    return np.array([numbers[label] for label in labels])


@dataclass(frozen=True)
class Shared:
    """A part of the points' variance: an error that all of a group have, each times a factor of its own."""

    groups: Places
    factors: Numbers

    def between(self, rows: Places, others: Places) -> Numbers:
        """The covariance of some points with others."""
        same = self.groups[rows][:, None] == self.groups[others]
        return np.where(same, np.outer(self.factors[rows], self.factors[others]), 0.0)

    def of(self, weights: Numbers) -> float:
        """The variance of a weighted sum of all points."""
        return float((np.bincount(self.groups, weights * self.factors) ** 2).sum())


def _times(parts: Sequence[Shared], factors: Numbers | float) -> list[Shared]:
    return [replace(part, factors=part.factors * factors) for part in parts]


def _between(parts: Sequence[Shared], rows: Places, others: Places) -> Numbers:
    return sum((part.between(rows, others) for part in parts), np.zeros((len(rows), len(others))))


def _belong(design: Places, columns: Places) -> Numbers:
    """The model matrix of these columns. Each point has a 1 in those that its column of `design` names."""
    return np.asarray((design[:, :, None] == columns).any(axis=0), dtype=np.float64)


def _single(design: Places) -> NDArray[np.bool_]:
    """Where a point has a column for itself alone."""
    single: NDArray[np.bool_] = np.bincount(design.ravel())[design] == 1
    return single


def _telling(design: Places) -> Places:
    """Points that have no column for themselves alone: one that has says nothing of any other column."""
    return np.flatnonzero(~_single(design).any(axis=0))


def _left(design: Places) -> int:
    """Degrees of freedom that a fit leaves over."""
    told = design[:, _telling(design)]
    return told.shape[1] - int(np.linalg.matrix_rank(_belong(told, np.unique(told)))) if told.size else 0


class _Solved:
    """Generalised least squares: effects, what they are sums of, residuals.

    Most recipes of a large study ran once. Such a row decides nothing but its recipe's effect, which follows from what
    the other rows say: so the work grows with the cube of the others' number. The answer is that of all rows together.
    """

    def __init__(self, design: Places, values: Numbers, variance: Sequence[Shared]) -> None:
        single = _single(design)
        rows, self._others = np.flatnonzero(single.any(axis=0)), np.flatnonzero(~single.any(axis=0))
        alone = design[single.argmax(axis=0), np.arange(len(values))][rows]
        columns = np.setdiff1d(design, alone)
        met = _belong(design[:, self._others], columns)
        inverse = np.linalg.inv(_between(variance, self._others, self._others))
        weights = np.linalg.pinv(met.T @ inverse @ met, rcond=1e-9, hermitian=True) @ met.T @ inverse
        foreseen = _between(variance, rows, self._others) @ inverse
        self._design, self._row = design, dict(zip(alone.tolist(), rows.tolist(), strict=True))
        self._weights = np.zeros((design.max() + 1, len(self._others)))
        self._weights[columns] = weights
        self._weights[alone] = (foreseen @ met - _belong(design[:, rows], columns)) @ weights - foreseen
        self.effects = self._weights @ values[self._others]
        self.effects[alone] += values[rows]
        self.residuals = values - self.effects[design].sum(axis=0)

    def contrast(self, one: int, other: int) -> Numbers | None:
        """The weights of the points whose sum is the difference of two effects; None where no chain of races connects
        them, so that they cannot be compared."""
        weights = np.zeros(self._design.shape[1])
        weights[self._others] = self._weights[one] - self._weights[other]
        for column, sign in ((one, 1.0), (other, -1.0)):
            if column in self._row:
                weights[self._row[column]] += sign
        shown = np.bincount(self._design.ravel(), np.tile(weights, len(self._design)))
        shown[one] -= 1
        shown[other] += 1
        return weights if np.allclose(shown, 0.0, atol=1e-6) else None


def _shown(design: Places, values: Numbers, noise: Sequence[Shared], shared: Sequence[Shared], prior: float) -> Part:
    """The variance of what is `shared`: where the squares weighted by it and the noise, which fall as it grows, come to
    their number; drawn towards a `prior` standard deviation. Contrasts in which even that would drown in the noise say
    nothing of it.

    Both parts of the variance are made diagonal at once, so the squares at any variance are a sum."""
    left = _left(design)
    if left == 0:
        return Part(prior**2, PRIOR_WEIGHT)
    rows = _telling(design)
    told = design[:, rows]
    rest = np.linalg.svd(_belong(told, np.unique(told)))[0][:, len(rows) - left :]
    root = np.linalg.inv(np.linalg.cholesky(rest.T @ _between(noise, rows, rows) @ rest))
    ratios, turned = np.linalg.eigh(root @ rest.T @ _between(shared, rows, rows) @ rest @ root.T)
    squares = (turned.T @ (root @ (rest.T @ values[rows]))) ** 2
    tells = ratios * prior**2 > _TELLS
    ratios, squares = ratios[tells], squares[tells]
    low, high = 0.0, _MOST * prior**2
    for _ in range(40):
        middle = (low + high) / 2
        if float((squares / (1 + middle * ratios)).sum()) > len(squares):
            low = middle
        else:
            high = middle
    freedom = len(squares) + PRIOR_WEIGHT
    return Part((len(squares) * (low + high) / 2 + PRIOR_WEIGHT * prior**2) / freedom, freedom)


def _median_variance(values: Sequence[float]) -> float:
    """Variance of the median of `values`, from their median absolute deviation (normal-consistent)."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    count = len(values)
    # Few values understate their spread: the factor of a normal sample's median deviation.
    return (deviation * (1 + 2 / count)) ** 2 * math.pi / 2 / count


def widened(trial: Trial, given: Trial, confidence: float) -> Trial:
    """The trial with the error of times from a busy machine in the interval of its speed-up over the workload as given,
    which says what processes and rounds differ by."""
    ratio, error = trial.speedup, math.hypot(*(_busy_error(one.slices) for one in (trial, given)))
    if ratio is None or trial is given or error == 0:
        return trial
    return replace(trial, speedup=_with_error(ratio, error, confidence))


def another_hour(speedup: Interval, confidence: float) -> Interval:
    """What a race of another hour may say of a speed-up, on a machine that others share."""
    return _with_error(speedup, PRIOR_STRETCH * abs(math.log(speedup.estimate)), confidence)


def _with_error(ratio: Interval, error: float, confidence: float) -> Interval:
    """An interval with the standard deviation of another error of the log in it."""
    if not 0 < ratio.low <= ratio.high < math.inf:
        return ratio
    own, more = math.log(ratio.high / ratio.low) / 2, student(math.inf, 1 - confidence) * error
    wider = math.exp(math.hypot(own, more) - own)
    return replace(ratio, low=ratio.low / wider, high=ratio.high * wider)


def _busy_error(slices: Sequence[Slice]) -> float:
    """Standard deviation of what the log time of a process is off by; 0 where quiet slices tell it.

    Where others had the machine it grows with the log of elapsed over used time, the median of the slices that count.
    """
    if sum(one.quiet for one in slices) >= min(ENOUGH, len({one.round for one in slices})):
        return 0.0
    busy = [(math.log(one.ms / one.best_ms), one.by_quota) for one in slices if not one.quiet and one.best_ms]
    if 2 * sum(by_quota for _, by_quota in busy) > len(busy):
        return QUOTA_ERROR
    return BUSY_ERROR + UNHINDERED_ERROR * max(0.0, statistics.median(log for log, _ in busy)) if busy else 0.0
