"""The server: registry, ports, and a clean end. `serve` runs until a signal; `Running` is for tests and tools."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import logging
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fettle.errors import UsageError, refusing
from fettle.files import read_text
from fettle.loop import stopped_by_interrupt
from fettle.package.manifest import Package, open_package
from fettle.package.requires import check_here
from fettle.procs.limits import allow_open_files
from fettle.serve.engine.metrics import Metrics, gpus
from fettle.serve.engine.refusal import Refusal
from fettle.serve.engine.registry import DRAIN_S, Options, Registry
from fettle.serve.engine.spans import Spans
from fettle.serve.engine.state_file import Remembered
from fettle.serve.http import App, Limits
from fettle.serve.http.connection import Connection

log = logging.getLogger("fettle.serve")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Address:
    """Where to listen, and who may call."""

    host: str = "127.0.0.1"
    port: int = 8080
    management_port: int | None = None
    """None: nothing can be changed while the server runs."""
    token: str = ""
    """Asked of every request where it is set. The management port always asks for `management_token`."""
    management_token: str = ""
    insecure: bool = False
    """The operator's word that anybody may call on a host that is not loopback."""
    certificate: Path | None = None
    """PEM file of the server's certificate and those that vouch for it: HTTPS and nothing else on all ports."""
    key: Path | None = None
    """PEM file of its private key; None: it is in the same file."""
    limits: Limits = field(default_factory=Limits)
    log_requests: bool = False
    spans: Spans | None = None
    """Where each inference is recorded; None: nowhere."""

    @property
    def name(self) -> str:
        """The host as it stands in a URL: an IPv6 address in brackets."""
        return f"[{self.host}]" if ":" in self.host else self.host

    def check(self) -> None:
        """Raise `UsageError` where this would open the machine to strangers without somebody having said so."""
        if self.host not in LOOPBACK and not self.token and not self.insecure:
            raise UsageError(
                f"listening on {self.host} lets others call: give a `token`, or say `insecure` behind a proxy"
            )
        if self.management_port is not None and len(self.management_token) < 22:
            raise UsageError("the management port needs a token of at least 128 bits")
        if self.key is not None and self.certificate is None:
            raise UsageError("a private key needs its `certificate`")

    def tls(self) -> ssl.SSLContext | None:
        """How connections are encrypted; None: they are not. Raises `UsageError` where a file is not what it should
        be."""
        if self.certificate is None:
            return None
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)  # TLS 1.2 and later
        try:
            context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except OSError as error:  # ssl.SSLError is one
            files = " and ".join(str(file) for file in (self.certificate, self.key) if file is not None)
            reason = error.strerror if error.filename or not isinstance(error, ssl.SSLError) else error.reason
            key = "" if self.key is not None else " (`key` names the file of its key)"
            said = f": {reason}" if reason else ""
            raise UsageError(f"no certificate with its private key in {files}{said}{key}") from error
        return context


class Server:
    """One server in the running event loop. Its histograms are exact around the latencies `limits_s`."""

    def __init__(self, address: Address, options: Options, limits_s: Sequence[float] = ()) -> None:
        address.check()
        self.address = address
        self.metrics = Metrics(limits_s)
        self.registry = Registry(self.metrics, options)
        self._listening: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        self._sockets: list[socket.socket] = []
        self.ports: list[int] = []

    async def start(self, packages: Sequence[Package]) -> None:
        """Bind the ports, load every package, then answer. Raises `UsageError` where one of them cannot be loaded."""
        address = self.address
        tls = address.tls()
        await asyncio.to_thread(gpus)  # the first look at them takes seconds on some machines
        for package in packages:
            check_here(package.manifest.name, package.manifest.requires)
        made = functools.partial(App, self.registry, limits=address.limits, log_requests=address.log_requests)
        apps, ports = [made(token=address.token, spans=address.spans)], [address.port]
        if address.management_port is not None:
            apps.append(made(management=True, token=address.management_token, hosts=(address.name,)))
            ports.append(address.management_port)
        try:
            self._sockets = [_bind(address.host, port) for port in ports]
            await self._load_all(packages)
        except BaseException:
            await self.close()
            raise
        loop = asyncio.get_running_loop()
        self.ports = [sock.getsockname()[1] for sock in self._sockets]
        for app, sock in zip(apps, self._sockets, strict=True):
            self._listening.append(
                await loop.create_server(
                    functools.partial(Connection, app, self._connections, loop), sock=sock, backlog=2048, ssl=tls
                )
            )

    async def _load_all(self, packages: Sequence[Package]) -> None:
        kept = self.registry.state
        state = kept.read()
        kept.starting = True  # a start that is cut short forgets nothing
        for package in packages:
            await self._load(package)
        await self._restore(state, {package.manifest.name for package in packages})
        kept.starting = False
        if not kept.lost:
            self.registry.remember()

    async def _load(self, package: Package, changed: dict[str, Any] | None = None) -> None:
        try:
            await self.registry.load(package, changed)
        except Refusal as error:
            raise UsageError(f"{package.manifest.name} cannot be served: {error.reason}") from error

    async def _restore(self, state: Mapping[str, Remembered], named: set[str]) -> None:
        """What was served before the last end, apart from what this start names itself."""
        for name, model in state.items():
            if name in named:
                continue
            lost = set()
            for number, folder in model.versions.items():
                try:
                    await self._load(open_package(Path(folder)), model.changed.get(number))
                except UsageError as error:
                    log.error("%s of the last run is not served, the next start tries again: %s", name, error)
                    lost.add(number)
            if lost:
                self.registry.state.lost[name] = model.only(lost)
            weights = {number: weight for number, weight in model.weights.items() if number not in lost}
            wanted: dict[str, Any] = {
                "default": "" if model.default in lost else model.default,
                "weights": weights if any(weights.values()) else {},  # else all went to what is lost
                "shadow": "" if model.shadow in lost else model.shadow,
            }
            with contextlib.suppress(Refusal):
                self.registry.change(name, {key: value for key, value in wanted.items() if value})

    async def close(self) -> None:
        """Stop listening, answer what was accepted, end the workers."""
        for server in self._listening:
            server.close()
        for connection in list(self._connections):
            connection.finish()
        until = time.perf_counter() + DRAIN_S
        while self._connections and time.perf_counter() < until:
            await asyncio.sleep(0.005)
        await self.registry.close()
        for connection in list(self._connections):
            connection.abort()
        if self.address.spans is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.address.spans.close)
        for sock in self._sockets:
            sock.close()


async def serve(
    address: Address, options: Options, packages: Sequence[Package], started: Callable[[Server], None]
) -> None:
    """Serve until Ctrl-C or SIGTERM; then drain and end. `started(server)` is called once all is ready."""
    allow_open_files()
    server = Server(address, options, [package.settings.limit_ms / 1e3 for package in packages])
    stop = stopped_by_interrupt()
    starting = asyncio.create_task(server.start(packages))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return
    try:
        await starting
        gc.freeze()  # what starting made stays: no collection needs to look at it again
        started(server)
        await stopping
    finally:
        stopping.cancel()
        await server.close()


def _no_password() -> str:
    raise UsageError("the private key asks for a password: give one without")


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        other = ": give another port, 0 for any that is free" if error.errno == errno.EADDRINUSE else ""
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}{other}") from error
    return sock


def clients_token(path: Path | None) -> str:
    """What every request must bring: the variable ``FETTLE_TOKEN``, else the token in a file; empty for nothing."""
    return os.environ.get("FETTLE_TOKEN") or (token_from(path) if path is not None else "")


def token_from(path: Path) -> str:
    """The token in a file that only its owner may read; made where there is none."""
    with refusing(f"no token can be kept in {path}:", OSError):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        mode = path.stat().st_mode
    if mode & 0o077:
        raise UsageError(f"{path} can be read by others: chmod 600 {path}")
    token = read_text(path).strip()
    if len(token) < 22:
        raise UsageError(f"the token in {path} is too short: at least 22 characters")
    return token
