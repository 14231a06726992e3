"""Continuous batching: texts that a model writes together, of which one joins or leaves between any two tokens.

A step gives every text that is being written its next token, by one call of the model (decode), and then computes
prompts of those that joined (prefill), `prefill_tokens` of them at most, so that a long prompt makes the others wait
for a part of it only. What a prompt begins with is not computed again where a row of the KV cache has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fettle.package.handlers.asking import Ask, Piece, TokenLogprob
from fettle.package.handlers.cache import Cache
from fettle.package.handlers.detokenizer import Detokenizer
from fettle.package.handlers.parts import LAST, SOURCE, SOURCE_MASK
from fettle.package.handlers.sampling import choose, log_probabilities

if TYPE_CHECKING:
    from fettle.package.handlers.generate import Handler

log = logging.getLogger("fettle.serve.worker")
OnPiece = Callable[[int, Piece | Exception], None]
"""Called with a text's number and its next piece, or why it broke off."""


@dataclass
class _Text:
    """One text that grows."""

    number: int
    """Greater than those of all texts that came before."""
    ids: list[int]
    prompt: int
    """Tokens of the prompt."""
    left: int
    """Tokens that may still come."""
    ask: Ask
    detokenizer: Detokenizer
    random: np.random.Generator
    source: int = 0
    """Tokens of it that an encoder reads, at once; the decoder's are those behind them."""
    kept: int = 0
    """Tokens whose keys and values are there."""
    writes: bool = False
    """Whether its prompt is through: each step gives it a token."""
    reason: str = ""


@dataclass
class Steps:
    """What was computed since somebody asked."""

    by_rows: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Texts that got their next token in a call -> calls, seconds."""
    tokens: int = 0
    """Tokens written so far."""
    reused: int = 0
    """Tokens of prompts whose keys and values another text had already."""


class Running:
    """At most `rows` texts. `step` is to be called while there are any; nothing here is safe for threads."""

    def __init__(self, handler: Handler, rows: int, cache_bytes: int, prefill_tokens: int) -> None:
        self.handler, self.prefill_tokens = handler, prefill_tokens
        self.cache = Cache(handler, rows, cache_bytes) if handler.keeps else None
        self.rows = rows if self.cache is None else self.cache.rows
        self.texts: list[_Text] = []
        """Each text's place is its row in the cache. Those that are being written stand before those whose prompts
        are being computed."""
        self.steps = Steps()

    def warm(self) -> bool:
        """Make ready what steps need, so that no text waits for it; False where that is the model's calls as they are,
        since nothing is kept between two of them."""
        if self.cache is None:
            return False
        if self.cache.recorded is not None:
            self.cache.recorded.add_all(self.prefill_tokens)
            return True
        prompt = [0] * min(self.prefill_tokens, self.handler.settings.max_tokens - 1)
        for rows in (1, 2, self.rows):
            rows = min(rows, self.rows)
            part, begins = prompt[: max(1, len(prompt) // rows)], self.handler.begins
            read = [len(part) if begins else 0] * rows
            self.cache.logits(0, [[*part, *begins]] * rows, [0] * rows, read)
            self.cache.logits(0, [[0]] * rows, [1] * rows, [min(read[0], 1)] * rows)
        return True

    def take_steps(self) -> Steps:
        """What was computed since the last time."""
        steps, self.steps = self.steps, Steps()
        return steps

    def add(self, number: int, ask: Ask) -> None:
        """Let a text join. Raises `UsageError` where it cannot be asked for."""
        if len(self.texts) >= self.rows:
            raise RuntimeError("there is no row left")
        handler = self.handler
        prompt = handler.prompt(ask)
        left = handler.room(prompt, ask)
        source = len(prompt) if handler.begins else 0
        ids = [*prompt, *handler.begins]
        detokenizer = Detokenizer(handler.tokenizer, ids[source:], ask.sampling.stop)
        random = np.random.default_rng(ask.sampling.seed)
        self.texts.append(_Text(number, ids, len(ids), left, ask, detokenizer, random, source))
        if self.cache is None or len(ids) == 1:
            self._begin_to_write(len(self.texts) - 1)

    def cancel(self, number: int) -> None:
        """Give up a text, if it is still there."""
        for row, text in enumerate(self.texts):
            if text.number == number:
                self._leave(row)
                return

    def step(self, on_piece: OnPiece) -> None:
        """The next token of every text that is being written, and a part of the prompts."""
        writing = self._writing
        if self.cache is None:
            self._advance(0, self.texts, [text.ids for text in self.texts], on_piece)
        else:
            if writing:
                self._advance(0, self.texts[:writing], [text.ids[-1:] for text in self.texts[:writing]], on_piece)
            first, part = self._prompts()
            if part:
                self._advance(first, self.texts[first : first + len(part)], part, on_piece)
        for row in reversed(range(len(self.texts))):
            if self.texts[row].reason:
                self._leave(row)

    def _prompts(self) -> tuple[int, list[list[int]]]:
        """The row of the text that came first of those whose prompts are not through, and what to compute of it and of
        those that stand behind it: rows change places, and whoever came later must not hold it up."""
        waiting = range(self._writing, len(self.texts))
        first = min(waiting, key=lambda row: self.texts[row].number, default=len(self.texts))
        part: list[list[int]] = []
        longest = 0
        for row, text in enumerate(self.texts[first:], first):
            if self.cache is not None and not text.kept and not text.source:
                text.kept = self.cache.reuse(row, text.ids, len(self.texts))
                self.steps.reused += text.kept
            new = text.ids[text.kept :] if text.source else text.ids[text.kept : text.kept + self.prefill_tokens]
            longest = max(longest, len(new))
            if part and longest * (len(part) + 1) > self.prefill_tokens:
                break
            part.append(new)
        return first, part

    def _advance(self, first: int, texts: Sequence[_Text], new: Sequence[Sequence[int]], on_piece: OnPiece) -> None:
        """Compute these tokens of the texts that stand from row `first` on; those that are through get the next."""
        began = time.perf_counter()
        try:
            kept = [text.kept for text in texts]
            if self.cache is None:
                scores = self._logits(texts)
            else:
                scores = self.cache.logits(first, new, kept, [text.source for text in texts])
            likeliest = scores.argmax(1).tolist()
            sound = torch.isfinite(scores).all(1).tolist()
        except Exception as error:
            log.exception("a call failed")
            for row, text in enumerate(texts, first):
                text.reason = "failed"
                if self.cache is not None:
                    self.cache.holds(row, (), 0)
                on_piece(text.number, error)
            return
        for row, text in enumerate(texts):
            text.kept = text.kept + len(new[row]) if self.cache is not None else len(text.ids)
            if self.cache is not None:
                self.cache.holds(first + row, text.ids, text.kept)
            if not sound[row]:
                text.reason = "failed"
                if self.cache is not None:
                    self.cache.wipe(first + row)
                on_piece(text.number, RuntimeError("the model's scores are not finite"))
            elif text.kept == len(text.ids):
                self._grow(text, likeliest[row], scores[row], on_piece)
        calls, seconds = self.steps.by_rows.get(len(texts), (0, 0.0))
        self.steps.by_rows[len(texts)] = calls + 1, seconds + time.perf_counter() - began
        for row, text in enumerate(texts, first):
            if not text.writes and text.kept >= text.prompt:
                self._begin_to_write(row)

    def _logits(self, texts: Sequence[_Text]) -> torch.Tensor:
        """Scores of the token after each text, of a model that keeps nothing: one call for all, filled up on their
        right, where a causal model cannot see, and an encoder's mask hides it."""
        most, longest = max(len(text.ids) - text.source for text in texts), max(text.source for text in texts)
        parts = []
        for text in texts:
            (ids, mask), (source, source_mask) = (
                ([*some, *[0] * (length - len(some))], [1] * len(some) + [0] * (length - len(some)))
                for some, length in ((text.ids[text.source :], most), (text.ids[: text.source], longest))
            )
            made = {
                "input_ids": [ids], "attention_mask": [mask], LAST: [sum(mask) - 1],
                SOURCE: [source], SOURCE_MASK: [source_mask],
            }  # fmt: skip
            parts.append([np.array(made[spec.name], spec.kind) for spec in self.handler.inputs])
        return torch.from_numpy(self.handler.runner.run(parts, 0)[self.handler.place])

    def _grow(self, text: _Text, token: int, row: torch.Tensor, on_piece: OnPiece) -> None:
        """One token more: the likeliest, `token`, or what is drawn by its row of scores."""
        sampling, scores = text.ask.sampling, np.empty(0)
        if not sampling.plain or sampling.logprobs is not None:
            scores = row.cpu().numpy()
        if not sampling.plain:
            token = choose(scores, sampling, text.random, text.ids[text.prompt :])
        text.left -= 1
        characters = ""
        is_end = token in self.handler.stop and not sampling.ignore_eos
        if is_end:
            text.reason = "stop"
        else:
            text.ids.append(token)
            characters = text.detokenizer.add(token)
            text.reason = "stop" if text.detokenizer.stopped else "" if text.left else "length"
        if text.reason:
            characters += text.detokenizer.end()
            if text.detokenizer.stopped:  # the stop string was in what had been held back
                text.reason = "stop"
        logprobs: tuple[TokenLogprob, ...] = ()
        if sampling.logprobs is not None and not is_end:
            logprobs = (self._likely(token, scores, sampling.logprobs),)
        counts = (text.source or text.prompt, len(text.ids) - text.prompt) if text.reason else (0, 0)
        self.steps.tokens += 1
        on_piece(text.number, Piece(characters, logprobs, text.reason, *counts))

    def _likely(self, token: int, scores: Any, most: int) -> TokenLogprob:
        own, best = log_probabilities(scores, token, most)

        def name(one: int) -> str:
            """As it stands within a text: at the beginning of one many tokenizers leave out the space before a word."""
            once, twice = (self.handler.tokenizer.decode([one] * n, skip_special_tokens=False) for n in (1, 2))
            return str(twice[len(once) :])

        return TokenLogprob(name(token), own, tuple((name(other), value) for other, value in best))

    # -- rows --------------------------------------------------------------------------------------------------------

    @property
    def _writing(self) -> int:
        """How many texts are being written: the first row of those whose prompts are not through."""
        return sum(text.writes for text in self.texts)

    def _begin_to_write(self, row: int) -> None:
        """Put a text whose prompt is through before those whose prompts are not."""
        front = self._writing
        self._swap(front, row)
        self.texts[front].writes = True

    def _leave(self, row: int) -> None:
        """Free a text's row: the last that is being written takes it, and the last of all takes that one's. What was
        written stays in the row that is free then."""
        texts, front = self.texts, self._writing
        for last in (front - 1, len(texts) - 1) if row < front else (len(texts) - 1,):
            self._swap(row, last)
            row = last
        texts.pop()

    def _swap(self, one: int, other: int) -> None:
        """Let two texts change places, with what is kept of them."""
        if one == other:
            return
        if self.cache is not None:
            self.cache.swap(one, other)
        self.texts[one], self.texts[other] = self.texts[other], self.texts[one]
