"""One client's connection: HTTP/1.1 between the socket and the `App`.

The bytes are read by httptools (llhttp, the parser of Node.js). What is here is the order of answers, limits on time
and size, and flow control. It is ours because of models whose call takes microseconds: with the same engine behind both
it answers 1.21, 1.40 and 1.58 times as many requests a second as uvicorn (uvloop, httptools) at 1, 8 and 32 clients,
and 1.7 to 2.3 times as many as granian. With a call of 11 ms the three are equal (``bench/http_front.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from http import HTTPStatus
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from fettle.serve.engine.alarm import Alarm
from fettle.serve.engine.refusal import Malformed
from fettle.serve.http.app import App
from fettle.serve.http.call import Call
from fettle.serve.http.reply import Reply, json_reply

log = logging.getLogger("fettle.serve")
MAX_HEAD = 64 << 10
"""Bytes of a request that are not its body: first line, headers, a chunk's size, what follows the last chunk."""
_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus}
_OTHER_PROTOCOLS = (b"connection", b"upgrade", b"http2-settings")
_BREAKS = b"\r\n\0"


class Connection(asyncio.Protocol):
    """Answers come in the order of the requests; each request is whole before the application sees it.

    A connection on which nothing is under way is closed after `Limits.idle_s`, also before its first request and in the
    middle of headers. A body has `Limits.body_s`; so has a client to take its answer.
    """

    def __init__(self, app: App, every: set[Connection], loop: asyncio.AbstractEventLoop) -> None:
        self._app, self._every, self._loop = app, every, loop
        self._transport: asyncio.Transport | None = None
        self._parser = HttpRequestParser(self)
        self._alarm = Alarm(self._late)
        self._head_bytes = 0
        """Received since the last part of a request that was whole."""
        self._call = app.call("", b"", {}, self.gone)
        self._pieces: list[bytes] | None = []
        """Pieces of the body that is being read; None: nobody will look at it."""
        self._size = 0
        self._in_body = False
        self._pending: deque[tuple[Call, Reply | None, bool]] = deque()
        """What waits for its turn: the request, its answer where that is known, and whether the connection is kept."""
        self._work: asyncio.Task[None] | None = None
        self._last = False
        """Whether the connection ends with what is under way."""
        self._room: asyncio.Event | None = None
        """Where the client does not take what is written: set once it does."""

    def gone(self) -> bool:
        return self._transport is None

    def finish(self) -> None:
        """Answer what was asked, then close."""
        self._last = True
        if self._work is None and not self._in_body:
            self._close()

    def abort(self) -> None:
        """Close now."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # -- the socket --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._every.add(self)
        self._alarm.set(time.perf_counter() + self._app.limits.idle_s, self._loop)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._every.discard(self)
        self._alarm.clear()
        self._drop()
        while self._pending:
            self._app.unanswered -= len(self._pending.pop()[0].sent)
        if self._room is not None:
            self._room.set()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        try:
            try:
                self._parser.feed_data(data)
            except HttpParserUpgrade as paused:
                self._read_as_http(data[paused.args[0] :])
        except (HttpParserError, HttpParserUpgrade):
            self._end_with("this is not an HTTP request")
            return
        if self._head_bytes > MAX_HEAD:
            self._end_with("the headers are too long")
        elif self._in_body:
            self._watch()

    def pause_writing(self) -> None:
        self._room = asyncio.Event()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.set()
            self._room = None

    # -- the parser --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._call = self._app.call("", b"", {}, self.gone)
        self._pieces, self._size = [], 0

    def on_url(self, url: bytes) -> None:
        self._call.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers come after the head was checked: they are ignored
            name, headers = name.lower(), self._call.headers
            headers[name] = headers[name] + b", " + value if name in headers else value

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade():
            return  # `_read_as_http` parses the head once more
        call = self._call
        self._head_bytes, self._in_body = 0, True
        method = self._parser.get_method().decode("ascii")
        call.bodiless = method == "HEAD"
        call.method = "GET" if call.bodiless else method
        call.began = time.perf_counter()
        refused = self._app.refusal(call)
        if refused is not None:
            self._refuse(refused)
        elif self._work is None and call.headers.get(b"expect", b"").lower() == b"100-continue":
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n")  # or it would be read as part of an answer

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        if self._pieces is None:
            return
        app = self._app
        self._size += len(body)
        app.unanswered += len(body)
        self._pieces.append(body)
        if self._size > app.limits.max_body:
            self._refuse(app.refused(self._call, app.limits.too_large()))
        elif app.unanswered > app.limits.max_unanswered:
            self._refuse(app.refused(self._call, app.limits.too_much()))

    def on_chunk_header(self) -> None:
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        self._head_bytes, self._in_body = 0, False
        if self._pieces is not None:
            self._call.sent = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces = None
            self._ask(self._call, None)

    def _read_as_http(self, rest: bytes) -> None:
        """A request that asks to upgrade to another protocol, read once more without that header.

        Java's client asks so for HTTP/2 with every first request, and the parser stops before the body.
        """
        call, method = self._call, self._parser.get_method()
        self._parser = HttpRequestParser(self)
        headers = [b"%b: %b\r\n" % pair for pair in call.headers.items() if pair[0] not in _OTHER_PROTOCOLS]
        self._parser.feed_data(b"".join([method, b" ", call.target, b" HTTP/1.1\r\n", *headers, b"\r\n", rest]))

    # -- answers -----------------------------------------------------------------------------------------------------

    def _refuse(self, reply: Reply) -> None:
        """Answer before the body has come; what comes of it is not kept."""
        self._drop()
        self._ask(self._call, reply)

    def _ask(self, call: Call, reply: Reply | None) -> None:
        parser = self._parser
        self._pending.append((call, reply, parser.should_keep_alive() and parser.get_http_version() != "1.0"))
        if self._work is None:
            self._work = self._loop.create_task(self._answer())
        elif self._transport is not None:
            self._transport.pause_reading()

    def _drop(self) -> None:
        """Forget what has come of a body."""
        if self._pieces is not None:
            self._app.unanswered -= self._size
            self._pieces = None

    def _end_with(self, reason: str) -> None:
        """Say what was wrong after the answers that are under way, and close: what follows cannot be told apart."""
        self._drop()
        self._in_body, self._last = False, True
        self._ask(self._app.call("", b"", {}, self.gone), json_reply({"error": reason}, 400))
        if self._transport is not None:
            self._transport.pause_reading()

    async def _answer(self) -> None:
        """All that has been asked, one after the other."""
        kept, app = True, self._app
        while self._pending and kept:
            call, reply, kept = self._pending.popleft()
            if reply is None:
                reply = await app.answer(call)
                app.unanswered -= len(call.sent)
            kept = kept and (not self._last or bool(self._pending))
            if reply.events is None:
                head = _head(reply, ((b"content-length", b"%d" % len(reply.body)),), kept)
                self._write(head if call.bodiless else head + reply.body)
            else:  # also where the client has gone: whoever makes them stops then
                kept = await self._stream(reply, kept)
            if self._room is not None:
                await self._taken()
        self._work = None
        if self._transport is None:
            return
        if not kept or (self._last and not self._in_body):
            self._close()
            return
        self._transport.resume_reading()
        self._watch()

    async def _stream(self, reply: Reply, kept: bool) -> bool:
        """Write events as they come. Where the connection is not kept its end is theirs. False where they broke off."""
        assert reply.events is not None
        async with contextlib.aclosing(reply.events) as events:
            try:
                self._write(_head(reply, ((b"transfer-encoding", b"chunked"),) if kept else (), kept))
                async for event in events:
                    self._write(b"%x\r\n%b\r\n" % (len(event), event) if kept else event)
                    if self._room is not None:
                        await self._taken()
                self._write(b"0\r\n\r\n" if kept else b"")
            except Exception:
                log.exception("an answer broke off")
                self.abort()
                return False
        return kept

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def _taken(self) -> None:
        """Wait until the client has taken most of what was written."""
        self._alarm.set(time.perf_counter() + self._app.limits.body_s, self._loop)
        if self._room is not None:
            await self._room.wait()
        self._watch()

    # -- the end -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Set the alarm for what the client has to do next. While we compute it has nothing to do, and where the alarm
        was left as it was then, `_late` passes over it."""
        if self._transport is None or self._room is not None:  # first it has to take what was written
            return
        limits, until = self._app.limits, math.inf
        if self._in_body:
            until = self._call.began + limits.body_s
        elif self._work is None:
            until = time.perf_counter() + limits.idle_s
        self._alarm.set(until, self._loop)

    def _late(self) -> None:
        """The alarm: a body, the next request, or the taking of an answer took too long."""
        if self._room is None and self._in_body and self._pieces is not None:
            self._last = True
            self._refuse(self._app.refused(self._call, Malformed("the body took too long to arrive", 408)))
        elif self._room is not None or self._in_body:
            self.abort()
        elif self._work is None:
            self._close()

    def _close(self) -> None:
        """Close once what was written is taken."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
            if transport.get_write_buffer_size():
                self._loop.call_later(self._app.limits.body_s, transport.abort)


def _head(reply: Reply, more: Any, kept: bool) -> bytes:
    parts = [_STATUS[reply.status], b"content-type: ", reply.kind.translate(None, _BREAKS)]
    for name, value in (*more, *reply.headers):
        parts += (b"\r\n", name, b": ", value.translate(None, _BREAKS))
    parts.append(b"\r\n\r\n" if kept else b"\r\nconnection: close\r\n\r\n")
    return b"".join(parts)
