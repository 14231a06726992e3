"""Which token comes next: the likeliest, or one that is drawn; and how likely it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from fettle.package.handlers.parts import Array, softmax

_FEW = 1024
"""Tokens that nearly always hold what `top_p` asks for."""


LogitBias = Annotated[dict[Annotated[int, Meta(ge=0)], Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)]
"""By token, what is added to its logit."""


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a text is to be written. What is left out of the distribution is left out in the order of these fields."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """New tokens at most."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """0: always the likeliest token. Else tokens are drawn from softmax(logits / temperature)."""
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Leave out tokens whose probability is less than this share of the likeliest one's."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Draw from so many likeliest tokens; 0: from all."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Draw from the fewest likeliest tokens whose probabilities add up to this."""
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Taken off the logit of every token that the answer has already."""
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Taken off as often as the answer has the token."""
    logit_bias: LogitBias = {}
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop: tuple[Annotated[str, Meta(min_length=1, max_length=200)], ...] = ()
    """The text ends before the first of these."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Tell the log-probability of each token, and of so many likeliest ones."""
    ignore_eos: bool = False
    """Go on until `max_tokens`: for measurements."""

    def __post_init__(self) -> None:
        if len(self.stop) > 16:
            raise ValueError("stop is at most 16 strings")

    @property
    def plain(self) -> bool:
        """Whether the next token is the logits' own argmax."""
        return self.temperature == 0 and not (self.presence_penalty or self.frequency_penalty or self.logit_bias)


def choose(logits: Array, wanted: Sampling, random: np.random.Generator, written: Sequence[int]) -> int:
    """The next token by its logits [vocabulary], after the tokens `written` of this answer."""
    scores = logits.astype(np.float64)
    for one, bias in wanted.logit_bias.items():
        scores[one] += bias
    if wanted.presence_penalty or wanted.frequency_penalty:
        tokens, counts = np.unique(np.array(written, np.int64), return_counts=True)
        scores[tokens] -= wanted.presence_penalty + wanted.frequency_penalty * counts
    if wanted.temperature == 0:
        return int(scores.argmax())
    kept: Any = None
    if 0 < wanted.top_k < len(scores):
        kept = np.argpartition(-scores, wanted.top_k)[: wanted.top_k]
        scores = scores[kept]
    with np.errstate(over="ignore"):  # the least temperatures: the likeliest stays at 0, all others at -infinity
        scores = (scores - scores.max()) / wanted.temperature
    if wanted.min_p:
        scores[scores < np.log(wanted.min_p)] = -np.inf
    probabilities = softmax(scores)
    if wanted.top_p < 1:
        likeliest = nucleus(probabilities, wanted.top_p)
        kept = likeliest if kept is None else kept[likeliest]
        probabilities = probabilities[likeliest] / probabilities[likeliest].sum()
    place = random.choice(len(probabilities), p=probabilities)
    return int(place if kept is None else kept[place])


def nucleus(probabilities: Array, top_p: float) -> Array:
    """The fewest likeliest tokens whose probabilities add up to `top_p`, the likeliest first."""
    for most in (_FEW, len(probabilities)):  # to sort a vocabulary takes as long as a step of a small model
        most = min(most, len(probabilities))
        best = np.argpartition(-probabilities, most - 1)[:most]
        best = best[np.argsort(-probabilities[best], kind="stable")]
        sums = probabilities[best].cumsum()
        if sums[-1] >= top_p:
            break
    return best[: int(np.searchsorted(sums, top_p)) + 1]


def log_probabilities(logits: Array, token: int, most: int) -> tuple[float, list[tuple[int, float]]]:
    """A token's by the model's own logits [vocabulary], and those of the `most` likeliest ones, the likeliest first."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    most = min(most, len(scores))
    best: Any = np.argpartition(-scores, most - 1)[:most] if most else np.array([], np.int64)
    best = best[np.argsort(-scores[best], kind="stable")]
    return float(scores[token]), [(int(other), float(scores[other])) for other in best]
