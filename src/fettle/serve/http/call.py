"""One HTTP request as the routes see it, and the limits on what a client may send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, unquote

from fettle.serve import protocol
from fettle.serve.http import direct
from fettle.serve.http.patience import Patience
from fettle.serve.refusal import Malformed, NoSuchPath
from fettle.serve.registry import Registry, Version

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
MAX_PARTS, MAX_PART = 8, 200
"""Of a path."""


@dataclass(frozen=True)
class Limits:
    """What a client may ask for."""

    max_body: int = 64 << 20
    body_s: float = 30.0
    """The longest that a body may take to arrive."""
    idle_s: float = 30.0
    """The longest that a connection may stay without a request whose headers are whole."""


class Gone(Exception):
    """The client went away before its request was whole."""


@dataclass(slots=True)
class Call:
    """One request. `version` is set by the route as soon as it is known: errors are counted for it, too."""

    scope: Scope
    method: str
    parts: list[str]
    """Of the path, unquoted."""
    headers: dict[bytes, bytes]
    receive: Receive
    registry: Registry
    limits: Limits
    patience: Patience
    version: Version | None = None

    async def body(self) -> bytes:
        """The whole body, unpacked. Raises `Malformed` where it is too large or too slow, `Gone` without a client."""
        most = self.limits.max_body
        announced = self.headers.get(b"content-length")
        if announced is not None and (len(announced) > 15 or int(announced) > most):
            raise Malformed(f"a body may have {most} bytes", 413)
        cycle = direct.cycle_of(self.receive)
        body = direct.whole_body(cycle) if cycle is not None else None
        if body is None:
            body = await self._awaited(most)
        elif len(body) > most:
            raise Malformed(f"a body may have {most} bytes", 413)
        encoding = self.headers.get(b"content-encoding")
        if encoding is None or encoding == b"identity":
            return body
        return protocol.inflate(body, encoding.decode("latin-1").lower(), most)

    async def _awaited(self, most: int) -> bytes:
        """The body as it comes."""
        task = self.patience.begin()
        try:
            return await _read(self.receive, most)
        except asyncio.CancelledError:
            if not self.patience.end(task):
                raise
            task.uncancel()
            raise Malformed("the body took too long to arrive", 408) from None
        finally:
            self.patience.end(task)

    async def json(self) -> dict[str, Any]:
        """The body as a JSON object; an empty body is an empty one."""
        try:
            found = json.loads(await self.body() or b"{}")
        except (ValueError, RecursionError):
            raise Malformed("the body is no JSON") from None
        if not isinstance(found, dict):
            raise Malformed("the body must be a JSON object")
        return found

    def query(self) -> dict[str, str]:
        """The parameters after the question mark."""
        try:
            return dict(parse_qsl(self.scope.get("query_string", b"").decode("latin-1"), max_num_fields=32))
        except ValueError:
            raise Malformed("too many parameters") from None

    def header(self, name: bytes) -> str:
        """A header's text; empty where it was not sent."""
        return self.headers.get(name, b"").decode("latin-1")

    @property
    def model_path(self) -> tuple[str, str | None, list[str]] | None:
        """Of ``/v2/models/NAME[/versions/V]/...``: name, version, and the rest. None for other paths."""
        match self.parts:
            case ["v2", "models", name, "versions", number, *rest]:
                return name, number, rest
            case ["v2", "models", name, *rest]:
                return name, None, rest
        return None

    def choose(self, name: str, number: str | None) -> Version:
        """The version that answers this call. Those of one session, or of one request's tries, go the same way."""
        self.version = self.registry.choose(name, number, self.header(b"x-session-id") or self.header(b"x-request-id"))
        return self.version

    def gone(self) -> Callable[[], bool] | None:
        """Whether the client has gone: uvicorn knows without being waited for."""
        cycle = direct.cycle_of(self.receive)
        return (lambda: bool(cycle.disconnected)) if cycle is not None else None


def path_parts(scope: Scope) -> list[str]:
    """The path between its slashes, unquoted after it was cut. Raises `NoSuchPath` where it is too long."""
    return list(_parts(scope.get("raw_path") or scope["path"].encode()))


@lru_cache(maxsize=256)
def _parts(raw: bytes) -> tuple[str, ...]:
    path = raw.decode("latin-1")
    parts = path.split("/")[1:]
    if parts and parts[-1] == "":
        parts.pop()
    if "%" in path:
        parts = [unquote(part) for part in parts]
    if len(parts) > MAX_PARTS or any(len(part) > MAX_PART for part in parts):
        raise NoSuchPath
    return tuple(parts)


async def _read(receive: Receive, most: int) -> bytes:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Gone
    body: bytes = message.get("body", b"")
    if not message.get("more_body") and len(body) <= most:
        return body
    pieces, size = [body], len(body)
    while message.get("more_body"):
        if size > most:
            break
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
    if size > most:
        raise Malformed(f"a body may have {most} bytes", 413)
    return b"".join(pieces)
