"""An `App` behind another ASGI server, as in Ray Serve. `connection` is the shorter way of `fettle serve`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fettle.serve.engine.refusal import Malformed
from fettle.serve.http.app import App
from fettle.serve.http.call import Call
from fettle.serve.http.reply import Reply

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class _Gone(Exception):
    """The client went away before its request was whole."""


class Asgi:
    """The ASGI application."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] == "http":
            target = scope.get("raw_path") or scope["path"].encode()
            query = scope.get("query_string", b"")
            method = scope["method"].replace("HEAD", "GET")  # the server around us leaves the body out
            gone = asyncio.Event()
            call = self._app.call(method, target + (b"?" + query if query else b""), dict(scope["headers"]),
                                  gone.is_set)  # fmt: skip
            call.began = time.perf_counter()
            with contextlib.suppress(_Gone):
                refused = await self._refused(call, receive)
                watching = asyncio.ensure_future(_watch(receive, gone))
                try:
                    await _send(refused or await self._answer(call), send)
                finally:
                    watching.cancel()

    async def _refused(self, call: Call, receive: Receive) -> Reply | None:
        """Read the body: the answer to a request that is refused by its head or its body, None for the others."""
        refused = self._app.refusal(call)
        if refused is not None:
            return refused
        try:
            async with asyncio.timeout(self._app.limits.body_s):
                call.sent = await _read(call, receive)
        except TimeoutError:
            return self._app.refused(call, Malformed("the body took too long to arrive", 408))
        except Malformed as error:
            return self._app.refused(call, error)
        return None

    async def _answer(self, call: Call) -> Reply:
        self._app.unanswered += len(call.sent)
        try:
            return await self._app.answer(call)
        finally:
            self._app.unanswered -= len(call.sent)


async def _watch(receive: Receive, gone: asyncio.Event) -> None:
    """Note that the client goes away, which is all that can come after the body."""
    with contextlib.suppress(Exception):  # of the server around us
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()


async def _read(call: Call, receive: Receive) -> bytes:
    pieces, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > call.limits.max_body:
            raise call.limits.too_large()
        more = message.get("more_body", False)
    return b"".join(pieces)


async def _send(reply: Reply, send: Send) -> None:
    headers = [(b"content-type", reply.kind), *reply.headers]
    if reply.events is None:
        headers.append((b"content-length", b"%d" % len(reply.body)))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if reply.events is not None:
        async with contextlib.aclosing(reply.events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": reply.body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
