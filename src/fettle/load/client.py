"""A small HTTP/1.1 client for putting load on a server: keep-alive connections, one request at a time on each."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import math
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httptools
import msgspec
import numpy as np
import psutil

from fettle.errors import UsageError
from fettle.package.handlers.parts import LAST
from fettle.package.tensors import TO_NUMPY

T = TypeVar("T")
_MOST_ELEMENTS = 1 << 28
"""Of one input, whatever a server says of its shape."""


class _Models(msgspec.Struct):
    models: list[str] = []


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]


class _Model(msgspec.Struct):
    inputs: list[_Input]


@dataclass(frozen=True)
class Request:
    """One request, ready to be sent: where to, and its bytes."""

    host: str
    port: int
    data: bytes
    path: str
    tls: ssl.SSLContext | None = None
    """Which certificates are trusted, where it goes by HTTPS."""


_trusting_as_the_system = functools.cache(ssl.create_default_context)


def trusting(file: Path | None) -> ssl.SSLContext | None:
    """Trust the certificates of this file (PEM) besides those that the system trusts. Raises `UsageError`."""
    if file is None:
        return None
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(file)
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(f"{file} holds no certificate that can be read (PEM): {error.strerror or error}") from error
    return context


def server_processes(request: Request) -> set[int] | None:
    """The processes that listen where a request goes to: none on another machine; None where this one does not say."""
    try:
        there = {str(answer[4][0]) for answer in socket.getaddrinfo(request.host, request.port)}
        ours = {one.address for card in psutil.net_if_addrs().values() for one in card}
        if not there & ours and not any(ip_address(address).is_loopback for address in there):
            return set()
        listening = {one.pid for one in psutil.net_connections("tcp")
                     if one.status == psutil.CONN_LISTEN and one.laddr.port == request.port}  # fmt: skip
    except (OSError, ValueError, psutil.Error):
        return None
    return None if None in listening or not listening else listening


def http_request(url: str, body: bytes, headers: dict[str, str], tls: ssl.SSLContext | None = None) -> Request:
    """A POST as bytes; `tls` says which certificates are trusted, by default those that the system trusts.

    Raises `UsageError` for a URL that is neither http nor https.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise UsageError(f"{url!r} is not an address: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"{url!r} is not an http:// or https:// address")
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not "".join([*headers, *headers.values(), path, parts.netloc]).isprintable():
        raise UsageError("an address and a header hold printable characters alone")
    lines = [f"POST {path} HTTP/1.1", f"Host: {parts.netloc.rpartition('@')[2]}", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    tls = (tls or _trusting_as_the_system()) if parts.scheme == "https" else None
    return Request(host, port, "\r\n".join([*lines, "", ""]).encode() + body, path, tls)


def model_request(
    url: str, rows: int = 1, seed: int = 0, token: str = "", tls: ssl.SSLContext | None = None
) -> Request:
    """A request for a model that speaks the Open Inference Protocol, with random binary tensors of its own metadata.

    `url` is the server's, where it serves one model, or a model's: ``http://host:port/v2/models/NAME``. Sizes that are
    free besides the rows become 16. Raises `UsageError` with one line where the server does not answer so.
    """
    base = url.rstrip("/").removesuffix("/infer")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if "/v2/models/" not in base:
        names = get_json(f"{base}/v2/models", headers, _Models, tls).models
        if not names:
            raise UsageError(f"{base} serves no model yet")
        if len(names) != 1:
            raise UsageError(f"{base} serves {len(names)} models ({said(', '.join(names))}): name one in the URL")
        base = f"{base}/v2/models/{names[0]}"
    metadata = get_json(base, headers, _Model, tls)
    if {"input_ids", LAST} <= {spec.name for spec in metadata.inputs}:
        raise UsageError(f"{base} writes texts: give {base.partition('/v2/')[0]}/v1")
    random = np.random.default_rng(seed)
    tensors = []
    for spec in metadata.inputs:
        kind = TO_NUMPY.get(spec.datatype)
        if kind is None:
            raise UsageError(f"the input {spec.name} is {spec.datatype}: give a `body`")
        shape = [rows if i == 0 and size == -1 else 16 if size == -1 else size for i, size in enumerate(spec.shape)]
        if min(shape, default=1) < 0 or math.prod(shape) > _MOST_ELEMENTS:
            raise UsageError(f"the input {spec.name} has shape {shape[:8]}: give a `body`")
        if kind.kind == "f":
            array = random.standard_normal(shape).astype(kind)
        else:
            array = random.integers(0, 2, shape).astype(kind)  # good for masks, types and tokens alike
        tensors.append((spec.name, spec.datatype, array))
    return tensor_request(f"{base}/infer", tensors, headers, tls)


def tensor_request(
    url: str, tensors: Sequence[tuple[str, str, Any]], headers: dict[str, str], tls: ssl.SSLContext | None = None
) -> Request:
    """A request with these binary tensors: name, datatype, array."""
    inputs, raw = [], []
    for name, datatype, array in tensors:
        raw.append(array.tobytes())
        inputs.append(
            {"name": name, "datatype": datatype, "shape": list(array.shape),
             "parameters": {"binary_data_size": len(raw[-1])}}
        )  # fmt: skip
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    more = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
    return http_request(url, head + b"".join(raw), headers | more, tls)


def get_json(url: str, headers: dict[str, str], kind: type[T], tls: ssl.SSLContext | None = None) -> T:
    """What a server answers to GET. Raises `UsageError`."""
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not an http:// or https:// address")
    # By no proxy, as the load itself.
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls))
    try:
        with direct.open(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return msgspec.json.decode(answer.read(1 << 20), type=kind)
    # Of a port that cannot be, or of what is no HTTP, each says its own.
    except (OSError, ValueError, OverflowError, RecursionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None)
        if isinstance(reason, ConnectionRefusedError):
            raise UsageError(f"nothing listens at {url.split('/v2')[0]}: is the server running?") from error
        if isinstance(reason, ssl.SSLError):
            raise UsageError(f"no secure connection to {url}: {why_unsafe(reason)}") from error
        why = error.read(200).decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else str(error)
        raise UsageError(f"{url} does not answer as an inference server: {said(why)}") from error


def said(text: str) -> str:
    """What a server said, as a terminal may show it: one line of 200 characters at most, of which it obeys none."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in " ".join(text[:200].split()))


def why_unsafe(error: ssl.SSLError) -> str:
    """Why there is no connection by HTTPS, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message}; a certificate of one's own is trusted with `ca_file`"
    return (error.reason or str(error)).replace("_", " ").lower()


class Connection(asyncio.Protocol):
    """One connection. `send` begins a request; `done(status)` is called when its answer is whole.

    Status 0 means that the connection was lost.
    """

    def __init__(self, done: Callable[[Connection, int], None]) -> None:
        self._done = done
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._status = 0
        self._keep = True
        self._answers = 0
        self._begun = self._sized = False
        self.busy = False
        self.tag: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def send(self, request: Request, tag: Any) -> None:
        assert self._transport is not None
        self.busy, self.tag, self._status = True, tag, 0
        self._begun = self._sized = False
        self.request = request
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request.data)

    def data_received(self, data: bytes) -> None:
        if not self.busy:  # no request is under way: not HTTP, or a last word before it closes
            self.close()
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._keep = False
            self._finish(0)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._sized = self._sized or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status, self._keep = self._parser.get_status_code(), self._parser.should_keep_alive()

    def on_message_complete(self) -> None:
        self._finish(self._status)

    def eof_received(self) -> None:
        """The server has no more to say: so ends an answer that does not tell its length (RFC 9112, 6.3)."""
        if self._status and not self._sized:
            self.on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._finish(0)

    @property
    def alive(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._keep

    @property
    def was_stale(self) -> bool:
        """Whether the server closed it while it was idle: it had answered before, and was lost before anything of the
        next answer came, whose request was never read (RFC 9110, 9.2.2: a client asks again)."""
        return self._transport is None and self._answers > 0 and not self._begun

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def _finish(self, status: int) -> None:
        if self.busy:
            self.busy = False
            self._answers += status > 0
            self._done(self, status)
