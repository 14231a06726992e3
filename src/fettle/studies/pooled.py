"""The model where several machines measured: each machine is a draw from machines like it (a random effect).

Log response = fixed effects + what a machine adds to all of its experiments + what it adds to each level + what it adds
to each pair + scatter: a linear mixed model (Laird and Ware, *Biometrics* 38, 1982) whose variances are statsmodels'
restricted maximum likelihood. Each level has a variance of its own; all pairs share one. So an interval says what to
expect on one more machine of that sort, on average, and not only on these.

Few machines show little of how machines differ: a contrast's degrees of freedom are Satterthwaite's (*Biometrics
Bulletin* 2, 1946), between those of the scatter and the number of machines less one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fettle.errors import first_line
from fettle.studies.effects import ZONE
from fettle.studies.model import Level, Model, Vector, fit, statsmodels
from fettle.studies.table import MACHINE, Response, Table

LEAST_MACHINES = 3
"""Machines from which how they differ can be estimated at all."""
_SAID = 3
_LEAST = 1e-4
"""Standard deviations (of a log) below this count as zero; of gains those below `ZONE` are not reported."""


@dataclass(frozen=True)
class Pooled:
    """The fit over all machines."""

    model: Model
    """Its factors are all but the machine; its numbers hold for an average machine."""
    spreads: Mapping[Level, float]
    """By level: how much its gain differs from machine to machine, as a factor: 1.2 is a standard deviation of 20%."""
    machines: int

    def __str__(self) -> str:
        """What was pooled, for people."""
        sentence = f"{self.machines} machines are pooled by a mixed model: effects are those of an average machine"
        if not self.spreads:
            return f"{sentence}, and no level's gain differs from machine to machine beyond the scatter."
        ranked = sorted(self.spreads.items(), key=lambda item: -item[1])[:_SAID]
        return (
            f"{sentence}; from one to another gains differ by "
            + ", ".join(f"{spread:.2f}x ({'='.join(level)})" for level, spread in ranked)
            + " (standard deviations)."
        )


def pool(table: Table, group: str, response: Response) -> Pooled | str:
    """Fit the mixed model; a sentence that says why there is none where it cannot be had."""
    apart = replace(table, factors={name: levels for name, levels in table.factors.items() if name != MACHINE})
    model = fit(apart, group, response)
    if model is None:
        return ""
    machines = [row.levels[MACHINE] for row in model.rows]
    count = len(set(machines))
    if count < LEAST_MACHINES:
        return (
            f"{count} machines are too few to tell how machines differ: {MACHINE} is an ordinary factor, and intervals "
            "hold for these machines only."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a variance of zero is on the boundary, which is not a fault
            fitted = _fit(model, np.array(machines))
    except (np.linalg.LinAlgError, ValueError, FloatingPointError) as error:
        return _why_not_pooled(first_line(error))
    return fitted or _why_not_pooled("it did not converge")


def _why_not_pooled(why: str) -> str:
    return (
        f"the mixed model could not be fitted ({why}): {MACHINE} is an ordinary factor, and intervals hold for these "
        "machines only."
    )


def _fit(model: Model, machines: Any) -> Pooled | None:
    statsmodels()
    from statsmodels.regression.mixed_linear_model import MixedLM, VCSpec

    mains = [place for place, term in enumerate(model.columns) if len(term) == 1]
    pairs = [place for place, term in enumerate(model.columns) if len(term) == 2]
    parts = [np.ones((len(machines), 1)), *(model.x[:, [place]] for place in mains)]
    parts += [model.x[:, pairs]] if pairs else []
    rows = [np.flatnonzero(machines == name) for name in sorted(set(machines))]
    names = [str(place) for place in range(len(parts))]
    mats = [[part[places][:, part[places].any(axis=0)] for places in rows] for part in parts]  # what a machine ran
    columns = [[[str(one) for one in range(mat.shape[1])] for mat in part] for part in mats]
    # By lines, as variances often end at zero, where gradients mislead.
    result = MixedLM(model.y, model.x, machines, exog_vc=VCSpec(names, columns, mats)).fit(reml=True, method="powell")
    scale, spread = float(result.scale), np.maximum(0.0, np.asarray(result.vcomp, dtype=np.float64))
    if not (result.converged and scale > 0 and np.isfinite(spread).all()):
        return None
    drawn = [(math.sqrt(one), part * (machines == name)[:, None])
             for one, part in zip(spread, parts, strict=True) for name in sorted(set(machines))]  # fmt: skip
    # The variance is the scatter's times I + W W'. Its inverse root, by the singular values of W, needs no matrix as
    # large as the square of the rows.
    u, s, _ = np.linalg.svd(np.hstack([sd / math.sqrt(scale) * own for sd, own in drawn]), full_matrices=False)
    shrunk = u * (1 - 1 / np.hypot(1, s))
    x, y = (values - shrunk @ (u.T @ values) for values in (model.x, model.y))
    results = statsmodels().api.OLS(y, x).fit()  # generalised least squares
    inverse: Vector = np.linalg.pinv(x)
    solve = inverse - (inverse @ u) @ shrunk.T
    left = len(machines) - np.linalg.matrix_rank(np.hstack([model.x, *(own for sd, own in drawn if sd > _LEAST)]))
    pooled = replace(
        model, results=results, covariance=scale * inverse @ inverse.T, freedom=float(max(1, left)),
        scatter=scale * solve @ solve.T, draws=len(rows),
    )  # fmt: skip
    spreads = {
        model.columns[place][0]: math.exp(math.sqrt(one))
        for place, one in zip(mains, spread[1:], strict=False)
        if math.sqrt(one) > ZONE
    }
    return Pooled(pooled, spreads, len(rows))
