"""The handler for text generation: a prompt in, one token after the other out.

Greedy, or sampled with a temperature. Where the package's model takes the keys and values of the tokens before, each
step runs the new token only; else every step runs the whole text, so that a text of n tokens costs n calls that grow
with it. The texts of one batch go in step, filled up on their right, where a causal model cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from fettle.errors import UsageError
from fettle.package.handlers.parts import LAST, LOGITS, PAST, SEEN, Array, output_index, softmax
from fettle.package.handlers.text import TOKENIZER, read_tokenizer
from fettle.package.tensors import TensorSpec

if TYPE_CHECKING:
    from fettle.package.handlers.cache import Cache

OnPiece = Callable[[int, str | dict[str, Any]], None]
"""Called with a text's index and its next piece, at last with the whole answer."""
_INPUTS = ("input_ids", "attention_mask", LAST, SEEN, PAST)
_ENDS = ("</s>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "[SEP]", "<eos>")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="generate"):
    """Of the generate handler."""

    max_tokens: Annotated[int, Meta(le=1 << 20)] = 1024
    """Of prompt and answer together."""
    max_new_tokens: Annotated[int, Meta(ge=1)] = 256
    """Of an answer; a request may ask for fewer."""
    stop_tokens: tuple[int, ...] = ()
    """An answer ends before one of these. Empty: the tokenizer's usual end."""
    max_characters: Annotated[int, Meta(ge=1)] = 200_000

    def __post_init__(self) -> None:
        if self.max_new_tokens > self.max_tokens:
            raise ValueError("max_new_tokens is at most max_tokens")


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a request may ask for."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """New tokens at most."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """0: always the likeliest token. Else tokens are drawn from softmax(logits / temperature)."""
    top_k: Annotated[int, Meta(ge=0)] = 0
    """Draw from so many likeliest tokens; 0: from all."""
    seed: Annotated[int, Meta(ge=0)] | None = None
    stream: bool | None = None
    """Clients of Triton say it again; the path decides."""


class Prompt(msgspec.Struct, frozen=True):
    """A request of Triton's generate extension."""

    text_input: str
    id: str = ""
    parameters: Parameters = Parameters()


_prompts = msgspec.json.Decoder(Prompt)


def read_prompt(body: bytes) -> Prompt:
    """The request that a body holds. Raises `UsageError`."""
    try:
        return _prompts.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"the body is not a request to generate: {str(error)[:200]}") from error


def suggest(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], files: set[str]) -> Settings:
    """The usual lengths; `fettle.package.export` gives the model its input and output."""
    if TOKENIZER not in files:
        raise UsageError("the generate handler needs a tokenizer: give --tokenizer FILE, a tokenizer.json")
    return Settings()


@dataclass
class _Text:
    """One text that grows."""

    index: int
    ids: list[int]
    left: int
    """Tokens that may still come."""
    wanted: Parameters
    random: Any
    said: int
    """Characters of the decoded text that were told already; at first the prompt's."""
    new: int = 0
    parts: list[str] = field(default_factory=list)
    reason: str = ""

    def answer(self) -> dict[str, Any]:
        """The whole of it."""
        return {"text_output": "".join(self.parts), "tokens": self.new, "reason": self.reason}


class Handler:
    """Answers a prompt; `generate` tells each piece when it is there."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def initialize(self, context: Any) -> None:
        """Read the tokenizer; keep the runner."""
        self.runner, self.inputs = context.runner, context.manifest.inputs
        names = [spec.name for spec in self.inputs]
        if "input_ids" not in names or LAST not in names or set(names) - set(_INPUTS):
            raise UsageError(f"the generate handler fills {', '.join(_INPUTS)}; the model has {', '.join(names)}")
        self.outputs = context.manifest.outputs
        self.place = output_index(self.outputs, LOGITS)
        self.keeps = PAST in names
        self.metrics = context.metrics
        self.tokenizer = read_tokenizer(context.folder)
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        usual = [self.tokenizer.token_to_id(token) for token in _ENDS]
        self.stop = set(self.settings.stop_tokens) or {token for token in usual if token is not None}

    def preprocess(self, requests: Sequence[dict[str, Any]]) -> list[bytes]:
        """A prompt as plain text, or as JSON of the generate extension."""
        return [
            r["body"] if "json" in r["type"] else msgspec.json.encode({"text_input": _plain(r["body"])})
            for r in requests
        ]

    def inference(self, data: list[bytes]) -> list[str]:
        """The whole answers."""
        return [answer["text_output"] for answer in self.generate(data, lambda index, said: None, set)]

    def postprocess(self, answers: list[str]) -> list[str]:
        """As plain text."""
        return answers

    def generate(
        self,
        bodies: Sequence[bytes],
        on_piece: OnPiece,
        gone: Callable[[], set[int]],
    ) -> list[dict[str, Any]]:
        """Answer prompts in step; those that `gone()` names are given up.

        `on_piece` hears each piece as text, and each answer once it is whole: ``{"text_output", "tokens", "reason"}``,
        where the reason for its end is ``stop``, ``length`` or ``gone``. All answers are returned too.
        """
        texts = [self._begin(index, body) for index, body in enumerate(bodies)]
        live = texts
        cache = self._cache() if self.keeps else None
        while live:
            left = gone()
            for text in (text for text in live if text.index in left):
                text.reason = "gone"
            going = [text for text in live if not text.reason]
            for text, row in zip(going, self._logits(going, cache) if going else (), strict=True):
                self._grow(text, _next(row, text), on_piece)
            for text in (text for text in live if text.reason):  # nobody waits for the longest of the batch
                on_piece(text.index, text.answer())
            live = [text for text in live if not text.reason]
        self.metrics.add_counter("generated_tokens", sum(text.new for text in texts))
        return [text.answer() for text in texts]

    def _begin(self, index: int, body: bytes) -> _Text:
        prompt, settings = read_prompt(body), self.settings
        if len(prompt.text_input) > settings.max_characters:
            raise UsageError(f"a prompt may have {settings.max_characters} characters")
        ids = self.tokenizer.encode(prompt.text_input).ids
        if not 1 <= len(ids) < settings.max_tokens:
            raise UsageError(f"a prompt has 1 to {settings.max_tokens - 1} tokens, not {len(ids)}")
        wanted = prompt.parameters
        left = min(
            wanted.max_tokens or settings.max_new_tokens, settings.max_new_tokens, settings.max_tokens - len(ids)
        )
        random = np.random.default_rng(wanted.seed)
        return _Text(index, ids, left, wanted, random, len(self.tokenizer.decode(ids)))

    def _cache(self) -> Cache:
        from fettle.package.handlers.cache import Cache  # imports torch, which the server's own process does without

        return Cache(self.runner, self.inputs, self.outputs, self.place)

    def _logits(self, live: Sequence[_Text], cache: Cache | None) -> Array:
        """Scores of every token to come next: one call for all texts."""
        if cache is not None:
            return cache.logits([text.index for text in live], [text.ids for text in live])
        length = max(len(text.ids) for text in live)
        parts = []
        for text in live:
            real, fill = len(text.ids), [0] * (length - len(text.ids))
            made = {"input_ids": [[*text.ids, *fill]], "attention_mask": [[1] * real + fill], LAST: [real - 1]}
            parts.append([np.array(made[spec.name], spec.kind) for spec in self.inputs])
        found: Array = self.runner.run(parts, 0)[self.place]
        return found

    def _grow(self, text: _Text, token: int, on_piece: OnPiece) -> None:
        text.new += 1
        text.left -= 1
        if token in self.stop:
            text.reason = "stop"
        else:
            text.ids.append(token)
            text.reason = "" if text.left else "length"
        whole = self.tokenizer.decode(text.ids)
        # A character may take several tokens: until it is whole, it is decoded as the replacement character.
        if len(whole) > text.said and (text.reason or not whole.endswith("\ufffd")):
            piece = whole[text.said :]
            text.said = len(whole)
            text.parts.append(piece)
            on_piece(text.index, piece)


def _plain(body: bytes) -> str:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("the body is not text in UTF-8") from error


def _next(logits: Array, text: _Text) -> int:
    """The likeliest token, or one that is drawn."""
    wanted = text.wanted
    if wanted.temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore"):  # the least temperatures: the likeliest stays at 0, all others at -infinity
        scores = (logits.astype(np.float64) - logits.max()) / wanted.temperature
    if 0 < wanted.top_k < len(scores):
        scores[np.argpartition(-scores, wanted.top_k)[wanted.top_k :]] = -np.inf
    return int(text.random.choice(len(scores), p=softmax(scores)))
