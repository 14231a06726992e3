"""The accuracy guard of training: are the losses of a recipe as good as the baseline's?

The yardstick is measured: the baseline trains from other seeds too, and how far *their* losses are from its own is
what chance does. A recipe, from the same seed on the same data, has to stay nearer to the baseline than two seeds
typically are to each other: the median over all pairs of seeds, which does not shrink or grow with their number. The
distance of two curves is the mean absolute difference of their losses, step by step.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

SEEDS = (1, 2, 3, 4)
"""The other seeds that the baseline is trained from."""
_NORM_FACTOR = 2.0
"""Gradient norms may differ by this factor, or by what the other seeds' norms differ by where that is more."""


@dataclass(frozen=True)
class Curve:
    """What one short training run gave, step by step."""

    losses: Sequence[float]
    grad_norms: Sequence[float]
    """Total L2 norm of the gradients that the optimizer was given, after clipping."""


@dataclass(frozen=True)
class Band:
    """The baseline's curve and those of other seeds."""

    baseline: Curve
    others: Sequence[Curve]

    @property
    def spread(self) -> float:
        """The typical distance of two seeds."""
        return self.spread_of(1)

    def spread_of(self, factor: int) -> float:
        """The same where `factor` steps are taken together."""
        curves = [joined(curve.losses, factor) for curve in (self.baseline, *self.others)]
        return statistics.median(distance(one, other) for one, other in itertools.combinations(curves, 2))


@dataclass(frozen=True)
class Judged:
    """A recipe's curve against the band."""

    share: float
    """Distance from the baseline over the band's spread: below 1 is inside. NaN where it cannot be judged."""
    largest: float
    """Largest difference of a loss from the baseline's at the same step."""
    problem: str = ""


def distance(losses: Sequence[float], baseline: Sequence[float]) -> float:
    """Mean absolute difference of two curves over the steps that both have."""
    pairs = list(zip(losses, baseline, strict=False))
    return sum(abs(one - other) for one, other in pairs) / len(pairs)


def judge_curve(curve: Curve, band: Band, factor: int = 1) -> Judged:
    """Judge a recipe's losses; with `factor` each of its steps stands for so many steps of the baseline."""
    for name, values in (("loss", curve.losses), ("gradient norm", curve.grad_norms if factor == 1 else ())):
        bad = next((i for i, value in enumerate(values) if not math.isfinite(value)), None)
        if bad is not None:
            return Judged(math.nan, math.nan, f"the {name} of step {bad + 1} is {values[bad]}")
    wanted = joined(band.baseline.losses, factor)
    if len(curve.losses) < 2 or len(wanted) < 2:
        return Judged(math.nan, math.nan, f"too few steps to judge a batch of {factor} times the size")
    spread = band.spread_of(factor)
    far = distance(curve.losses, wanted)
    share = far / spread if spread > 0 else (0.0 if far == 0 else math.inf)
    largest = max(abs(one - other) for one, other in zip(curve.losses, wanted, strict=False))
    return Judged(share, largest, _norms_problem(curve, band) if factor == 1 else "")


def joined(losses: Sequence[float], count: int) -> list[float]:
    """The means of `count` losses each; an incomplete last group is left out."""
    return [statistics.fmean(losses[i : i + count]) for i in range(0, len(losses) - count + 1, count)]


def _norms_problem(curve: Curve, band: Band) -> str:
    ratio = _norm_ratio(curve, band.baseline)
    others = [_norm_ratio(other, band.baseline) for other in band.others]
    allowed = max([_NORM_FACTOR, *(max(r, 1 / r if r else math.inf) for r in others)])
    if 1 / allowed <= ratio <= allowed:
        return ""
    return f"the gradient norms are {ratio:.2g} times the baseline's, other seeds' differ by {allowed:.2g} at most"


def _norm_ratio(curve: Curve, baseline: Curve) -> float:
    """Typical ratio of the gradient norms of two curves: exp of the median of the logs."""
    pairs = zip(curve.grad_norms, baseline.grad_norms, strict=False)
    logs = [math.log(one / other) if one > 0 else -math.inf for one, other in pairs if other > 0]
    return math.exp(statistics.median(logs)) if logs else 1.0
