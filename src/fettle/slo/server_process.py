"""A real server in a process of its own, to be put under load, and what it sees from inside.

Its own process, because a client that shares an interpreter with the server measures itself.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from fettle.errors import UsageError
from fettle.loop import run
from fettle.package.manifest import Package, open_package
from fettle.package.settings import ServeSettings
from fettle.procs.child import ChildError, Reply, Request, replied
from fettle.procs.parent import Parent, die_with_parent, failure_of
from fettle.slo.stopping import Stoppable

if TYPE_CHECKING:
    from fettle.serve.engine.metrics import ModelMetrics

T = TypeVar("T")
START_S = 1800.0
_MOST = 1_000_000
"""Moments that are remembered between two looks."""
PERCENTS = (50, 90, 99)


class StageTimes(msgspec.Struct, forbid_unknown_fields=True):
    """One stage of serving: milliseconds, mean and percentiles."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


class ServerStats(msgspec.Struct, forbid_unknown_fields=True):
    """What a server saw since it was last asked."""

    calls: int = 0
    """Calls of the model."""
    rows: dict[int, int] = {}
    """Calls by their number of rows, padding apart."""
    sizes: dict[int, int] = {}
    """Calls by their size, padding included."""
    queue_ms: StageTimes = msgspec.field(default_factory=StageTimes)
    """A request: from arrival to dispatch."""
    join_ms: StageTimes = msgspec.field(default_factory=StageTimes)
    """A call: putting its batch together."""
    model_ms: StageTimes = msgspec.field(default_factory=StageTimes)
    """A call of the model."""
    memory_bytes: int = 0
    """Resident, of all workers."""
    cpu_percent: float = 0.0
    """Use of the whole machine, all cores together."""
    memory_percent: float = 0.0


class ServerFailure(Exception):
    """The server could not be started, or ended; the text is for people."""


class _Serve(Request, tag="starting"):
    folder: str
    settings: ServeSettings
    trust: tuple[str, ...]


class _Stats(Request, tag="looking"):
    """What was seen since the last look."""


class ServerProcess:
    """One running server. `start` makes one; `close` ends it, as does the end of this process."""

    def __init__(self, stopped: Callable[[], bool]) -> None:
        self._child = Stoppable("fettle.slo.server_process", {"PYTHONSAFEPATH": "1"}, stopped)
        self.url = ""

    @classmethod
    async def start(
        cls, package: Package, settings: ServeSettings, trust: Sequence[str] = (),
        stopped: Callable[[], bool] = lambda: False,
    ) -> ServerProcess:  # fmt: skip
        """Serve `package` with `settings`; returns when it is warm. `trust`: digests of handlers that may run. Raises
        `ServerFailure`, and `Stopped` once that is so while an answer is awaited."""
        server = cls(stopped)
        try:
            port = await server._ask(_Serve(str(package.folder), settings, tuple(trust)), int, START_S)
        except BaseException:
            await server.close()
            raise
        server.url = f"http://127.0.0.1:{port}"
        return server

    async def stats(self) -> ServerStats:
        """What it saw since the last look. Raises `ServerFailure` where it is gone."""
        return await self._ask(_Stats(), ServerStats, 30.0)

    async def close(self) -> None:
        """End it and its workers."""
        await asyncio.to_thread(self._child.close)

    async def _ask(self, request: Request, answer: type[T], seconds: float) -> T:
        try:
            return await asyncio.to_thread(self._child.call, request, answer, seconds)
        except (ChildError, UsageError) as error:
            raise ServerFailure(str(error)) from error


# -- in the server's process ------------------------------------------------------------------------------------------


class _Recorder:
    """Stands before a version's metrics and keeps every moment until somebody looks."""

    def __init__(self, metrics: ModelMetrics) -> None:
        self._waits: list[float] = []
        self._calls: list[Any] = []
        count_request, count_batch = metrics.request, metrics.batch

        def request(seconds: float, queue_s: float, limit_s: float) -> None:
            if len(self._waits) < _MOST:
                self._waits.append(queue_s)
            count_request(seconds, queue_s, limit_s)

        def batch(rows: int, size: int, join_s: float, model_s: float, calls: int = 1) -> None:
            if len(self._calls) < _MOST:
                self._calls += [(rows, size, join_s, model_s)] * calls
            count_batch(rows, size, join_s, model_s, calls)

        metrics.request, metrics.batch = request, batch  # type: ignore[method-assign]

    def stats(self, memory_bytes: int) -> ServerStats:
        """Since the last look."""
        import psutil

        rows, sizes, join_s, model_s = zip(*self._calls, strict=True) if self._calls else ((), (), (), ())
        stats = ServerStats(
            len(rows), Counter(rows), Counter(sizes), _times(self._waits), _times(join_s), _times(model_s),
            memory_bytes, psutil.cpu_percent(None), psutil.virtual_memory().percent,
        )  # fmt: skip
        self._waits.clear()
        self._calls.clear()
        return stats


def _times(seconds: Sequence[float]) -> StageTimes:
    if not seconds:
        return StageTimes()
    values = np.asarray(seconds) * 1e3
    return StageTimes(float(values.mean()), *(float(value) for value in np.percentile(values, PERCENTS)))


async def _serve(parent: Parent) -> None:
    from fettle.serve.engine.registry import Options
    from fettle.serve.server import Address, Server

    requests, loop = parent.requests(), asyncio.get_running_loop()

    async def next_request() -> bytes | None:
        return await loop.run_in_executor(None, next, requests, None)

    wanted = msgspec.msgpack.decode(await next_request() or b"", type=_Serve)
    package = replace(open_package(Path(wanted.folder)), settings=wanted.settings)
    server = Server(Address(port=0), Options(trust=wanted.trust))
    try:
        await server.start([package])
    except Exception as error:
        parent.send(Reply(failure=failure_of(error)))
        return
    version = server.registry.choose(package.manifest.name)
    recorder = _Recorder(version.metrics)
    recorder.stats(0)
    parent.send(replied(server.ports[0]))
    while await next_request() is not None:  # until whoever started us goes away
        parent.send(replied(recorder.stats(sum(worker.rss for worker in version.workers))))
    await server.close()


if __name__ == "__main__":
    die_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
    run(_serve(Parent()))
