"""Continuous batching in simulated time: the engine's own order of things, measured costs, and texts that arrive.

What `fettle.package.handlers.running.Running` does, without a model: a test shows that both do the same steps. All
texts that are written get their token at the end of a step, so that a step is the time between two tokens of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fettle.load.arrivals import poisson
from fettle.load.run import TextLimits
from fettle.slo.simulate import greatest_rate
from fettle.slo.text_costs import GRAIN, TextCosts

Array = np.ndarray[Any, Any]
REQUEST_S = 0.003
"""From the client to the worker and back: HTTP, reading, the first piece."""
TEXTS = 500
"""A simulation has so many."""


@dataclass(frozen=True)
class Tables:
    """Costs as a simulation looks them up, for texts up to a length."""

    writing: list[list[float]]
    prompts: list[float]
    looking_s: float
    spread: list[float]
    keeps: bool

    @classmethod
    def of(cls, costs: TextCosts, longest: int, chunk: int, scale: float = 1.0) -> Tables:
        """For texts of up to `longest` tokens and parts of prompts of up to `chunk`; `scale` multiplies all."""
        writing = [[scale * value for value in row] for row in costs.writing_table(longest)]
        prompts = [scale * value for value in costs.prompt_table(chunk)] if costs.keeps else []
        looking = scale * costs.looking_s if costs.keeps else 0.0
        return cls(writing, prompts, looking, costs.spread or [1.0], costs.keeps)


@dataclass
class Served:
    """What a simulation saw. Seconds."""

    ttft_s: Array
    """By text, in the order of arrival; infinite where it was not begun."""
    steps_s: Array
    """Length of each step."""
    writing: Array
    """How many texts got a token in each step that was not their first."""
    busy_s: float = 0.0
    stable: bool = True

    def itl_s(self, percent: float) -> float:
        """Percentile of the time between two tokens of a text, of all texts."""
        gaps = np.repeat(self.steps_s, self.writing)
        return float(np.percentile(gaps, percent)) if len(gaps) else 0.0

    def kept(self, limits: TextLimits) -> bool:
        """Whether both limits are kept at the 99th percentile, as `fettle serve load` judges them."""
        return (
            self.stable
            and not (limits.ttft_s and float(np.percentile(self.ttft_s, 99)) > limits.ttft_s)
            and not (limits.itl_s and self.itl_s(99) > limits.itl_s)
        )


@dataclass(slots=True)
class _Text:
    number: int
    prompt: int
    output: int
    kept: int = 0
    """Tokens of the prompt whose keys and values are there."""
    written: int = 0
    """Tokens of the output."""


def simulate_texts(
    arrivals: Array, prompts: Sequence[int], outputs: Sequence[int], rows: int, chunk: int, tables: Tables,
    *, give_up: TextLimits | None = None,
) -> Served:  # fmt: skip
    """Write texts that arrive at these seconds, ascending; lengths are used in turn.

    `give_up` ends early, as not stable, once more than 1% of the first tokens are late.
    """
    random = np.random.default_rng(0)
    noise: list[float] = []
    due: list[float] = (np.asarray(arrivals, float) + REQUEST_S / 2).tolist()
    count, lengths, more = len(due), len(prompts), len(outputs)
    ttft = np.full(count, math.inf)
    texts: list[_Text] = []
    writing = 0  # how many of `texts`, the first ones, have read their prompts
    free = [-math.inf] * rows  # since when each free row of the cache is free
    steps: list[float] = []
    others: list[int] = []
    now, come, late = 0.0, 0, 0
    patience, allowed = (give_up.ttft_s or math.inf, 0.01 * count + 1) if give_up else (math.inf, 0)
    while texts or come < count:
        if not texts and due[come] > now:
            now = due[come]
        while come < count and due[come] <= now and free and free[0] <= now:
            free.pop(0)
            text = _Text(come, prompts[come % lengths], outputs[come % more])
            texts.append(text)
            come += 1
            if not tables.keeps or text.prompt == 1:  # its prompt needs no step of its own
                texts[writing], texts[-1] = texts[-1], texts[writing]
                writing += 1
        if not texts:  # the server does not know yet that the row is free
            now = free[0]
            continue
        took, written = 0.0, texts[:writing]
        if written:
            longest = max(text.prompt + text.written for text in written) - 1
            took = tables.writing[writing][(longest + GRAIN // 2) // GRAIN]
        first, part = writing, list[int]()
        if writing < len(texts):
            first = min(range(writing, len(texts)), key=lambda place: texts[place].number)
            part = _part(texts[first:], chunk)
            tokens = len(part) * max(part)
            context = max(text.kept for text in texts[first : first + len(part)])
            took += tables.prompts[tokens] + tables.looking_s * tokens * context
        if not noise:
            noise = random.choice(tables.spread, 1024).tolist()
        took *= noise.pop()
        now += took
        steps.append(took)
        for place, new in enumerate(part, first):
            text = texts[place]
            text.kept += new
            if text.kept == text.prompt:
                written.append(text)
                texts[writing], texts[place] = texts[place], texts[writing]
                writing += 1
        begun, ends = 0, False
        for text in written:
            text.written += 1
            if text.written == 1:
                begun += 1
                ttft[text.number] = now + REQUEST_S - due[text.number]
                late += ttft[text.number] > patience
            if text.written == text.output:
                ends = True
        others.append(len(written) - begun)
        if late > allowed:
            break
        for place in reversed(range(writing if ends else 0)):
            if texts[place].written == texts[place].output:
                _leave(texts, place, writing)
                writing -= 1
                free.append(now + REQUEST_S / 2)
    half = count // 2
    growing = half > 50 and ttft[half:].mean() > 2 * ttft[:half].mean() + 10 * max(steps)
    stable = late <= allowed if give_up else True
    return Served(ttft, np.array(steps), np.array(others, int), sum(steps), bool(stable and not growing))


def _part(waiting: Sequence[_Text], chunk: int) -> list[int]:
    """How many tokens of each of the first prompts are computed in this step."""
    part: list[int] = []
    longest = 0
    for text in waiting:
        new = min(text.prompt - text.kept, chunk)
        longest = max(longest, new)
        if part and longest * (len(part) + 1) > chunk:
            break
        part.append(new)
    return part


def _leave(texts: list[_Text], place: int, writing: int) -> None:
    """Free a written text's place as the engine does: the last that is written takes it, and the last of all its."""
    texts[place] = texts[writing - 1]
    texts[writing - 1] = texts[-1]
    texts.pop()


def text_capacity(
    prompts: Sequence[int], outputs: Sequence[int], rows: int, chunk: int, tables: Tables, limits: TextLimits
) -> float:  # fmt: skip
    """The greatest rate (a second) at which both limits are kept, to 3%. 0 where even an almost idle server is too
    slow."""
    unit = poisson(1.0, TEXTS * 1.2)[:TEXTS]
    prompt, output = float(np.mean(prompts)), float(np.mean(outputs))
    part = min(chunk, max(1, round(prompt)))  # a long prompt is read in such parts
    alone = output * tables.writing[1][0] + (tables.prompts[part] * prompt / part if tables.keeps else 0.0)

    def good(rate: float) -> Served | None:
        served = simulate_texts(unit / rate, prompts, outputs, rows, chunk, tables, give_up=limits)
        return served if served.kept(limits) else None

    most = 1e4 / max(prompt + output, 1.0) / max(tables.writing[1][0], 1e-9)
    return greatest_rate(good, 0.05 / max(alone, 1e-9), most, 1.03)[0]
