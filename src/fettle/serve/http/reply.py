"""Answers on their way out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from fettle.serve.engine.refusal import Headers, NoSuchPath, Refusal
from fettle.serve.engine.request import Answer

JSON = b"application/json"
"""Without a charset: kserve's client compares it with ``==``."""
GONE = 499
"""Inside the server: the client went away. Where somebody still listens, it reads 503."""
_TORCHSERVE = ("predictions", "explanations", "models", "v1")
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
_TORCHSERVE_TYPES = {
    400: "BadRequestException", 404: "ModelNotFoundException", 413: "RequestEntityTooLargeException",
    500: "InternalServerException", 503: "ServiceUnavailableException",
}  # fmt: skip


class Error(msgspec.Struct):
    """What a client hears that is refused, or whose call failed."""

    error: str


class TorchServeError(msgspec.Struct):
    """The same for clients of TorchServe's URLs."""

    code: int
    type: str
    message: str


class ErrorOf(msgspec.Struct):
    """What was wrong, as OpenAI's protocol says it."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class OpenAIError(msgspec.Struct):
    """The error of OpenAI's protocol, which has its paths under ``/v1``."""

    error: ErrorOf


class Reply(msgspec.Struct, eq=False):
    """One answer: status, body, and its type."""

    status: int
    body: bytes = b""
    kind: bytes = JSON
    headers: Headers = ()
    answer: Answer | None = None
    """What the pool said of it, for the spans."""
    events: AsyncGenerator[bytes, None] | None = None
    """The body as it comes, where it is not known yet."""


def json_reply(value: Any, status: int = 200) -> Reply:
    """A value as JSON."""
    return Reply(status, msgspec.json.encode(value))


def error_reply(refusal: Refusal, parts: Sequence[str]) -> Reply:
    """What a client of the protocol that this path belongs to understands as an error."""
    status = 503 if refusal.status == GONE else refusal.status
    if parts and parts[0] == "v1" and not (len(parts) == 3 and ":" in parts[2]):
        kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        reply = json_reply(OpenAIError(ErrorOf(refusal.reason, kind, refusal.param, refusal.code)), status)
    elif not parts or parts[0] not in _TORCHSERVE:
        reply = json_reply(Error(refusal.reason), status)
    else:
        kind = _TORCHSERVE_TYPES.get(status, "ServiceException")
        if isinstance(refusal, NoSuchPath):
            kind = "ResourceNotFoundException"
        reply = json_reply(TorchServeError(status, kind, refusal.reason), status)
    reply.headers = refusal.headers
    return reply
