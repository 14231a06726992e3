"""Whether the fit is to be believed: what its residuals say, and how well it predicts experiments that it has not
seen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fettle.studies.model import LEAST_FREEDOM, Model, Vector, statsmodels
from fettle.units import count_text

_SURE = 0.01
"""p-value below which a check raises a doubt."""
_NEEDED = 8
"""Experiments beyond the number of effects from which the shape of residuals says something."""
_LACK = 0.02
"""What the effects leave unexplained, as a share of the response, that is worth a word."""


@dataclass(frozen=True)
class HeldOut:
    """How far off the fit is on a combination when it is fitted to all others."""

    off: float
    """Root mean square of the logarithm's error, as a factor: 1.05 is 5% off."""
    mean_off: float
    """The same for the mean of the others as the prediction."""
    cells: int
    """Combinations that were predicted."""
    alone: int
    """Combinations that the fit cannot say anything of without having seen them."""


@dataclass(frozen=True)
class Doubt:
    """Something that the residuals say against the fit."""

    text: str
    serious: bool = False
    """Whether the effects are then not to be believed; otherwise their intervals are only roughly right."""


@dataclass(frozen=True)
class Checks:
    """What was checked of a fit."""

    explained: float
    """Share of the variance of the log response (coefficient of determination)."""
    scatter: float
    """Standard deviation of an experiment about the fit, as a factor; NaN where no experiments are left over."""
    held_out: HeldOut
    doubts: tuple[Doubt, ...]

    @property
    def believed(self) -> bool:
        """Whether nothing serious is wrong with the fit."""
        return not any(doubt.serious for doubt in self.doubts)


def check(model: Model) -> Checks:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a perfect fit divides by nothing
        explained = float(model.results.rsquared)
        held_out = hold_out(model)
        doubts = tuple(_doubts(model, held_out))
    left = len(model.rows) - len(model.columns)
    scatter = math.exp(min(700.0, math.sqrt(float(model.results.mse_resid)))) if left > 0 else math.nan
    return Checks(explained, scatter, held_out, doubts)


def hold_out(model: Model) -> HeldOut:
    """Leave out each combination in turn, with all its repeats, and predict it from the rest.

    In closed form: the residuals of what is left out are (I - H)^-1 times those of the fit to all, with H its part of
    the hat matrix (Cook and Weisberg, *Residuals and Influence in Regression*, 1982), whose entries are all the same.
    """
    inverse = np.asarray(model.results.normalized_cov_params)
    residuals = model.y - model.x @ np.asarray(model.results.params)
    fitted, plain, alone = [], [], 0
    cells = model.cells()
    for places in cells:
        row = model.x[places[0]]
        own = len(places) * float(row @ inverse @ row)
        if len(places) == len(model.y) or 1 - own < 1e-8:
            alone += 1
            continue
        fitted += list(residuals[places] + own / (1 - own) * residuals[places].mean())
        others = (model.y.sum() - model.y[places].sum()) / (len(model.y) - len(places))
        plain += list(model.y[places] - others)
    return HeldOut(_factor(fitted), _factor(plain), len(cells) - alone, alone)


def _factor(logs: list[float]) -> float:
    return math.exp(min(700.0, math.sqrt(float(np.mean(np.square(logs)))))) if logs else math.nan


def _doubts(model: Model, held_out: HeldOut) -> Iterator[Doubt]:
    left = len(model.rows) - len(model.columns)
    if left < LEAST_FREEDOM and not math.isinf(model.freedom):
        more = f"only {count_text(left, 'experiment')} more than" if left else "no more experiments than"
        yield Doubt(f"{more} effects: their scatter says little of how sure the effects are")
    if held_out.cells and not held_out.off < held_out.mean_off:
        yield Doubt(
            f"a combination that the fit has not seen is predicted to within {held_out.off:.2f}x, no better than by "
            f"the mean of the others ({held_out.mean_off:.2f}x)", serious=True,
        )  # fmt: skip
    yield from _lack_of_fit(model)
    residuals = np.asarray(model.results.resid)
    if left < _NEEDED or float(np.abs(residuals).max()) < 1e-9:
        return
    yield from _shape(model, residuals)


def _lack_of_fit(model: Model) -> Iterator[Doubt]:
    """What main effects and pairs leave over, against what repeats, or the errors of measuring, say it should be."""
    from scipy.special import chdtrc, fdtrc

    residuals = np.asarray(model.results.resid)
    cells = model.cells()
    left = len(model.rows) - len(model.columns)
    repeated = len(model.rows) - len(cells)
    missing = len(cells) - len(model.columns)
    pure = sum(float(np.sum((model.y[places] - model.y[places].mean()) ** 2)) for places in cells)
    errors = np.array([row.errors.get(model.response.name, math.nan) for row in model.rows])
    if missing > 0 and repeated >= LEAST_FREEDOM and pure > 0:
        lack = max(0.0, float(residuals @ residuals) - pure) / missing
        p = float(fdtrc(missing, repeated, lack / (pure / repeated)))
        size = math.sqrt(max(0.0, lack - pure / repeated) * missing / len(cells))
        yield from _lacking(p, size)
    elif left > 0 and np.isfinite(errors).all() and errors.any():
        errors = np.maximum(errors, float(np.median(errors)))  # or a few small errors would decide everything
        squares = float(np.sum((residuals / errors) ** 2))
        size = math.sqrt(max(0.0, float(residuals @ residuals) / left - float(np.mean(errors**2))))
        yield from _lacking(float(chdtrc(left, squares)), size)


def _lacking(p: float, size: float) -> Iterator[Doubt]:
    if p < _SURE and size > _LACK:
        off = math.exp(min(700.0, size))
        yield Doubt(
            f"effects and pairs do not explain what was measured: combinations are {off:.2f}x off where repeats agree, "
            "so three factors act together or something else changed", serious=off > 1.1,
        )  # fmt: skip


def _externally_studentized(results: Any) -> Vector:
    """Each residual over its standard error in the fit without it, in closed form: statsmodels fits once for each.

    Source: Cook and Weisberg, Residuals and Influence in Regression, 1982, 2.2.2.
    """
    internal: Vector = np.asarray(results.get_influence().resid_studentized_internal)
    left = float(results.df_resid)
    return internal * np.sqrt((left - 1) / np.maximum(left - internal**2, 1e-12))


def _shape(model: Model, residuals: Vector) -> Iterator[Doubt]:
    """Scatter that is not alike everywhere, single experiments that are far off, and drift."""
    statsmodels()
    from scipy.special import stdtr
    from statsmodels.stats.diagnostic import het_breuschpagan

    varying = [place for place in range(1, model.x.shape[1]) if len(model.columns[place]) == 1]
    if len(model.rows) > 2 * len(varying):
        p = float(het_breuschpagan(residuals, np.column_stack([np.ones(len(residuals)), model.x[:, varying]]))[1])
        if p < _SURE:
            yield Doubt(
                f"experiments do not scatter alike everywhere (Breusch-Pagan p = {p:.1g}): intervals are too wide in "
                "some places and too narrow in others"
            )
    left = float(len(model.rows) - len(model.columns) - 1)
    outliers = _externally_studentized(model.results)
    far = [int(place) for place in np.argsort(-np.abs(np.nan_to_num(outliers)))
           if 2 * float(stdtr(left, -abs(outliers[place]))) * len(outliers) < _SURE]  # fmt: skip
    if far:
        named = ", ".join(" ".join(f"{n}={model.rows[place].levels[n]}" for n in model.levels) for place in far[:3])
        more = f" and {len(far) - 3} more" if len(far) > 3 else ""
        yield Doubt(f"far from what the rest says: {named}{more}", serious=len(far) > 0.1 * len(outliers))
    order = np.arange(len(residuals), dtype=np.float64)
    slope = float(np.corrcoef(order, residuals)[0, 1])
    p = float(2 * stdtr(left, -abs(slope) * math.sqrt(left / max(1e-12, 1 - slope**2))))
    if p < _SURE:
        yield Doubt(
            f"residuals change with the order of the experiments (correlation {slope:+.2f}): the machine drifted, or "
            "something that is not a factor here changed"
        )
