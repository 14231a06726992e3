"""Statistics that several rooms need: Student's t, the interval of a mean, quantiles, ratios of logs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def student(freedom: float, alpha: float) -> float:
    """Student's quantile for a two-sided interval of level 1 - `alpha`."""
    from scipy.special import stdtrit  # scipy.stats takes a second more to import

    return float(stdtrit(freedom, 1 - alpha / 2))


def mean_interval(values: Sequence[float], common: float = 0.0, freedom: int = 1) -> tuple[float, float]:
    """The mean and half its 95% interval, which is infinite where there is one value; NaN of nothing.

    `common` is the variance of what all values have in common, known with so many degrees of freedom: those of the mean
    are then Satterthwaite's (*Biometrics Bulletin* 2, 1946).
    """
    if len(values) < 2:
        return (values[0] if values else math.nan), math.inf
    own, left = statistics.variance(values) / len(values), len(values) - 1
    share = common / (own + common) if common else 0.0
    degrees = 1 / ((1 - share) ** 2 / left + share**2 / freedom)
    return statistics.fmean(values), student(degrees, 0.05) * math.sqrt(own + common)


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie; NaN of nothing."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else math.nan


def ratio_of(log: float) -> float:
    """The ratio of a logarithm: infinite where a float cannot hold it, or for NaN."""
    return math.exp(log) if log < 700 else math.inf
