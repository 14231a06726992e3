"""What the server says no with: the HTTP status, and a sentence for the client that names nothing of the inside."""

from __future__ import annotations

Headers = tuple[tuple[bytes, bytes], ...]


class Refusal(Exception):
    """A request is not served. Whoever finds out raises it; one place makes an answer of it."""

    def __init__(self, status: int, reason: str, headers: Headers = ()) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers


class Rejected(Refusal):
    """A sound request is refused or given up, and when to come again where that helps.

    `kind` says why in one word.
    """

    def __init__(self, status: int, reason: str, retry_s: float = 0.0, kind: str = "") -> None:
        headers = ((b"retry-after", str(max(1, round(retry_s))).encode()),) if retry_s else ()
        super().__init__(status, reason, headers)
        self.kind = kind or str(status)


class Malformed(Refusal):
    """The request is not one, or not one for this model."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(status, reason)


class NoSuchPath(Refusal):
    """Nothing is served under this path and method."""

    def __init__(self) -> None:
        super().__init__(404, "no such path")
