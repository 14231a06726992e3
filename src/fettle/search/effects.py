"""Effects: what each level brings on average, and which pairs bring more or less together than apart.

Least squares on the logarithm of time, so effects are ratios and multiply. Levels are compared as in sum coding:
against the average over the levels of the other techniques, each counting alike however often it was tried.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from fettle.measure import Interval, Trial

Vector = npt.NDArray[np.float64]
Reading = Literal["helped", "hurt", "same", "cannot tell"]


@dataclass(frozen=True)
class Effect:
    """What one level brings (one entry in `levels`), or what two bring beyond the product of their own effects."""

    levels: tuple[tuple[str, str], ...]
    ratio: Interval | None
    """Times faster; above 1 is a gain. None where the trials cannot tell it."""
    reading: Reading
    trials: int
    """How many trials held all of these levels."""

    @property
    def label(self) -> str:
        return " × ".join(f"{name}={level}" for name, level in self.levels)


def effects(
    trials: Sequence[Trial],
    *,
    defaults: dict[str, str] | None = None,
    interactions: bool = True,
    confidence: float = 0.95,
    zone: float = 0.01,
) -> list[Effect]:
    """Main effects, then two-way interactions, of the trials that ran; inaccurate ones count, they have a time.

    A pair of techniques enters as an interaction only when all its combinations of levels were measured, otherwise it
    reads ``cannot tell``. `zone` is what does not matter: an effect is the ``same`` when its whole interval is inside.
    """
    ran = [trial for trial in trials if trial.status != "failed" and math.isfinite(_log_time(trial))]
    names = sorted({name for trial in ran for name in trial.recipe.levels})
    held = [{name: trial.recipe.levels.get(name, (defaults or {}).get(name, "")) for name in names} for trial in ran]
    levels = {
        name: sorted({row[name] for row in held}, key=lambda x: (x != (defaults or {}).get(name, ""), x))
        for name in names
    }
    varied = [name for name in names if len(levels[name]) > 1]
    if not varied:
        return []
    pairs = list(combinations(varied, 2)) if interactions else []
    full = [pair for pair in pairs if _all_seen(held, levels, pair)]
    model = _Model(held, np.array([_log_time(trial) for trial in ran]), levels, varied, full)

    found: list[Effect] = []
    contrast: Vector | None
    for name in varied:
        for level in levels[name][1:]:
            contrast = model.row({name: level}) - model.row({name: levels[name][0]})
            found.append(_effect(model, contrast, ((name, level),), held, confidence, zone))
    for a, b in pairs:
        for one in levels[a][1:]:
            for two in levels[b][1:]:
                at = ((a, one), (b, two))
                contrast = model.interaction(at, (levels[a][0], levels[b][0])) if (a, b) in full else None
                found.append(_effect(model, contrast, at, held, confidence, zone))
    return found


class _Model:
    """Least squares with sum coding; contrasts that the data cannot tell are recognised, not guessed."""

    def __init__(
        self, held: list[dict[str, str]], y: Vector, levels: dict[str, list[str]], names: list[str],
        pairs: list[tuple[str, str]],
    ) -> None:  # fmt: skip
        self.levels, self.names, self.pairs = levels, names, pairs
        x = np.array([self.row(row) for row in held])
        self.inverse = np.linalg.pinv(x.T @ x, rcond=1e-10, hermitian=True)
        self.tellable = self.inverse @ (x.T @ x)
        self.beta = self.inverse @ x.T @ y
        self.freedom = len(y) - int(np.linalg.matrix_rank(x))
        self.variance = float(np.sum((y - x @ self.beta) ** 2) / self.freedom) if self.freedom > 0 else math.nan

    def row(self, at: dict[str, str]) -> Vector:
        """The model's row at these levels, averaged over the techniques that are not named."""
        code = {name: self._code(name, at.get(name)) for name in self.names}
        parts = [np.ones(1), *code.values(), *(np.outer(code[a], code[b]).ravel() for a, b in self.pairs)]
        return np.concatenate(parts)

    def interaction(self, at: tuple[tuple[str, str], ...], base: tuple[str, str]) -> Vector:
        """Both together against each alone: a difference of differences."""
        (a, one), (b, two) = at
        both, none = self.row({a: one, b: two}), self.row({a: base[0], b: base[1]})
        result: Vector = both - self.row({a: one, b: base[1]}) - self.row({a: base[0], b: two}) + none
        return result

    def _code(self, name: str, level: str | None) -> Vector:
        """Sum coding: unit vectors, the last level all -1; the average over levels is 0."""
        size = len(self.levels[name]) - 1
        if level is None:
            return np.zeros(size)
        place = self.levels[name].index(level)
        return -np.ones(size) if place == size else np.eye(size)[place]


def _effect(
    model: _Model, contrast: Vector | None, at: tuple[tuple[str, str], ...], held: list[dict[str, str]],
    confidence: float, zone: float,
) -> Effect:  # fmt: skip
    count = sum(all(row[name] == level for name, level in at) for row in held)
    if contrast is None or not np.allclose(contrast @ model.tellable, contrast, atol=1e-6):
        return Effect(at, None, "cannot tell", count)
    gain = -float(contrast @ model.beta)
    if model.freedom <= 0:
        return Effect(at, Interval(math.exp(gain), 0.0, math.inf), "cannot tell", count)
    error = math.sqrt(max(0.0, model.variance * float(contrast @ model.inverse @ contrast)))
    reach = float(stdtrit(model.freedom, (1 + confidence) / 2)) * error
    ratio = Interval(*(math.exp(gain + side * reach) for side in (0, -1, 1)))
    return Effect(at, ratio, _reading(gain, reach, math.log1p(zone)), count)


def _reading(gain: float, reach: float, zone: float) -> Reading:
    """An effect matters when it is beyond the zone and not chance; it is the same when it cannot be beyond it."""
    if abs(gain) + reach <= zone:
        return "same"
    if abs(gain) > zone and abs(gain) > reach:
        return "helped" if gain > 0 else "hurt"
    return "cannot tell"


def _all_seen(held: list[dict[str, str]], levels: dict[str, list[str]], pair: tuple[str, str]) -> bool:
    seen = {(row[pair[0]], row[pair[1]]) for row in held}
    return len(seen) == len(levels[pair[0]]) * len(levels[pair[1]])


def _log_time(trial: Trial) -> float:
    """Log of the time per sample; from the paired speed-up if any, which the machine's pace affects less."""
    if trial.speedup is not None and 0 < trial.speedup.estimate < math.inf:
        return -math.log(trial.speedup.estimate)
    return math.log(trial.time_ms / trial.samples) if trial.time_ms > 0 else math.nan
