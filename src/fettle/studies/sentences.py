"""What a fit says, in sentences: each number is a contrast of the fit, and surprises come first.

A surprise is what top-N lists do not show: a level that hurts, one that helps only beside another, one that brings
nothing more once another is there. They are put in the order of what their intervals vouch for, so that a large effect
that might be chance does not come before a smaller one that is sure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fettle.measure import Interval
from fettle.studies.effects import ZONE, Effect
from fettle.studies.model import Estimate, Level, Model, Term

_PART = 1 / 3
"""Share of what a level gains in one place: where it gains less in the other, it is said to need that, or to be
cancelled."""
Kind = Literal["hurts", "needs", "cancels", "turns", "more", "less", "helps"]


@dataclass(frozen=True)
class Sentence:
    """One thing that the fit says."""

    kind: Kind
    text: str
    levels: Term
    """What it is about. Of two levels the first is what is said to be worth something."""
    ratios: tuple[float, ...]
    """The numbers in the text: on average; or alone, and after the other level."""
    size: float
    """The part of it, as a logarithm, that the interval vouches for."""

    @property
    def is_surprise(self) -> bool:
        """Whether it is anything but a gain."""
        return self.kind != "helps"


def sentences(model: Model, effects: Sequence[Effect]) -> list[Sentence]:
    """Surprises, the surest and largest first, then what helps."""
    claimed = [effect for effect in effects if effect.is_claimed]
    said = [_average(model, effect) if len(effect.levels) == 1 else _pair(model, effect) for effect in claimed]
    return sorted(said, key=lambda sentence: (not sentence.is_surprise, -sentence.size))


def _average(model: Model, effect: Effect) -> Sentence:
    assert effect.ratio is not None
    kind: Kind = "hurts" if effect.reading == "hurt" else "helps"
    verb = "hurts:" if kind == "hurts" else "is worth"
    worth = f"{effect.label} {verb} {times(effect.ratio.estimate)} {between(effect.ratio)}"
    text = f"{worth} on average" if len(model.levels) > 1 else worth
    return Sentence(kind, text, effect.levels, (effect.ratio.estimate,), effect.certain)


def _pair(model: Model, effect: Effect) -> Sentence:
    """The more telling of the two ways to say it: what needs, what turns, what cancels, what grows or
    shrinks."""
    one, two = effect.levels
    ways = [_way(model, effect, a, b) for a, b in ((one, two), (two, one)) if a[0] not in model.apart]
    order: list[Kind] = ["needs", "turns", "cancels", "more", "less"]
    # Of the same kind, the one about the level that is worth less alone.
    return min(ways, key=lambda way: (order.index(way.kind), abs(way.ratios[0] - 1)))


def _way(model: Model, effect: Effect, level: Level, other: Level) -> Sentence:
    alone, beside = model.beside(level, None), model.beside(level, other)
    assert alone is not None  # a pair stands in the model only after both of its levels
    assert beside is not None
    name, stage = "=".join(level), "=".join(other)
    before, after = _ratio(alone), _ratio(beside)
    when = "at" if other[0] in model.apart else "after"
    numbers = f"{times(before)} alone, {times(after)} {when} {stage}"
    kind: Kind
    if _helps(beside) and not _helps(alone) and alone.gain < _PART * beside.gain:
        kind, text = "needs", f"{name} needs {stage}: worth {numbers}"
    elif _helps(alone) and -beside.gain > max(ZONE, beside.reach):
        kind, text = "turns", f"{name} helps alone and hurts {when} {stage}: worth {numbers}"
    elif _helps(alone) and not _helps(beside) and beside.gain < _PART * alone.gain:
        kind, text = "cancels", f"{name} brings nothing more {when} {stage}: worth {numbers}"
    else:
        kind, text = "more" if after > before else "less", f"{name} is worth {numbers}"
    return Sentence(kind, text, (level, other), (before, after), effect.certain)


def _helps(gain: Estimate) -> bool:
    return gain.gain > max(ZONE, gain.reach)


def _ratio(gain: Estimate) -> float:
    return math.exp(max(-700.0, min(700.0, gain.gain)))


def between(ratio: Interval) -> str:
    """An interval in its brackets."""
    return f"[{times(ratio.low)[:-1]}, {times(ratio.high)[:-1]}]"


def times(ratio: float) -> str:
    """A ratio with the digits that it needs: ``2.20x``, ``1/2,000x``."""
    if 0 < ratio < 0.001:
        return f"1/{1 / ratio:,.0f}x"
    return f"{ratio:.2f}x" if 0.1 <= ratio < 100 else f"{ratio:.3g}x"
