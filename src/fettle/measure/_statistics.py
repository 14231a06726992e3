"""The statistics of a race: paired log-ratios, their interval, and what may be claimed from it.

A round gives every live recipe one number (the median of a slice of calls). The log of two numbers of the same round
is one observation of the speed ratio: what slowed both down cancels. The estimate is the Hodges-Lehmann pseudo-median
of these observations; its interval inverts the Wilcoxon signed-rank test (Hollander, Wolfe and Chicken,
*Nonparametric Statistical Methods*, 3rd ed., section 3.2), exact for any symmetric noise. With too few rounds for
that test at the wanted level, Student's t interval stands in.

A race looks at its data several times. The error rate is kept by Bonferroni: every look uses alpha / looks.

Rounds are repeated measurements of the same two processes, and say nothing of how other processes of the same code
would differ. Where each candidate ran in several processes (replicates), the process is the unit: one number for each,
and Welch's t interval between the two groups (B. L. Welch, *Biometrika* 34, 1947). From five processes on, each side's
fastest and slowest fifth is trimmed (K. K. Yuen, *Biometrika* 61, 1974): about one process in a hundred is slow for
life here, by a tenth to a third, and four of them cannot tell that from a difference between the recipes.

All processes of a candidate ran in the same rounds, and what a moment does to all of them, as a host does that slows
memory and nothing else, is no difference between them. That part is found from round to round, and its variance is
added to that between processes: two effects that are crossed, each with its own sample (Searle, Casella and McCulloch,
*Variance Components*, 1992, chapter 4).
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np

from fettle.estimates import Interval, ratio_of, student

TRIM = 0.2
"""Share of the processes that is left out at either end, where there are enough for that to be one."""
LOOKS = (3, 4, 6, 8, 11, 15, 20, 27, 36, 48)
"""Rounds after which a race looks at its data: about a third more each time."""
VAGUE = 0.025
"""Half an interval of 2.5% hides a difference of 3%."""
LITTLE = 0.25
"""Share of what processes differ by that may come of the rounds where more of these are hardly worth their time."""
ENOUGH = LOOKS[0]
"""Quiet rounds from which those in which others had the machine are left out."""
_FAR = 3.0
"""Standard deviations to which a slice that is further from its process's others is brought in."""
_ROUNDS_A_LAG = 8
"""Rounds for each lag at which they are compared with one another."""


def log_interval(observations: Sequence[float], alpha: float) -> Interval:
    """Pseudo-median of `observations` with a two-sided interval of level 1 - `alpha`, on their own (log) scale.

    One observation, or none, gives an infinite interval: nothing can be said yet.
    """
    values = np.asarray(observations, dtype=float)
    n = len(values)
    if n == 0:
        return Interval(math.nan, -math.inf, math.inf)
    walsh = np.sort(((values[:, None] + values[None, :]) / 2)[np.triu_indices(n)])
    estimate = float(np.median(walsh))
    if n == 1:
        return Interval(estimate, -math.inf, math.inf)
    rank = _signed_rank_quantile(n, alpha)
    if rank > 0:
        return Interval(estimate, float(walsh[rank - 1]), float(walsh[len(walsh) - rank]))
    half = student(n - 1, alpha) * float(values.std(ddof=1)) / math.sqrt(n)
    centre = float(values.mean())
    return Interval(estimate, min(centre - half, estimate), max(centre + half, estimate))


def contrast_interval(
    groups: Sequence[Sequence[Mapping[int, float]]], weights: Sequence[float], alpha: float
) -> Interval:
    """The sum of `weights`, which add up to 0, times the means of `groups` of processes, with its two-sided interval of
    level 1 - `alpha`, processes as the units.

    Each item is one process: its log time by round. Any two processes are told apart by the median of their paired
    differences over the rounds that both ran in, which leaves out what a round did to both and is not moved by slices
    in which the machine was taken away; a process counts once, as its place among all of them (`places`). At least two
    in each group. Nothing can be said where no rounds connect them all. What rounds do to whole groups is added
    (`_of_rounds`).

    From three processes on, the degrees of freedom are those of Welch and Satterthwaite, from five on with trimming.

    Of two and two Welch's cannot tell ten times from none where the two of one side differ by a third (interval 0.65
    to 155), as it learns each side's spread from one difference; there Student's takes both sides to spread alike,
    which in simulation claims a difference of equals in 5% where they do, in 8% where one spreads three times as much,
    and in 14% where one does not spread at all.
    """
    estimate, parts = 0.0, list[tuple[float, float, float]]()
    fewest, each_units = min(map(len, groups)), _units(groups)
    if each_units is None:
        return Interval(math.nan, -math.inf, math.inf)
    for units, weight in zip(each_units, weights, strict=True):
        values, count = np.sort(np.asarray(units)), len(units)
        cut = int(TRIM * count) if fewest >= 1 / TRIM else 0
        left = count - 2 * cut
        estimate += weight * float(values[cut : count - cut].mean())
        spread = float(np.clip(values, values[cut], values[count - cut - 1]).var(ddof=1))
        parts.append(((count - 1) * spread, weight**2 / left, left - 1))
    degrees = sum(part[2] for part in parts)
    shared = sum(squares for squares, _, _ in parts) / degrees
    each = [(times * (shared if fewest == 2 else squares / free), free) for squares, times, free in parts]
    if fewest == 2:
        each = [(sum(part for part, _ in each), degrees)]
    each.append(_of_rounds(groups, weights))
    variance = sum(part for part, _ in each)
    if variance <= 0:  # all equal to the last bit
        return Interval(estimate, estimate, estimate)
    freedom = variance**2 / sum(part**2 / free for part, free in each)
    half = student(freedom, alpha) * math.sqrt(variance)
    return Interval(estimate, estimate - half, estimate + half)


def _of_rounds(groups: Sequence[Sequence[Mapping[int, float]]], weights: Sequence[float]) -> tuple[float, float]:
    """What each round does to all processes of a group adds so much to the variance of a contrast of groups; and its
    degrees of freedom. Nothing where there are fewer than `ENOUGH` rounds in which all processes ran.

    Each process is taken from its own mean; what is left is its group's mean in that round and a rest (an analysis of
    variance of two crossed effects, values far out brought in to `_FAR`). The contrast of the groups' means varies from
    round to round by both; less what the rests explain it is what is shared. Rounds in a row may be alike, as what a
    host does lasts longer than one: their covariances at short lags count (W. K. Newey and K. D. West, *Econometrica*
    55, 1987). A process's number is a median over rounds, which has pi / 2 times the variance of a mean.
    """
    rounds = _rounds([process for group in groups for process in group])
    count = len(rounds)
    if count < ENOUGH:
        return 0.0, 1.0
    logs = [np.array([[process[number] for number in rounds] for process in group]) for group in groups]
    apart = [values - np.median(values, axis=1, keepdims=True) for values in logs]
    middle = np.median(np.concatenate(apart), axis=0)
    contrast, rests = np.zeros(count), 0.0
    for values, weight in zip(apart, weights, strict=True):
        off = values - middle
        usual = 1.4826 * float(np.median(np.abs(off[off != 0]))) if off.any() else 0.0
        off = np.clip(off, -_FAR * usual, _FAR * usual)
        off -= off.mean(axis=1, keepdims=True)
        group = off.mean(axis=0)
        contrast += weight * group
        rests += weight**2 * float(((off - group) ** 2).sum()) / ((len(off) - 1) * (count - 1)) / len(off)
    lags = count // _ROUNDS_A_LAG
    covariances = [float(contrast[lag:] @ contrast[: count - lag]) / (count - 1) for lag in range(lags + 1)]
    shared = covariances[0] + 2 * sum((1 - lag / (lags + 1)) * covariances[lag] for lag in range(1, lags + 1))
    shared -= rests * (1 + math.sqrt(2 / (count - 1)))  # with its standard error: what chance alone would show
    return max(0.0, shared) * math.pi / 2 / count, (count - 1) / (lags + 1)


def places(logs: Sequence[Mapping[int, float]]) -> list[dict[int, float]]:
    """Processes by their number, in parties that rounds connect, each with its place: its log time less the mean of its
    party's.

    Where each met all others in a round, that is the mean of its differences from them; where some did not, as on a
    machine that is quiet for one and not for the other, least squares over those that did.
    """
    count = len(logs)
    apart = np.full((count, count), math.nan)
    for one, other in combinations(range(count), 2):
        if common := paired(logs[one], logs[other]):
            apart[one, other] = statistics.median(common)
            apart[other, one] = -apart[one, other]
    met = ~np.isnan(apart)
    reached = met | np.eye(count, dtype=bool)
    for _ in range(count.bit_length()):
        reached = reached.astype(int) @ reached.astype(int) > 0
    links = np.diag(met.sum(1)) - met.astype(float)
    place = np.linalg.pinv(links, rcond=1e-9, hermitian=True) @ np.nansum(apart, axis=1)
    parties = dict.fromkeys(tuple(np.flatnonzero(row).tolist()) for row in reached)
    return [{number: float(place[number]) for number in party} for party in parties]


def _units(groups: Sequence[Sequence[Mapping[int, float]]]) -> list[list[float]] | None:
    """One number for each process of each group, its place among all; None where no rounds connect them all."""
    first, *others = places([process for group in groups for process in group])
    in_turn = iter(first.values())
    return None if others else [[next(in_turn) for _ in group] for group in groups]


def is_exhausted(
    slower: Sequence[Mapping[int, float]], faster: Sequence[Mapping[int, float]], alpha: float, narrow: float
) -> bool:
    """Whether more rounds would hardly narrow `contrast_interval` of the two, or half of it is `narrow` already.

    What rounds leave open of a process is how far one half of them is from the other: the variance of all is a quarter
    of that of the difference. What they leave open of all processes of a group is `_of_rounds`.
    """
    interval = contrast_interval([slower, faster], (1, -1), alpha)
    if interval.high - interval.low < 2 * narrow:
        return True

    def half(rest: int) -> list[list[float]] | None:
        return _units([[{k: v for k, v in process.items() if k % 2 == rest} for process in group]
                       for group in (slower, faster)])  # fmt: skip

    whole, odd, even = _units([slower, faster]), half(1), half(0)
    if whole is None or odd is None or even is None:
        return False
    apart = [(one - other) ** 2 for a, b in zip(odd, even, strict=True) for one, other in zip(a, b, strict=True)]
    variances = [statistics.variance(group) for group in whole]
    of_means = sum(variance / len(group) for variance, group in zip(variances, whole, strict=True))
    shared, _ = _of_rounds([slower, faster], (1, -1))
    return statistics.fmean(apart) / 4 < LITTLE * statistics.fmean(variances) and shared < LITTLE * of_means


def is_vague(speedup: Interval) -> bool:
    """Whether a speed-up is known less well than to a quarter of itself, on the log scale, or to `VAGUE` if that is
    more: "ten times" should not be "four to twenty-four"."""
    low, high = (math.log(max(end, sys.float_info.min)) for end in (speedup.low, speedup.high))
    return (high - low) / 2 > max(VAGUE, abs(math.log(speedup.estimate)) / 4)


def ratio_interval(observations: Sequence[float], alpha: float) -> Interval:
    """`log_interval` as ratios: exp of its three numbers."""
    return exp(log_interval(observations, alpha))


def exp(interval: Interval) -> Interval:
    """An interval of logs as one of ratios."""
    return Interval(math.exp(interval.estimate), math.exp(interval.low), ratio_of(interval.high))


def verdict(speedup: Interval | None, indifference: float) -> str:
    """What may be said of a speed-up: ``faster``, ``slower``, ``same`` (inside 1 +- indifference), ``cannot tell``.

    Faster and slower are claimed where the interval excludes 1 and the estimate itself is no longer indifferent.
    """
    if speedup is None or not speedup.is_known:
        return "cannot tell"
    if 1 / (1 + indifference) <= speedup.low and speedup.high <= 1 + indifference:
        return "same"
    if speedup.low > 1 and speedup.estimate > 1 + indifference:
        return "faster"
    if speedup.high < 1 and speedup.estimate < 1 / (1 + indifference):
        return "slower"
    return "cannot tell"


@lru_cache(maxsize=256)
def _signed_rank_quantile(n: int, alpha: float) -> int:
    """How many Walsh averages to cut from each end: the largest k with P(W < k) <= alpha / 2, 0 if there is none.

    W is the signed-rank statistic of n symmetric observations: each rank is in it or not, as likely.
    """
    chances = np.zeros(n * (n + 1) // 2 + 1)
    chances[0] = 1.0
    for rank in range(1, n + 1):
        chances[rank:] = chances[rank:] + chances[:-rank]
        chances /= 2
    return int(np.searchsorted(np.cumsum(chances), alpha / 2, side="right"))


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    """Differences over the `_rounds` of both."""
    return [first[number] - second[number] for number in _rounds([first, second])]


def _rounds(processes: Sequence[Mapping[int, float]]) -> list[int]:
    """The rounds by which processes are compared, in order: those that all ran in, and of them the quiet ones alone
    where there are enough. Numbers are those of `fettle.measure._trial.by_round`: others had the machine in rounds with
    negative ones."""
    common = set(processes[0]).intersection(*processes[1:])
    quiet = [number for number in common if number > 0]
    return sorted(quiet if len(quiet) >= ENOUGH else common, key=abs)


def are_quiet(one: Sequence[Mapping[int, float]], other: Sequence[Mapping[int, float]]) -> bool:
    """Whether two recipes are compared by quiet rounds alone: each process of one with each of the other."""
    pairs = [_rounds([first, second]) for first in one for second in other]
    return bool(pairs) and all(min(rounds, default=-1) > 0 for rounds in pairs)


def pareto(costs: Sequence[Sequence[float]]) -> set[int]:
    """The places of those that no other beats in every respect; less is better in each."""
    return {
        place
        for place, mine in enumerate(costs)
        if not any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in costs)
    }
