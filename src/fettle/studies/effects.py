"""Effects: what each level brings, which pairs bring more or less together than apart, and how sure that is.

Several things are asked of one table, so some would look real by chance: what is claimed (`Effect.reading`) goes by
p-values after Holm (*Scand. J. Statist.* 6, 1979), which bounds the chance of even one false claim in a fit. It is
preferred to Benjamini and Hochberg's rate of false discoveries because each claim here becomes a sentence that somebody
acts on, and a fit has tens of effects, not thousands. Intervals are each for itself, at the level that they name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fettle.measure import Interval
from fettle.studies.model import ALPHA, Estimate, Level, Model, Term, holds

Reading = Literal["helped", "hurt", "same", "cannot tell"]
ZONE = 0.01
"""Effects below this do not matter."""


@dataclass(frozen=True)
class Effect:
    """What one level brings over how its factor was given (one entry in `levels`), or what two bring beyond the product
    of what each brings without the other."""

    levels: Term
    ratio: Interval | None
    """Times better; above 1 is a gain. None where the experiments cannot show it."""
    reading: Reading
    experiments: int
    """How many held all of these levels."""
    p: float = math.nan
    """After Holm, over all effects of the fit."""
    why: str = ""
    """Why it is unknown, where the reason is known."""

    @property
    def label(self) -> str:
        """``compile=default × channels_last=on``."""
        return " × ".join(f"{name}={level}" for name, level in self.levels)

    @property
    def is_claimed(self) -> bool:
        """Whether it is claimed: larger than what matters, and no chance."""
        return self.reading in ("helped", "hurt")

    @property
    def certain(self) -> float:
        """The part of the gain or loss, as a logarithm, that the interval vouches for."""
        if self.ratio is None or not self.is_claimed:
            return 0.0
        ends = (abs(math.log(self.ratio.low)), abs(math.log(self.ratio.high))) if self.ratio.low > 0 else (0.0,)
        return min(ends)


def effects(model: Model) -> list[Effect]:
    """Main effects, then two-way interactions. Those of factors in `Model.apart` alone have no interval."""
    gains = {term: model.main(term[0]) if len(term) == 1 else model.gain({term: 1.0}) for term in model.terms}
    for term, gain in gains.items():
        if gain is not None and all(name in model.apart for name, _ in term):
            gains[term] = replace(gain, error=math.inf)
    p_values = {term: gain.p() for term, gain in gains.items() if gain is not None}
    known = [term for term, p in p_values.items() if math.isfinite(p)]
    adjusted = dict(zip(known, _holm([p_values[term] for term in known]), strict=True))
    return [_effect(model, term, gain, adjusted.get(term, math.nan)) for term, gain in gains.items()]


def at_each(model: Model, stage: str) -> dict[str, dict[Level, Interval]]:
    """By level of one factor, what each level of the others, but for those in `Model.apart`, brings there, on average
    over the rest."""
    return {
        place: {
            (name, level): _interval(gain)
            for name, levels in model.levels.items() if name not in {stage, *model.apart}
            for level in levels[1:] if (gain := model.main((name, level), (stage, place))) is not None
        }
        for place in model.levels[stage]
    }  # fmt: skip


def _effect(model: Model, term: Term, gain: Estimate | None, p: float) -> Effect:
    """An effect, and what may be claimed by its p-value after Holm."""
    count, least = sum(holds(row, term) for row in model.rows), math.log1p(ZONE)
    reading: Reading = "cannot tell"
    if gain is None:
        return Effect(term, None, reading, count, why=model.left_out.get(term, ""))
    if abs(gain.gain) + gain.reach <= least:
        reading = "same"
    elif abs(gain.gain) > least and p < ALPHA:
        reading = "helped" if gain.gain > 0 else "hurt"
    return Effect(term, _interval(gain), reading, count, p)


def _holm(p: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values (that of statsmodels collects garbage at each call, a hundred times the work)."""
    order = np.argsort(p)
    scaled = np.array(p)[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(scaled))
    return [float(value) for value in adjusted]


def _interval(gain: Estimate) -> Interval:
    estimate, low, high = (math.exp(max(-700.0, min(700.0, gain.gain + side * gain.reach))) for side in (0, -1, 1))
    return Interval(estimate, low, high) if math.isfinite(gain.reach) else Interval(estimate, 0.0, math.inf)


def shares(model: Model) -> Mapping[tuple[str, ...], float]:
    """The share of the response's variance that each factor and each pair of factors explains, largest first.

    Sums of squares of type II (Yates, *J. Amer. Statist. Assoc.* 29, 1934): what a term adds to all that do not contain
    it. They sum to at most the coefficient of determination where the design is balanced, else to less or more.
    """
    total = float(np.sum((model.y - model.y.mean()) ** 2))
    factors = [tuple(name for name, _ in column) for column in model.columns]
    inverse, found = np.asarray(model.results.normalized_cov_params), np.asarray(model.results.params)

    def without(places: list[int]) -> float:
        """Squares that a fit without these columns leaves over beyond those of this one."""
        return float(found[places] @ np.linalg.solve(inverse[np.ix_(places, places)], found[places])) if places else 0.0

    by_term = {}
    for term in filter(None, dict.fromkeys(factors)):
        containing = [place for place, names in enumerate(factors) if set(term) <= set(names)]
        others = [place for place in containing if factors[place] != term]
        by_term[term] = max(0.0, (without(containing) - without(others)) / total)
    return dict(sorted(by_term.items(), key=lambda item: -item[1]))
