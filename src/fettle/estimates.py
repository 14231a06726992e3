"""Statistics that several rooms need: intervals, Student's t, the interval of a mean, quantiles, ratios of logs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST_APART = 20
"""Times that the ends of a ratio's interval may lie apart: of two or three rounds they can reach from nothing to
thousands, and then no figure is shown of it and nothing claimed."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval, at the level that the race was run with."""

    estimate: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether a ratio is known well enough to be shown and to claim something."""
        return 0 < self.high <= MOST_APART * self.low

    @property
    def text(self) -> str:
        """What is shown of a race's ratio: ``9.91x [9.60, 10.22]``, or ``too few rounds``."""
        return str(self) if self.is_known else "too few rounds"

    def __str__(self) -> str:
        return f"{self.estimate:.2f}x [{self.low:.2f}, {self.high:.2f}]"


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
