"""One HTTP request as the routes see it, and the limits on what a client may send."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, unquote

import msgspec
from httptools import HttpParserInvalidURLError, parse_url

from fettle.serve.engine.pool import Pool
from fettle.serve.engine.refusal import Malformed, NoSuchPath, Refusal
from fettle.serve.engine.registry import Registry

MAX_PARTS, MAX_PART = 8, 200
"""The most parts of a path, and characters of one."""


@dataclass(frozen=True)
class Limits:
    """What a client may ask for."""

    max_body: int = 64 << 20
    max_unanswered: int = 1 << 30
    """Bytes of bodies that have come and are not answered yet, unpacked, on all connections of a port."""
    body_s: float = 30.0
    """The longest that a body may take to arrive, or an answer to be taken."""
    idle_s: float = 30.0
    """The longest that a connection may stay without a request whose headers are whole."""

    def too_large(self) -> Malformed:
        """What a client hears whose body is larger than `max_body`."""
        return Malformed(f"a body may have at most {self.max_body} bytes", 413)

    def too_much(self) -> Refusal:
        """What a client hears whose body is one too many for `max_unanswered`."""
        return Refusal(503, "too much is being read", 1.0)


class Call(msgspec.Struct, eq=False):
    """One request. `version` is set by the route as soon as it is known: errors are counted for it, too."""

    method: str
    """HEAD is GET here, without the body of its answer."""
    target: bytes
    """Path and query, as they were sent."""
    headers: dict[bytes, bytes]
    """By their names in small letters."""
    gone: Callable[[], bool]
    """Whether the client has gone away."""
    registry: Registry
    limits: Limits
    sent: bytes = b""
    """The body; unpacked before a route sees it."""
    bodiless: bool = False
    began: float = 0.0
    """When its headers were whole, of `time.perf_counter`."""
    parts: Sequence[str] = ()
    """Parts of the path, unquoted."""
    version: Pool | None = None

    def check_head(self) -> None:
        """Raise `Malformed` where the body is announced as too large or in a coding that nobody reads, or where it is
        not certain for which host it is: what another server before us makes of that may differ."""
        if b"," in self.headers.get(b"host", b""):
            raise Malformed("a request must name exactly one host")
        if self.headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            raise Malformed("the body's Transfer-Encoding is not supported", 501)
        announced = self.headers.get(b"content-length")
        if announced is not None and (len(announced) > 15 or int(announced) > self.limits.max_body):
            raise self.limits.too_large()

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; an empty body is an empty one."""
        try:
            body = json.loads(self.sent or b"{}")
        except (ValueError, RecursionError):
            raise Malformed("the body is not JSON") from None
        if not isinstance(body, dict):
            raise Malformed("the body must be a JSON object")
        return body

    def query(self) -> dict[str, str]:
        """The parameters after the question mark."""
        try:
            return dict(parse_qsl(_cut(self.target)[1].decode("latin-1"), max_num_fields=32))
        except ValueError:
            raise Malformed("too many parameters") from None

    def header(self, name: bytes) -> str:
        """A header's text; empty where it was not sent."""
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def model_path(self) -> tuple[str, str | None, list[str]] | None:
        """From ``/v2/models/NAME[/versions/V]/...``: name, version, and the rest. None for other paths."""
        match self.parts:
            case ["v2", "models", name, "versions", number, *rest]:
                return name, number, rest
            case ["v2", "models", name, *rest]:
                return name, None, rest
        return None

    def choose(self, name: str, number: str | None = None) -> Pool:
        """The version that answers this call. Those of one session, or of one request's tries, go the same way."""
        sticky = self.headers.get(b"x-session-id") or self.headers.get(b"x-request-id") or b""
        self.version = self.registry.choose(name, number, sticky.decode("latin-1"))
        return self.version


@lru_cache(maxsize=64)  # refusals are not kept, so none is long
def path_parts(target: bytes) -> tuple[str, ...]:
    """Of a request's target without the query: the path between its slashes, unquoted after it was cut.

    Raises `NoSuchPath` where it is too long, `Malformed` where it is not one.
    """
    path = _cut(target)[0].decode("latin-1")
    parts = [unquote(part) for part in path.split("/")[1:]]
    if parts and parts[-1] == "":
        parts.pop()
    if len(parts) > MAX_PARTS or any(len(part) > MAX_PART for part in parts):
        raise NoSuchPath
    return tuple(parts)


def _cut(target: bytes) -> tuple[bytes, bytes]:
    if target[:1] == b"/" and b"#" not in target and target.isascii():
        path, _, query = target.partition(b"?")
        return path, query
    try:
        url = parse_url(target)  # with a scheme and a host before the path
    except HttpParserInvalidURLError:
        raise Malformed("the path is not valid") from None
    return url.path or b"", url.query or b""
