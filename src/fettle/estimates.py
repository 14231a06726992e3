"""Statistics that several rooms need: Student's t, the interval of a mean, quantiles, ratios of logs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def student(freedom: float, alpha: float) -> float:
    """Student's quantile for a two-sided interval of level 1 - `alpha`."""
    from scipy.special import stdtrit  # scipy.stats takes a second more to import

    return float(stdtrit(freedom, 1 - alpha / 2))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half its 95% interval, which is infinite where there is one value; NaN of nothing."""
    if len(values) < 2:
        return (values[0] if values else math.nan), math.inf
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), student(len(values) - 1, 0.05) * error


def nearest_rank(values: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie; NaN of nothing."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else math.nan


def ratio_of(log: float) -> float:
    """The ratio of a logarithm: infinite where a float cannot hold it, or for NaN."""
    return math.exp(log) if log < 700 else math.inf
