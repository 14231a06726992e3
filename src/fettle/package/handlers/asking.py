"""What passes between a server and a worker that writes texts: one `Ask` there, a `Piece` for each token back."""

from __future__ import annotations

from typing import Any

import msgspec

from fettle.package.handlers.sampling import Sampling


class Ask(msgspec.Struct, frozen=True, omit_defaults=True):
    """A text to be written, as the server hands it to a worker: after one of `text`, `tokens` or `messages`."""

    text: str | None = None
    tokens: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    """For the chat template."""
    template: dict[str, Any] | None = None
    """What it is told besides, such as ``enable_thinking``."""
    sampling: Sampling = Sampling()
    strict: bool = False
    """Refuse more new tokens than there is room for, instead of fewer."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """How likely a token was, and the likeliest ones in its place."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """One more token of a text, on its way to whoever asked."""

    text: str = ""
    """The characters that are certain now; none while one is not whole, or may begin a stop string."""
    logprobs: tuple[TokenLogprob, ...] = ()
    reason: str = ""
    """With the last piece: why the text ends, ``stop`` or ``length``."""
    prompt_tokens: int = 0
    tokens: int = 0
    """With the last piece: tokens of the prompt, and of the answer without the one that ended it."""


asks = msgspec.json.Decoder(Ask)
pieces = msgspec.json.Decoder(Piece)
