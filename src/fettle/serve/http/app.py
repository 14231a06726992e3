"""The ASGI application of one port: guard, call, route, reply."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable

from fettle.serve.http import about, generation, management, oip, torchserve
from fettle.serve.http.call import Call, Gone, Limits, Receive, Scope, path_parts
from fettle.serve.http.guard import Guard
from fettle.serve.http.openapi import openapi
from fettle.serve.http.patience import Patience
from fettle.serve.http.reply import Reply, Send, refused, said
from fettle.serve.refusal import NoSuchPath, Refusal
from fettle.serve.registry import Registry
from fettle.serve.spans import Spans

log = logging.getLogger("fettle.serve.access")
Route = Callable[[Call], Awaitable[Reply | None]]
REQUESTS: tuple[Route, ...] = (
    oip.infer,
    torchserve.predict,
    generation.generate,
    oip.read,
    torchserve.ping,
    about.read,
)
"""In this order each is asked whether the path is its own."""
MANAGEMENT: tuple[Route, ...] = (management.manage, torchserve.manage, oip.read, torchserve.ping, about.read)
"""Nothing but these opens the calls that change what is served."""


class App:
    """One port."""

    def __init__(
        self, registry: Registry, *, management: bool = False, token: str = "", limits: Limits | None = None,
        hosts: tuple[str, ...] = (), log_requests: bool = False, spans: Spans | None = None,
    ) -> None:  # fmt: skip
        self.registry, self.log_requests, self.spans = registry, log_requests, spans
        self.limits = limits = limits or Limits()
        self._guard = Guard(token, management=management, hosts=hosts)
        self._routes = MANAGEMENT if management else REQUESTS
        self._patience = Patience(limits.body_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        began = time.perf_counter()
        call = Call(scope, scope["method"], [], dict(scope["headers"]), receive, self.registry, self.limits,
                    self._patience)  # fmt: skip
        try:
            self._guard.check(call.headers)
            call.parts = path_parts(scope)
            reply = await self._route(call)
        except Refusal as refusal:
            reply = refused(refusal, call.parts)
        except Gone:
            return
        except Exception:
            number = uuid.uuid4().hex[:12]
            logging.getLogger("fettle.serve").exception("request %s failed", number)
            reply = said({"error": f"internal error, request {number}"}, 500)
        self._note(call, reply, began)
        await reply.send(send)

    async def _route(self, call: Call) -> Reply:
        for route in self._routes:
            reply = await route(call)
            if reply is not None:
                return reply
        known = openapi(self.registry, "")["paths"].get("/" + "/".join(call.parts))
        if known is not None:  # the path is right and the method is not
            allowed = ", ".join(sorted(method.upper() for method in known))
            raise Refusal(405, f"the method is {allowed} here", ((b"allow", allowed.encode()),))
        raise NoSuchPath

    def _note(self, call: Call, reply: Reply, began: float) -> None:
        """Count, record and log what is about to be answered."""
        version = call.version
        if version is not None:
            version.metrics.response(reply.status)
            version.last_ms = int(time.time() * 1e3)
            if self.spans is not None:
                manifest = version.package.manifest
                self.spans.record(call.headers, manifest.name, manifest.version, reply.status, began, reply.answer)
        if self.log_requests:
            seconds = time.perf_counter() - began
            log.info(json.dumps({"method": call.method, "path": call.scope["path"][:200], "status": reply.status,
                                 "ms": round(seconds * 1e3, 3)}))  # fmt: skip


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
