"""The HTTP face: one ASGI application for requests, another for management, on ports of their own.

Protocols: Open Inference Protocol v2 with binary tensors, statistics and configuration; TorchServe's URLs. The path of
an inference is handled before any router looks at it. Every request passes one guard: what it does not allow is denied.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from prometheus_client import generate_latest

from fettle.errors import UsageError
from fettle.serve import protocol
from fettle.serve.handlers import generate
from fettle.serve.openapi import generates, openapi, page
from fettle.serve.patience import Patience
from fettle.serve.pool import Answer, Pool, Rejected
from fettle.serve.protocol import Malformed
from fettle.serve.registry import Registry, Version
from fettle.serve.spans import Spans

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
log = logging.getLogger("fettle.serve.access")
JSON = b"application/json"
EXTENSIONS = ["generate", "binary_tensor_data", "model_repository", "model_configuration", "statistics"]


@dataclass(frozen=True)
class Limits:
    """What a client may ask for."""

    max_body: int = 64 << 20
    body_s: float = 30.0
    """The longest that a body may take to arrive."""


class Reply(Exception):
    """An answer, wherever it is found: raised by what refuses, returned by what serves."""

    def __init__(
        self,
        status: int,
        body: Any = b"",
        kind: bytes = JSON,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        answer: Answer | None = None,
        events: AsyncGenerator[bytes, None] | None = None,
    ) -> None:
        super().__init__(status)
        self.answer = answer
        """What the pool said of it, for the spans."""
        self.events = events
        """The body in pieces, where it is not known yet."""
        self.status, self.kind, self.headers = status, kind, headers
        self.body: bytes | tuple[bytes, ...] = body if isinstance(body, (bytes, tuple)) else json.dumps(body).encode()


class App:
    """One port. `management` opens the calls that change what is served, and nothing else does."""

    def __init__(
        self, registry: Registry, *, management: bool = False, token: str = "", limits: Limits = Limits(),
        hosts: tuple[str, ...] = (), log_requests: bool = False, spans: Spans | None = None,
    ) -> None:  # fmt: skip
        self.registry, self.management, self.token, self.limits = registry, management, token.encode(), limits
        self.hosts = {host.lower() for host in hosts} | {"127.0.0.1", "localhost", "[::1]"}
        self._patience = Patience(limits.body_s)
        self.log_requests, self.spans = log_requests, spans

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        began = time.perf_counter()
        headers: dict[bytes, bytes] = dict(scope["headers"])
        version: Version | None = None
        try:
            self._guard(headers)
            reply, version = await self._serve(scope, headers, receive)
        except Reply as refused:
            reply = refused
        except (Rejected, Malformed) as error:
            reply = _refusal(error, scope["path"])
        except _Gone:
            return
        except Exception:
            number = uuid.uuid4().hex[:12]
            logging.getLogger("fettle.serve").exception("request %s failed", number)
            reply = Reply(500, {"error": f"internal error, request {number}"})
        if version is not None:
            version.metrics.response(reply.status)
            if self.spans is not None:
                manifest = version.package.manifest
                self.spans.record(headers, manifest.name, manifest.version, reply.status, began, reply.answer)
        if self.log_requests:
            seconds = time.perf_counter() - began
            log.info(json.dumps({"method": scope["method"], "path": scope["path"][:200], "status": reply.status,
                                 "ms": round(seconds * 1e3, 3)}))  # fmt: skip
        await _answer(send, reply)

    def _guard(self, headers: Mapping[bytes, bytes]) -> None:
        """Deny by default: the token on every path where there is one, and the host name on the management port."""
        if self.management:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            if name not in self.hosts:  # a page in a browser that lured the name to this machine
                raise Reply(403, {"error": "this host name is not served here"})
        if self.token or self.management:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            if not self.token or kind.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.token):
                raise Reply(401, {"error": "a token is needed"}, headers=((b"www-authenticate", b"Bearer"),))

    async def _serve(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive
    ) -> tuple[Reply, Version | None]:
        parts = [
            unquote(part) for part in scope.get("raw_path", scope["path"].encode()).decode("latin-1").split("/")[1:]
        ]
        if parts and parts[-1] == "":
            parts.pop()
        method = scope["method"]
        if any(len(part) > 200 for part in parts) or len(parts) > 8:
            raise Reply(404, {"error": "no such path"})
        if self.management:
            return await self._manage(method, parts, scope, headers, receive), None
        match method, parts:
            case "POST", ["v2", "models", name, "infer"]:
                return await self._infer(name, None, headers, receive)
            case "POST", ["v2", "models", name, "explain"]:
                return await self._infer(name, None, headers, receive, explain=True)
            case "POST", ["v2", "models", name, "versions", number, "explain"]:
                return await self._infer(name, number, headers, receive, explain=True)
            case "POST", ["v2", "models", name, "versions", number, "infer"]:
                return await self._infer(name, number, headers, receive)
            case "POST" | "PUT", ["predictions", name]:
                return await self._predict(name, None, headers, receive)
            case "POST" | "PUT", ["predictions", name, number]:
                return await self._predict(name, number, headers, receive)
            case "POST", ["v2", "models", name, "generate" | "generate_stream" as how]:
                return await self._generate(name, None, headers, receive, stream=how == "generate_stream")
            case "POST", ["v2", "models", name, "versions", number, "generate" | "generate_stream" as how]:
                return await self._generate(name, number, headers, receive, stream=how == "generate_stream")
            case "POST", ["v1", "models", name] if name.endswith(":predict"):
                return await self._predict(name.removesuffix(":predict"), None, headers, receive)
            case "POST", ["explanations", name]:
                return await self._predict(name, None, headers, receive, explain=True)
            case "POST", ["explanations", name, number]:
                return await self._predict(name, number, headers, receive, explain=True)
            case "POST", ["v1", "models", name] if name.endswith(":explain"):
                return await self._predict(name.removesuffix(":explain"), None, headers, receive, explain=True)
        return self._read(method, parts, scope), None

    # -- inference ---------------------------------------------------------------------------------------------------

    async def _infer(
        self, name: str, number: str | None, headers: Mapping[bytes, bytes], receive: Receive, *, explain: bool = False
    ) -> tuple[Reply, Version | None]:
        body = await self._body(headers, receive)
        sticky = headers.get(b"x-session-id", b"") or headers.get(b"x-request-id", b"")
        version = self.registry.choose(name, number, sticky.decode("latin-1"))
        pool = version.pool
        try:
            length = headers.get(b"inference-header-content-length")
            if length is not None and not (length.isdigit() and len(length) < 12):
                raise Malformed("Inference-Header-Content-Length is no number")
            asked = protocol.read_request(
                body, None if length is None else int(length), pool.specs, pool.output_specs, pool.settings.max_rows
            )
            key = _key(asked, pool.specs)
            gone = _disconnected(receive)
            answer = pool.submit(
                rows=asked.rows, key=key, arrays=asked.arrays, timeout_s=asked.timeout_s, gone=gone, explain=explain,
                target=_target(asked.parameters) if explain else -1,
            )  # fmt: skip
            shadow = self.registry.shadow_of(name, version)
            if shadow is not None and not explain:
                self.registry.later(_shadowed(shadow, asked, key))
            found = await answer
        except (Rejected, Malformed) as error:
            return _refusal(error, "/v2"), version
        version.last_ms = int(time.time() * 1e3)
        manifest = version.package.manifest
        if explain:  # an attribution for each input, called and shaped as that is
            binary = asked.parameters.get("binary_data_output") is True
            outputs = [(s, array, binary) for s, array in zip(pool.attribution_specs, found.outputs, strict=True)]
        else:
            outputs = [(pool.output_specs[index], found.outputs[index], binary) for index, binary in asked.wanted]
        parts, json_length = protocol.write_answer(asked.id, manifest.name, manifest.version, outputs)
        if json_length is None:
            return Reply(200, tuple(parts), answer=found), version
        more = ((b"inference-header-content-length", str(json_length).encode()),)
        return Reply(200, tuple(parts), b"application/octet-stream", more, found), version

    async def _predict(
        self, name: str, number: str | None, headers: Mapping[bytes, bytes], receive: Receive, *, explain: bool = False
    ) -> tuple[Reply, Version | None]:
        """TorchServe's call: the body goes through the handler's steps."""
        body = await self._body(headers, receive)
        version = self.registry.choose(name, number, headers.get(b"x-request-id", b"").decode("latin-1"))
        kind = headers.get(b"content-type", b"").decode("latin-1")[:200]
        if kind.startswith("multipart/form-data"):
            body = _form_data(body, kind)
        try:
            answer = await version.pool.submit(
                rows=1, key="body", body=body, kind=kind, gone=_disconnected(receive), explain=explain
            )
        except Rejected as error:
            return _refusal(error, "/predictions"), version
        version.last_ms = int(time.time() * 1e3)
        return Reply(200, answer.body, answer.kind.encode("latin-1"), answer=answer), version

    async def _generate(
        self, name: str, number: str | None, headers: Mapping[bytes, bytes], receive: Receive, *, stream: bool
    ) -> tuple[Reply, Version | None]:
        """Triton's generate extension: a prompt in; the text out, whole, or as it comes by server-sent events."""
        body = await self._body(headers, receive)
        version = self.registry.choose(name, number, headers.get(b"x-request-id", b"").decode("latin-1"))
        if not generates(version):
            return _refusal(Rejected(400, f"the model {name} generates no text"), "/v2"), version
        gone = _disconnected(receive)
        try:
            prompt = generate.read_prompt(body)
            pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
            answer = version.pool.submit(
                rows=1, key="generate", body=body, kind="application/json", gone=gone, piece=pieces.put_nowait
            )
            answer.add_done_callback(lambda _: pieces.put_nowait(None))
            first = await pieces.get()  # what is refused is refused by its status, before a stream has begun
            if first is None:
                await answer
        except UsageError as error:
            return _refusal(Rejected(400, str(error)), "/v2"), version
        except (Rejected, Malformed) as error:
            return _refusal(error, "/v2"), version
        manifest = version.package.manifest
        head = {"model_name": manifest.name, "model_version": manifest.version}
        said = {"id": prompt.id, **head} if prompt.id else head
        events = _events(version.pool, answer, first, pieces, said, gone)
        version.last_ms = int(time.time() * 1e3)
        if stream:
            return Reply(
                200, kind=b"text/event-stream", headers=((b"cache-control", b"no-cache"),), events=events
            ), version
        async for _ in events:
            pass
        if answer.cancelled():
            return _refusal(Rejected(499, "the client went away"), "/v2"), version
        try:
            found = json.loads((await answer).body)
        except Rejected as error:
            return _refusal(error, "/v2"), version
        return Reply(200, {**said, "text_output": found["text_output"]}), version

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        most = self.limits.max_body
        announced = headers.get(b"content-length")
        if announced is not None and (len(announced) > 15 or int(announced) > most):
            raise Malformed(f"a body may have {most} bytes", 413)
        task = self._patience.begin()
        try:
            body = await _read_body(receive, most)
        except asyncio.CancelledError:
            if not self._patience.end(task):
                raise
            task.uncancel()
            raise Malformed("the body took too long to arrive", 408) from None
        finally:
            self._patience.end(task)
        encoding = headers.get(b"content-encoding", b"").decode("latin-1").lower()
        return protocol.inflate(body, encoding, most) if encoding not in ("", "identity") else body

    # -- what can be read --------------------------------------------------------------------------------------------

    def _read(self, method: str, parts: list[str], scope: Scope) -> Reply:
        registry = self.registry
        match method, parts:
            case "GET", ["v2"]:
                return Reply(200, {"name": "fettle", "version": _our_version(), "extensions": EXTENSIONS})
            case "GET", ["v2", "health", "live"]:
                return Reply(200, {"live": True})
            case "GET", ["v2", "health", "ready"]:
                if not registry.ready:
                    return Reply(503, {"error": "not ready", "ready": False, "live": True})
                return Reply(200, {"ready": True, "live": True})
            case "GET", ["v2", "models"]:
                return Reply(200, {"models": sorted(registry.models)})
            case "GET", ["v2", "models", "stats"]:
                return Reply(200, {"model_stats": [_statistics(n, v, made) for n, v, made in registry.versions()]})
            case "GET", ["v2", "models", name, "stats"]:
                registry.choose(name)
                rows = [(n, v, made) for n, v, made in registry.versions() if n == name]
                return Reply(200, {"model_stats": [_statistics(*row) for row in rows]})
            case "GET", ["v2", "models", name, "versions", number, "stats"]:
                return Reply(200, {"model_stats": [_statistics(name, number, registry.choose(name, number))]})
            case "GET", ["v2", "models", name]:
                return self._metadata(name, None)
            case "GET", ["v2", "models", name, "versions", number]:
                return self._metadata(name, number)
            case "GET", ["v2", "models", name, "ready"]:
                return _model_ready(name, registry.choose(name))
            case "GET", ["v2", "models", name, "versions", number, "ready"]:
                return _model_ready(name, registry.choose(name, number))
            case "GET", ["v2", "models", name, "config"]:
                return Reply(200, _configuration(name, registry.choose(name)))
            case "GET", ["v2", "models", name, "versions", number, "config"]:
                return Reply(200, _configuration(name, registry.choose(name, number)))
            case "POST", ["v2", "repository", "index"]:
                return Reply(200, self._index())
            case "POST", ["v2", "repository", "models", _, "load" | "unload"]:
                raise Reply(403, {"error": "models are loaded and unloaded on the management port"})
            case "GET", ["ping"]:
                return Reply(200 if registry.ready else 500, {"status": "Healthy" if registry.ready else "Unhealthy"})
            case "GET", ["metrics"]:
                return Reply(200, self._metrics(), b"text/plain; version=0.0.4; charset=utf-8")
            case ("GET", ["openapi.json"]) | ("OPTIONS", []):
                return Reply(200, openapi(registry, _our_version()))
            case "GET", ([] | ["docs"]):
                policy = (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'")
                return Reply(200, page(openapi(registry, _our_version())), b"text/html; charset=utf-8", (policy,))
        known = openapi(registry, "")["paths"].get("/" + "/".join(parts))
        if known is not None:  # the path is right and the method is not
            allowed = ", ".join(sorted(method.upper() for method in known))
            raise Reply(405, {"error": f"the method is {allowed} here"}, headers=((b"allow", allowed.encode()),))
        raise Reply(404, _not_found(parts))

    def _metadata(self, name: str, number: str | None) -> Reply:
        version = self.registry.choose(name, number)
        numbers = sorted(self.registry.models[name].versions)
        return Reply(200, protocol.metadata(name, numbers, version.pool.specs, version.pool.output_specs))

    def _index(self) -> list[dict[str, str]]:
        return [
            {"name": name, "version": number, "state": version.state, "reason": version.reason}
            for name, number, version in self.registry.versions()
        ]

    def _metrics(self) -> bytes:
        every = self.registry.metrics
        for name, number, version in self.registry.versions():
            every.queue_rows.labels(name, number).set(version.pool.waiting_rows)
            every.inflight.labels(name, number).set(version.pool.inflight)
            for worker in version.pool.workers:
                every.worker_bytes.labels(name, number, str(worker.index)).set(worker.rss)
        return generate_latest(every.registry)

    # -- management --------------------------------------------------------------------------------------------------

    async def _manage(
        self, method: str, parts: list[str], scope: Scope, headers: Mapping[bytes, bytes], receive: Receive
    ) -> Reply:
        registry = self.registry
        query = _query(scope)
        match method, parts:
            case "POST", ["v2", "repository", "models", name, "load"]:
                await self._no_parameters(headers, receive)
                await registry.load_named(name)
                return Reply(200, {})
            case "POST", ["v2", "repository", "models", name, "unload"]:
                await registry.unload(name)
                return Reply(200, {})
            case "PUT", ["admin", "models", name]:
                registry.change(name, await self._json(headers, receive))
                return Reply(200, _described(name, registry))
            case "GET", ["admin", "models", name]:
                registry.choose(name)
                return Reply(200, _described(name, registry))
            case "GET", ["models"]:
                names = [{"modelName": name, "modelUrl": name} for name in sorted(registry.models)]
                return Reply(200, {"models": names})
            case "GET", ["models", name]:
                return Reply(200, [_torchserve(name, registry.choose(name))])
            case "GET", ["models", name, "all"]:
                registry.choose(name)
                return Reply(200, [_torchserve(n, made) for n, _, made in registry.versions() if n == name])
            case "GET", ["models", name, number]:
                return Reply(200, [_torchserve(name, registry.choose(name, number))])
            case "POST", ["models"]:
                wanted = query.get("url", "")
                if "/" in wanted or "\\" in wanted or ":" in wanted or not wanted:
                    raise Rejected(400, "url names a package of the store; addresses and paths are not taken")
                made = await registry.load_named(query.get("model_name") or wanted.removesuffix(".zip"))
                manifest = made.package.manifest
                count = len(made.pool.workers)
                text = f'Model "{manifest.name}" Version: {manifest.version} registered with {count} initial workers'
                return Reply(200, {"status": text})
            case "DELETE", ["models", name]:
                await registry.unload(name)
                return Reply(200, {"status": f'Model "{name}" unregistered'})
            case "DELETE", ["models", name, number]:
                await registry.unload(name, number)
                return Reply(200, {"status": f'Model "{name}" unregistered'})
            case "PUT", ["models", name, number, "set-default"]:
                registry.change(name, {"default": number})
                return Reply(200, {"status": f'Default version successfully updated for model "{name}" to "{number}"'})
            case "PUT", ["models", name] | ["models", name, _]:
                registry.choose(name, parts[2] if len(parts) > 2 else None)
                raise Rejected(501, "the number of workers is set in serve.toml: load the model again to change it")
            case _, ["predictions" | "v1", *_]:
                raise Reply(404, _not_found(parts))
        return self._read(method, parts, scope)

    async def _no_parameters(self, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        """Triton takes a configuration and whole files here: code from whoever can reach the port. We do not."""
        body = await self._body(headers, receive)
        if body:
            said = _parse(body)
            if said.get("parameters"):
                raise Rejected(400, "load takes no parameters: models come from the store as they are")

    async def _json(self, headers: Mapping[bytes, bytes], receive: Receive) -> dict[str, Any]:
        return _parse(await self._body(headers, receive))


# -- parts ------------------------------------------------------------------------------------------------------------


class _Gone(Exception):
    """The client went away before its request was whole."""


async def _read_body(receive: Receive, most: int) -> bytes:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise _Gone
    body: bytes = message.get("body", b"")
    if not message.get("more_body") and len(body) <= most:
        return body
    parts, size = [body], len(body)
    while message.get("more_body"):
        if size > most:
            break
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Gone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if size > most:
        raise Malformed(f"a body may have {most} bytes", 413)
    return b"".join(parts)


async def _events(
    pool: Pool, answer: asyncio.Future[Answer], first: bytes | None, pieces: asyncio.Queue[bytes | None],
    said: Mapping[str, Any], gone: Callable[[], bool] | None,
) -> AsyncGenerator[bytes, None]:  # fmt: skip
    """Server-sent events of a text that is being generated. Where the client goes away, the generating stops."""
    piece = first
    try:
        while piece is not None:
            if gone is not None and gone():
                return
            yield b"data: " + json.dumps({**said, "text_output": piece.decode()}).encode() + b"\n\n"
            piece = await pieces.get()
        if answer.done() and not answer.cancelled() and answer.exception() is not None:
            yield b"data: " + json.dumps({"error": "the model failed"}).encode() + b"\n\n"
    finally:
        if not answer.done():
            pool.stop(answer)


async def _answer(send: Send, reply: Reply) -> None:
    if reply.events is not None:
        headers = [(b"content-type", reply.kind), *reply.headers]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        async with contextlib.aclosing(reply.events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        return
    parts = reply.body if isinstance(reply.body, tuple) else (reply.body,)
    length = sum(len(part) for part in parts)
    headers = [(b"content-type", reply.kind), (b"content-length", str(length).encode()), *reply.headers]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    whole = parts[0] if len(parts) == 1 else b"".join(parts)
    await send({"type": "http.response.body", "body": whole})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _refusal(error: Rejected | Malformed, path: str) -> Reply:
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if isinstance(error, Rejected) and error.retry_s:
        headers = ((b"retry-after", str(max(1, round(error.retry_s))).encode()),)
    status = 503 if error.status == 499 else error.status
    if path.startswith(("/v2", "/admin")):
        return Reply(status, {"error": error.reason}, headers=headers)
    kinds = {400: "BadRequestException", 404: "ModelNotFoundException", 413: "RequestEntityTooLargeException",
             500: "InternalServerException", 503: "ServiceUnavailableException"}  # fmt: skip
    return Reply(
        status,
        {"code": status, "type": kinds.get(status, "ServiceException"), "message": error.reason},
        headers=headers,
    )


def _not_found(parts: list[str]) -> dict[str, Any]:
    if parts and parts[0] in ("predictions", "models", "v1"):
        return {"code": 404, "type": "ResourceNotFoundException", "message": "no such path"}
    return {"error": "no such path"}


def _key(asked: protocol.Inference, specs: Any) -> Any:
    """Requests with equal keys may share a call: the same shapes but for the rows, and the same unbatched values."""
    key: list[Any] = []
    for array, spec in zip(asked.arrays, specs, strict=True):
        key.append(array.shape[1:] if spec.batched else (array.shape, array.tobytes()))
    return tuple(key)


def _target(parameters: Mapping[str, Any]) -> int:
    """Which element of the first output to explain; -1, the largest, where nothing is said."""
    target = parameters.get("target", -1)
    if not isinstance(target, int) or isinstance(target, bool) or not -1 <= target < 1 << 31:
        raise Malformed("the parameter target is the number of an element of the first output")
    return target


def _disconnected(receive: Receive) -> Callable[[], bool] | None:
    """Whether the client has gone: uvicorn knows without being waited for."""
    cycle: Any = getattr(receive, "__self__", None)
    return (lambda: bool(cycle.disconnected)) if hasattr(cycle, "disconnected") else None


async def _shadowed(version: Version, asked: protocol.Inference, key: Any) -> None:
    with contextlib.suppress(Rejected):
        await version.pool.submit(rows=asked.rows, key=key, arrays=asked.arrays)


def _form_data(body: bytes, kind: str) -> bytes:
    """The first file of a multipart form, as ``curl -F data=@file`` sends it."""
    from email.parser import BytesParser
    from email.policy import HTTP

    if body.count(b"\r\n--") > 64:
        raise Malformed("the form has too many parts")
    message = BytesParser(policy=HTTP).parsebytes(b"Content-Type: " + kind.encode("latin-1") + b"\r\n\r\n" + body)
    for part in message.iter_parts():
        if part.get_param("name", header="content-disposition") in ("data", "body"):
            data = part.get_payload(decode=True)
            return data if isinstance(data, bytes) else b""
    raise Malformed("the form has no field data")


def _query(scope: Scope) -> dict[str, str]:
    from urllib.parse import parse_qsl

    try:
        return dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), max_num_fields=32))
    except ValueError:
        raise Malformed("too many parameters") from None


def _parse(body: bytes) -> dict[str, Any]:
    try:
        said = json.loads(body or b"{}")
    except (ValueError, RecursionError):
        raise Malformed("the body is no JSON") from None
    if not isinstance(said, dict):
        raise Malformed("the body must be a JSON object")
    return said


def _model_ready(name: str, version: Version) -> Reply:
    if not version.pool.ready:
        return Reply(503, {"error": f"the model {name} is not ready", "name": name, "ready": False})
    return Reply(200, {"name": name, "ready": True})


def _statistics(name: str, number: str, version: Version) -> dict[str, Any]:
    seen = version.metrics

    def row(count: int, ns: int) -> dict[str, int]:
        return {"count": count, "ns": ns}

    batches = [
        {"batch_size": rows, "compute_input": row(calls, join), "compute_infer": row(calls, model),
         "compute_output": row(calls, 0)}
        for rows, (calls, join, model) in sorted(seen.by_size.items())
    ]  # fmt: skip
    return {
        "name": name, "version": number, "last_inference": version.last_ms, "inference_count": seen.rows,
        "execution_count": seen.executions,
        "inference_stats": {
            "success": row(seen.succeeded, seen.success_ns), "fail": row(seen.failed, seen.fail_ns),
            "queue": row(seen.succeeded, seen.queue_ns), "compute_input": row(seen.executions, seen.join_ns),
            "compute_infer": row(seen.executions, seen.model_ns), "compute_output": row(seen.executions, 0),
        },
        "batch_stats": batches,
    }  # fmt: skip


def _configuration(name: str, version: Version) -> dict[str, Any]:
    pool = version.pool
    batched = all(spec.batched for spec in (*pool.specs, *pool.output_specs))

    def tensor(spec: Any) -> dict[str, Any]:
        dims = spec.shape[1:] if batched else spec.shape
        return {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": list(dims)}

    return {
        "name": name, "platform": "pytorch_fettle", "backend": "fettle",
        "max_batch_size": pool.settings.max_rows if batched else 0,
        "input": [tensor(spec) for spec in pool.specs], "output": [tensor(spec) for spec in pool.output_specs],
        "dynamic_batching": {"max_queue_delay_microseconds": int(pool.settings.delay_ms * 1e3)},
    }  # fmt: skip


def _described(name: str, registry: Registry) -> dict[str, Any]:
    model = registry.models[name]
    return {
        "name": name, "default": model.default, "weights": model.weights, "shadow": model.shadow,
        "versions": {
            number: {
                "state": version.state, "workers": len(version.pool.workers),
                "max_rows": version.pool.settings.max_rows, "delay_ms": version.pool.settings.delay_ms,
                "policy": version.pool.settings.policy, "take": version.pool.queue.plan.take[:65],
                "recipe": version.package.manifest.recipe, "accuracy": version.package.manifest.accuracy,
            }
            for number, version in model.versions.items()
        },
    }  # fmt: skip


def _torchserve(name: str, version: Version) -> dict[str, Any]:
    pool = version.pool
    workers = [
        {"id": str(worker.index), "startTime": _iso(worker.started_at), "memoryUsage": worker.rss, "pid": worker.pid,
         "status": "READY" if worker.ready else "UNREADY", "gpu": pool.device != "cpu"}
        for worker in pool.workers
    ]  # fmt: skip
    count = len(pool.workers)
    return {
        "modelName": name, "modelVersion": version.package.manifest.version, "modelUrl": name, "engine": "Torch",
        "runtime": "python", "minWorkers": count, "maxWorkers": count, "batchSize": pool.settings.max_rows,
        "maxBatchDelay": int(pool.settings.delay_ms), "loadedAtStartup": True, "workers": workers,
        "jobQueueStatus": {
            "remainingCapacity": max(0, pool.settings.max_queue_rows - pool.waiting_rows),
            "pendingRequests": pool.queue.requests,
        },
    }  # fmt: skip


def _iso(seconds: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _our_version() -> str:
    from fettle import __version__

    return __version__
