"""What the server says no with: the HTTP status, and a sentence for the client that names nothing of the inside."""

from __future__ import annotations

Headers = tuple[tuple[bytes, bytes], ...]
TOO_LONG = "context_length_exceeded"
"""The `Refusal.code` of a prompt for which the model has no room."""
NO_MODEL = "model_not_found"
"""That of a model or version that is not served."""


class Refusal(Exception):
    """A request is not served. Whoever finds out raises it; one place makes an answer of it."""

    def __init__(
        self, status: int, reason: str, retry_s: float = 0.0, *, headers: Headers = (), param: str | None = None,
        code: str | None = None,
    ) -> None:  # fmt: skip
        """`retry_s` says when to come again, where that helps."""
        super().__init__(reason)
        retry = ((b"retry-after", str(max(1, round(retry_s))).encode()),) if retry_s else ()
        self.status, self.reason, self.headers = status, reason, (*retry, *headers)
        self.param, self.code = param, code
        """The parameter that is wrong, and why in one word, where OpenAI's protocol has them."""


class Malformed(Refusal):
    """The request is not one, or not one for this model."""

    def __init__(self, reason: str, status: int = 400, *, param: str | None = None) -> None:
        super().__init__(status, reason, param=param)


class NoSuchPath(Refusal):
    """Nothing is served under this path and method."""

    def __init__(self) -> None:
        super().__init__(404, "no such path")
