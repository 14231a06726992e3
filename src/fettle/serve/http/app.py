"""What one port answers: who may call, which route a request goes to, and its reply."""

from __future__ import annotations

import hmac
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping

from fettle.serve.engine.refusal import NoSuchPath, Refusal
from fettle.serve.engine.registry import Registry
from fettle.serve.engine.spans import Spans
from fettle.serve.http import about, generation, management, oip, openai, torchserve
from fettle.serve.http.aside import aside
from fettle.serve.http.call import Call, Limits, path_parts
from fettle.serve.http.protocol import inflate
from fettle.serve.http.reply import Reply, error_reply

log = logging.getLogger("fettle.serve.access")
Route = Callable[[Call], Awaitable[Reply | None]]
REQUESTS: tuple[Route, ...] = (
    oip.infer,
    torchserve.predict,
    generation.generate,
    openai.answer,
    oip.read,
    torchserve.ping,
    about.read,
)
"""In this order each is asked whether the path is its own."""
MANAGEMENT: tuple[Route, ...] = (management.manage, torchserve.manage, oip.read, torchserve.ping, about.read)
"""Nothing but these opens the calls that change what is served."""
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})


class App:
    """What answers at one port."""

    def __init__(
        self, registry: Registry, *, management: bool = False, token: str = "", limits: Limits | None = None,
        hosts: tuple[str, ...] = (), log_requests: bool = False, spans: Spans | None = None,
    ) -> None:  # fmt: skip
        self.registry, self.log_requests, self.spans = registry, log_requests, spans
        self.limits = limits or Limits()
        self._token, self._hosts = token.encode(), LOOPBACK_NAMES | {host.lower() for host in hosts}
        self._routes = MANAGEMENT if management else REQUESTS
        self._guarded = management or bool(token)
        self.unanswered = 0
        """Bytes of bodies that have come and are not answered yet."""

    def call(self, method: str, target: bytes, headers: dict[bytes, bytes], gone: Callable[[], bool]) -> Call:
        """A request of this port."""
        return Call(method, target, headers, gone, self.registry, self.limits)

    def refusal(self, call: Call) -> Reply | None:
        """The answer to a request that is refused by its head, before the body is read; None for the others."""
        try:
            if self._guarded:
                self._check_caller(call.headers)
            call.parts = path_parts(call.target.partition(b"?")[0])
            call.check_head()
        except Refusal as refusal:
            return self.refused(call, refusal)
        return None

    def _check_caller(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `Refusal` (403 or 401) unless this request may come in, whatever its path and method: it needs the
        token, and on the management port also a host name of ours."""
        if self._routes is MANAGEMENT:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            if name not in self._hosts:  # a page in a browser that lured the name to this machine
                raise Refusal(403, "this host name is not served here")
        kind, _, token = headers.get(b"authorization", b"").partition(b" ")
        if not self._token or kind.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._token):
            raise Refusal(401, "a token is needed", headers=((b"www-authenticate", b"Bearer"),))

    def refused(self, call: Call, refusal: Refusal) -> Reply:
        """The answer to a request that is refused."""
        return self._noted(call, error_reply(refusal, call.parts))

    async def answer(self, call: Call) -> Reply:
        """The answer to a request that is whole and was not refused. Raises nothing."""
        try:
            if b"content-encoding" in call.headers:
                await self._unpack(call)
            for route in self._routes:
                reply = await route(call)
                if reply is not None:
                    break
            else:
                raise self._no_route(call)
        except Refusal as refusal:
            return self.refused(call, refusal)
        except Exception:
            number = uuid.uuid4().hex[:12]
            logging.getLogger("fettle.serve").exception("request %s failed", number)
            reply = error_reply(Refusal(500, f"internal error, request {number}"), call.parts)
        return self._noted(call, reply)

    async def _unpack(self, call: Call) -> None:
        """Unpack a body that was sent compressed. It counts among the unanswered ones as large as it is now."""
        encoding = call.header(b"content-encoding").lower()
        if encoding in ("", "identity"):
            return
        packed = len(call.sent)
        most = self.limits.max_body
        call.sent = await aside(most, lambda: inflate(call.sent, encoding, most))
        self.unanswered += len(call.sent) - packed
        if self.unanswered > self.limits.max_unanswered:
            raise self.limits.too_much()

    def _no_route(self, call: Call) -> Refusal:
        known = about.document(self.registry)["paths"].get("/" + "/".join(call.parts))
        if known is None or self._routes is MANAGEMENT:  # the document is the other port's
            return NoSuchPath()
        allowed = ", ".join(sorted(method.upper() for method in known))  # the path is right and the method is not
        return Refusal(405, f"the method is {allowed} here", headers=((b"allow", allowed.encode()),))

    def _noted(self, call: Call, reply: Reply) -> Reply:
        """Count, record and log what is about to be answered."""
        version = call.version
        if version is not None:
            version.metrics.response(reply.status)
            version.last_ms = int(time.time() * 1e3)
            if self.spans is not None:
                manifest = version.package.manifest
                self.spans.record(call.headers, manifest.name, manifest.version, reply.status, call.began, reply.answer)
        if self.log_requests:
            seconds, path = time.perf_counter() - call.began, call.target.partition(b"?")[0].decode("latin-1")
            log.info(json.dumps({"method": call.method, "path": path[:200], "status": reply.status,
                                 "ms": round(seconds * 1e3, 3)}))  # fmt: skip
        return reply
