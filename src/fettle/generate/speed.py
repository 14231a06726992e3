"""The time of a text taken apart: to its first token, and from each token to the next."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fettle.estimates import nearest_rank
from fettle.workload import wait_for

PARTS = ("text", "ttft", "tpot")
"""What a race goes by: the whole text, the time to its first token, or all that follows."""


@dataclass(frozen=True)
class Generation:
    """What writing took, and what it moved. NaN means: not measured."""

    ttft_ms: float = math.nan
    """Time to the first token, the mean over the prompts of each one's median."""
    tpot_ms: float = math.nan
    """Time per output token after the first, of one row: the median text."""
    text_ms: float = math.nan
    """Time of a whole text, elapsed: the mean over the prompts of each one's median."""
    itl_p50_ms: float = math.nan
    """Time from one step to the next: percentiles over all steps."""
    itl_p90_ms: float = math.nan
    itl_p99_ms: float = math.nan
    tokens_per_step: float = math.nan
    """Tokens that one step gives a row: 1, more where they are guessed ahead."""
    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    """Tokens a second of whole texts, by the number of rows."""
    rows: int = 1
    """Of the prompts; where they differ about the mean."""
    weight_bytes: int = 0
    """Weights that one step reads."""
    cache_bytes: int = 0
    """Keys and values at the end of the longest text."""
    peak_bytes: int | None = None
    """Peak memory, the cache in it."""

    @property
    def throughput(self) -> float:
        """Tokens a second with the rows of the prompts."""
        return self.tokens_per_s.get(str(self.rows), math.nan)


@dataclass(frozen=True)
class TextTimes:
    """The times of one text's tokens, as a race is told them."""

    prompt: int
    rows: int
    ttft_ns: int
    steps_ns: Sequence[int] = ()
    """Each step after the first token,"""
    tokens: Sequence[int] = ()
    """and the tokens that it gave each row."""


@dataclass
class Text:
    """One text while it is written."""

    prompt: int
    rows: int
    began_ns: int = 0
    came: list[tuple[int, int]] = field(default_factory=list)
    """When each step was done, and how many tokens it gave each row."""

    def on_tokens(self, tokens: torch.Tensor) -> None:
        """Take the time at which tokens [rows, k] are there."""
        wait_for(tokens.device)
        self.came.append((time.perf_counter_ns(), tokens.shape[1]))

    @property
    def ttft_ns(self) -> int:
        """Time to the first token."""
        return self.came[0][0] - self.began_ns

    @property
    def decode_ns(self) -> int:
        """Time of all that came after it."""
        return self.came[-1][0] - self.came[0][0]

    @property
    def whole_ns(self) -> int:
        """Time of all of it."""
        return self.came[-1][0] - self.began_ns

    def times(self) -> TextTimes:
        """For the parent."""
        steps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(self.came)]
        return TextTimes(self.prompt, self.rows, self.ttft_ns, steps, [count for _, count in self.came[1:]])


@dataclass
class Watcher:
    """Runs a recipe and remembers how its texts came."""

    new_tokens: int
    part: str = "text"
    temperature: float = 0.0
    texts: list[Text] = field(default_factory=list)

    @property
    def counted(self) -> int:
        """Tokens of a row in the part that counts; of a prompt one."""
        return {"ttft": 1, "tpot": self.new_tokens - 1}.get(self.part, self.new_tokens)

    def sample_ns(self, run: Callable[..., Any], prompt: Mapping[str, Any], number: int) -> int:
        """Write after one prompt: nanoseconds of the part that counts."""
        wanted = 1 if self.part == "ttft" else self.new_tokens
        text = Text(number, rows_in(prompt))
        text.began_ns = time.perf_counter_ns()
        run(**prompt, new_tokens=wanted, on_tokens=text.on_tokens, temperature=self.temperature)
        ended = time.perf_counter_ns()
        self.texts.append(text)
        if self.part == "text":
            return ended - text.began_ns
        return text.ttft_ns if self.part == "ttft" else text.decode_ns

    def take(self) -> list[TextTimes]:
        """The texts since the last call, for the parent."""
        found, self.texts = [text.times() for text in self.texts], []
        return found


def rows_in(prompt: Mapping[str, torch.Tensor]) -> int:
    """The rows of a prompt: those of its tokens, where it has such."""
    return len(prompt["input_ids"] if "input_ids" in prompt else next(iter(prompt.values())))


def rows_of(prompt: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """A prompt with so many rows: its own, again and again."""
    return {name: tensor[torch.arange(rows, device=tensor.device) % len(tensor)] for name, tensor in prompt.items()}


_LONG_NS = 300_000_000


def tokens_per_s(
    run: Callable[..., Any], prompts: Sequence[Mapping[str, torch.Tensor]], rows: int, new_tokens: int,
    temperature: float = 0.0, repeats: int = 3, slowest: Callable[[int], int] = lambda ns: ns,
) -> float:  # fmt: skip
    """Tokens a second with so many rows: the median of a few texts after each prompt, one more before them to warm up.
    Where a text takes longer than `_LONG_NS` one is enough, warmed up after the first prompt alone. `slowest` gives all
    ranks that write together one time. NaN where memory does not allow it."""
    took: list[int] = []
    for prompt in prompts:
        wide = rows_of(prompt, rows)
        times: list[int] = []
        needed = repeats + 1
        while len(times) < needed:
            started = time.perf_counter_ns()
            try:
                text = run(**wide, new_tokens=new_tokens, temperature=temperature)
            except (torch.OutOfMemoryError, MemoryError):
                return math.nan
            wait_for(text.device)
            times.append(slowest(time.perf_counter_ns() - started))
            if times[-1] > _LONG_NS:
                needed = 1 if took else 2
        kept = sorted(times[1:] or times)
        took.append(kept[len(kept) // 2])
    return rows * new_tokens * len(took) / sum(took) * 1e9


def figures(texts: Sequence[TextTimes], known: Generation) -> Generation:
    """The figures of all texts of a trial, added to what is `known` of it without them."""
    if not texts:
        return known
    by_prompt: dict[int, list[int]] = {}
    for text in texts:
        by_prompt.setdefault(text.prompt, []).append(text.ttft_ns)
    whole = [text for text in texts if text.steps_ns]
    steps = sorted(ns for text in whole for ns in text.steps_ns)
    each = [sum(text.steps_ns) / sum(text.tokens) for text in whole]
    tokens = [count for text in whole for count in text.tokens]
    # By prompt, as they may differ in rows and length.
    lasted: dict[int, list[int]] = {}
    for text in whole:
        lasted.setdefault(text.prompt, []).append(text.ttft_ns + sum(text.steps_ns))
    written = {text.prompt: text.rows * (1 + sum(text.tokens)) for text in whole}
    took_ns = sum(nearest_rank(times, 0.5) for times in lasted.values())
    told = {str(known.rows): sum(written.values()) / took_ns * 1e9} if whole else {}
    return replace(
        known,
        tokens_per_s={**known.tokens_per_s, **told},
        ttft_ms=sum(nearest_rank(times, 0.5) for times in by_prompt.values()) / len(by_prompt) / 1e6,
        tpot_ms=nearest_rank(each, 0.5) / 1e6,
        text_ms=took_ns / len(lasted) / 1e6 if whole else math.nan,
        itl_p50_ms=nearest_rank(steps, 0.5) / 1e6,
        itl_p90_ms=nearest_rank(steps, 0.9) / 1e6,
        itl_p99_ms=nearest_rank(steps, 0.99) / 1e6,
        tokens_per_step=sum(tokens) / len(tokens) if tokens else math.nan,
    )
