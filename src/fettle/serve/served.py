"""A real server in a process of its own, to be put under load, and what it sees from inside.

Its own process, because a client that shares an interpreter with the server measures itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fettle.procs.parent import die_with_parent
from fettle.serve.loop import run
from fettle.serve.package import Package, ServeSettings, open_package

START_S = 600.0
_MOST = 1_000_000
"""Moments that are remembered between two looks."""
PERCENTS = (50, 90, 99)


class Split(msgspec.Struct, forbid_unknown_fields=True):
    """One stage of serving: milliseconds, mean and percentiles."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class Inside(msgspec.Struct, forbid_unknown_fields=True):
    """What a server saw since it was last asked."""

    calls: int = 0
    """Calls of the model."""
    rows: dict[int, int] = {}
    """Calls by their number of rows, padding apart."""
    sizes: dict[int, int] = {}
    """Calls by their size, padding included."""
    queue_ms: Split = msgspec.field(default_factory=Split)
    """A request: from arrival to dispatch."""
    join_ms: Split = msgspec.field(default_factory=Split)
    """A call: putting its batch together."""
    model_ms: Split = msgspec.field(default_factory=Split)
    """A call of the model."""
    memory_bytes: int = 0
    """Resident, of all workers."""
    cpu_percent: float = 0.0
    """Of the whole machine, all cores together."""
    memory_percent: float = 0.0


class ServerFailure(Exception):
    """The server could not be started, or ended; the text is for people."""


class Served:
    """One running server. `start` makes one; `close` ends it, as does the end of this process."""

    def __init__(self, process: asyncio.subprocess.Process, reader: Any, writer: Any) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.url = ""

    @classmethod
    async def start(cls, package: Package, settings: ServeSettings, device: str = "cpu") -> Served:
        """Serve `package` with `settings`; returns when it is warm. Raises `ServerFailure`."""
        ours, theirs = socket.socketpair()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fettle.serve.served", str(theirs.fileno()), pass_fds=(theirs.fileno(),),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 24)
        made = cls(process, reader, writer)
        try:
            wanted = {"folder": str(package.folder), "device": device, "settings": msgspec.to_builtins(settings)}
            port = (await made._ask(wanted, START_S))["port"]
        except BaseException:
            await made.close()
            raise
        made.url = f"http://127.0.0.1:{port}"
        return made

    async def look(self) -> Inside:
        """What it saw since the last look. Raises `ServerFailure` where it is gone."""
        return msgspec.convert(await self._ask({"look": True}, 30.0), Inside, strict=False)

    async def close(self) -> None:
        """End it and its workers."""
        self._writer.close()
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            await asyncio.wait_for(self._process.wait(), 15.0)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _ask(self, what: dict[str, Any], seconds: float) -> dict[str, Any]:
        try:
            self._writer.write(json.dumps(what).encode() + b"\n")
            line = await asyncio.wait_for(self._reader.readline(), seconds)
        except (OSError, TimeoutError) as error:
            raise ServerFailure(f"the server does not answer: {type(error).__name__}") from error
        if not line:
            raise ServerFailure("the server ended")
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise ServerFailure(str(said["error"]))
        return said


# -- in the server's process ------------------------------------------------------------------------------------------


class _Recorder:
    """Stands before a version's metrics and keeps every moment until somebody looks."""

    def __init__(self, metrics: Any) -> None:
        self.clear()
        count_request, count_batch = metrics.request, metrics.batch

        def request(seconds: float, queue_s: float, limit_s: float) -> None:
            if len(self.queue) < _MOST:
                self.queue.append(queue_s)
            count_request(seconds, queue_s, limit_s)

        def batch(rows: int, size: int, join_s: float, model_s: float) -> None:
            if len(self.model) < _MOST:
                self.join.append(join_s)
                self.model.append(model_s)
            self.rows[rows] = self.rows.get(rows, 0) + 1
            self.sizes[size] = self.sizes.get(size, 0) + 1
            count_batch(rows, size, join_s, model_s)

        metrics.request, metrics.batch = request, batch

    def clear(self) -> None:
        self.queue: list[float] = []
        self.join: list[float] = []
        self.model: list[float] = []
        self.rows: dict[int, int] = {}
        self.sizes: dict[int, int] = {}

    def look(self, memory_bytes: int) -> Inside:
        import psutil

        seen = Inside(
            sum(self.rows.values()), self.rows, self.sizes, _split(self.queue), _split(self.join), _split(self.model),
            memory_bytes, psutil.cpu_percent(None), psutil.virtual_memory().percent,
        )  # fmt: skip
        self.clear()
        return seen


def _split(seconds: Sequence[float]) -> Split:
    if not seconds:
        return Split()
    values = np.asarray(seconds) * 1e3
    return Split(float(values.mean()), *(float(value) for value in np.percentile(values, PERCENTS)))


async def _serve(link: socket.socket) -> None:
    from fettle.errors import UsageError, first_line
    from fettle.serve.registry import Options
    from fettle.serve.server import Address, Server

    reader, writer = await asyncio.open_connection(sock=link, limit=1 << 24)

    def say(what: Any) -> None:
        writer.write(msgspec.json.encode(what) + b"\n")

    wanted = json.loads(await reader.readline())
    package = open_package(Path(wanted["folder"]))
    package = replace(package, settings=msgspec.convert(wanted["settings"], ServeSettings))
    server = Server(Address(port=0), Options(device=wanted["device"]))
    try:
        await server.start([package])
    except Exception as error:
        say({"error": str(error) if isinstance(error, UsageError) else first_line(error)})
        await writer.drain()
        return
    version = server.registry.choose(package.manifest.name)
    recorder = _Recorder(version.metrics)
    recorder.look(0)
    say({"port": server.ports[0]})
    while await reader.readline():  # until whoever started us goes away
        say(recorder.look(sum(worker.rss for worker in version.pool.workers)))
    await server.close()


def main() -> None:
    """Serve what the first line names."""
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
    run(_serve(socket.socket(fileno=int(sys.argv[1]))))


if __name__ == "__main__":
    main()
