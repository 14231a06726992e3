"""Load on a server that writes texts, by OpenAI's protocol: what is asked, and when each token came."""

from __future__ import annotations

import functools
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from fettle.errors import UsageError, refusing
from fettle.files import read_bytes
from fettle.load.client import Connection, Request, get_json, http_request, said

BROKEN = -3
"""The status of a text that broke off."""
_MOST_TOKENS = 1_000_000
_LONGEST_LINE = 16 << 20
"""Of what a server sends."""
_TOKENS = (10, 240)
"""Prompts are made of these tokens, which every vocabulary has, at random: no two begin alike."""
_DISTRIBUTIONS: Mapping[str, tuple[int, Callable[..., Any]]] = {
    "uniform": (2, lambda random, count, low, high: random.integers(int(low), int(high) + 1, count)),
    "exponential": (1, lambda random, count, mean: random.exponential(mean, count)),
    "lognormal": (2, lambda random, count, median, sigma: random.lognormal(np.log(median), sigma, count)),
}


@dataclass(frozen=True)
class TextRequest(Request):
    """A request whose answer comes as server-sent events."""

    again: Callable[[], Request] | None = None
    """Makes what is sent each time, with another prompt of as many tokens: a server may keep those that it has seen."""


class TextConnection(Connection):
    """A connection that notes when each piece of a text comes."""

    def send(self, request: Request, tag: Any) -> None:
        self._rest, self._whole = b"", False
        self._moments: list[float] = []
        self._usage = _Usage()
        self._refusal = b""
        again = request.again if isinstance(request, TextRequest) else None
        super().send(again() if again is not None else request, tag)

    def on_body(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._status != 200:
            self._refusal = (self._refusal + data)[:4096]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _LONGEST_LINE:
            raise ValueError("no end of a line")  # the connection counts as lost
        for line in lines:
            field, _, told = line.partition(b":")
            if field != b"data":
                continue
            if told.strip() == b"[DONE]":
                self._whole = True
                continue
            try:
                chunk = msgspec.json.decode(told, type=_Chunk)
            except (ValueError, RecursionError):
                continue
            if chunk.error:
                self._refusal = told
            self._usage = chunk.usage or self._usage
            if any(_has_text(choice.get("delta") or choice) for choice in chunk.choices or ()):
                self._moments.append(now)

    @property
    def refusal(self) -> str:
        """What a server said that would not write the text, or broke it off."""
        try:
            refusal = msgspec.json.decode(self._refusal, type=_Refusal)
        except (ValueError, RecursionError):
            return ""
        return said(refusal.error.message.partition("\n")[0])

    def heard(self, start: float) -> tuple[np.ndarray[Any, Any], int, int]:
        """Of the last answer: when its pieces came, in seconds from `start`, and the tokens of its prompt (0 where the
        server does not say) and of its text (its pieces then)."""
        tokens = self._usage.completion_tokens or len(self._moments)
        return np.array(self._moments) - start, self._usage.prompt_tokens or 0, tokens

    def on_message_complete(self) -> None:
        """The answer has ended; one without its last event broke off."""
        self._finish(self._status if self._status != 200 or self._whole else BROKEN)


def _has_text(piece: Mapping[str, Any]) -> bool:
    """Of an answer, or of what a model thinks before it, which vLLM, SGLang and llama.cpp send by a name of its own."""
    return any(piece.get(name) for name in ("text", "content", "reasoning_content", "reasoning"))


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    """A piece of a text, in OpenAI's protocol."""

    choices: list[dict[str, Any]] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Message(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    """An error in OpenAI's protocol."""

    error: _Message = msgspec.field(default_factory=_Message)


class _Listed(msgspec.Struct):
    id: str


class _Listing(msgspec.Struct):
    """The models of a server, in OpenAI's protocol."""

    data: list[_Listed] | None


class TextLine(msgspec.Struct):
    """One text that is asked for: after a prompt, or so many tokens of one."""

    prompt: str | Annotated[int, Meta(ge=1, le=_MOST_TOKENS)]
    max_tokens: Annotated[int, Meta(ge=1)] = 128


def text_lines(
    prompt: str = "", output: str = "", file: Path | None = None, *, count: int = 256, seed: int = 0
) -> list[TextLine]:
    """What is asked for, to be used in turn.

    `prompt` and `output` say how many tokens there are: ``128``, ``uniform:16:256``, ``exponential:128`` (mean) or
    ``lognormal:128:0.8`` (median and sigma). A `file` has a line of JSON for each text instead: ``{"prompt": TEXT or a
    number of tokens, "max_tokens": N}``. Raises `UsageError`.
    """
    if file is not None:
        return _read(file)
    random = np.random.default_rng(seed)
    sizes = [_lengths(text, option, count, random) for text, option in ((prompt, "prompt"), (output, "output"))]
    return [TextLine(*pair) for pair in zip(*sizes, strict=True)]


def text_requests(
    url: str, lines: Sequence[TextLine], *, model: str = "", seed: int = 0, token: str = "",
    tls: ssl.SSLContext | None = None,
) -> list[Request]:  # fmt: skip
    """Requests for these texts; `url` is the server's, its ``/v1`` or an address below that. Raises `UsageError`."""
    chat = url.rstrip("/").endswith("/chat/completions")
    base = url.rstrip("/").removesuffix("/completions").removesuffix("/chat").removesuffix("/v1") + "/v1"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if not model:
        names = [row.id for row in get_json(f"{base}/models", headers, _Listing, tls).data or []]
        if not names:
            raise UsageError(f"{base} serves no model that writes texts")
        if len(names) != 1:
            raise UsageError(f"{base} serves {len(names)} models ({said(', '.join(names))}): name one with `model`")
        model = names[0]
    random = np.random.default_rng(seed)
    address = f"{base}/chat/completions" if chat else f"{base}/completions"

    def made(line: TextLine) -> Request:
        body: dict[str, Any] = {
            "model": model, "max_tokens": line.max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        prompt: Any = line.prompt
        if isinstance(prompt, int):
            prompt = random.integers(*_TOKENS, prompt).tolist()
            body["ignore_eos"] = True  # so that the lengths are those that were asked for
        if chat and not isinstance(prompt, str):
            raise UsageError(
                "a chat takes texts, not numbers of tokens: give `texts=FILE` with texts, or a URL of completions"
            )
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        return http_request(address, msgspec.json.encode(body), {"Content-Type": "application/json", **headers}, tls)

    requests: list[Request] = []
    for line in lines:
        again = functools.partial(made, line) if isinstance(line.prompt, int) else None
        requests.append(TextRequest(**vars(made(line)), again=again))
    return requests


def _lengths(text: str, option: str, count: int, random: np.random.Generator) -> list[int]:
    """`count` lengths, each at least 1. Raises `UsageError`."""
    if re.fullmatch(r"[0-9]{1,7}", text) and 0 < int(text) <= _MOST_TOKENS:
        return [int(text)] * count
    name, *numbers = text.split(":")
    needs, draw = _DISTRIBUTIONS.get(name, (0, None))
    try:
        values = [float(number) for number in numbers]
        if draw is None or len(values) != needs or min(values) <= 0:
            raise ValueError
        return [max(1, int(length)) for length in np.clip(draw(random, count, *values), 1, _MOST_TOKENS)]
    except (ValueError, OverflowError):
        raise UsageError(
            f"{option}_tokens: {text!r} is not a length: 128, uniform:16:256, exponential:128 or lognormal:128:0.8"
        ) from None


def _read(file: Path) -> list[TextLine]:
    lines = []
    for number, line in enumerate(read_bytes(file).splitlines(), 1):
        shape = '{"prompt": "...", "max_tokens": 50}'
        with refusing(f"{file}, line {number}: a text is a line of JSON like {shape}:", (ValueError, RecursionError)):
            lines += [msgspec.json.decode(line, type=TextLine)] if line.strip() else []
    if not lines:
        raise UsageError(f"{file} is empty")
    return lines
