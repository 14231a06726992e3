"""One place for a worker in a pool, kept filled: loaded, given batches, watched, and replaced when it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fettle.serve import wire
from fettle.serve.alarm import Alarm
from fettle.serve.placement import device_for
from fettle.serve.policy import Batch
from fettle.serve.refusal import Rejected
from fettle.serve.request import Request
from fettle.serve.spawn import spawn
from fettle.serve.worker_process import WorkerProcess

if TYPE_CHECKING:
    from fettle.serve.pool import Pool

log = logging.getLogger("fettle.serve")
PING_S = 5.0
"""How often an idle worker is asked whether it is there."""
BACK_OFF_S = (0.1, 0.5, 2.0, 5.0, 15.0, 30.0)
"""Before a worker that ended is started again: the n-th time in a row."""
START_S = 600.0
"""The longest that loading and warming up may take."""


class Worker:
    """A worker that is there again after it was lost. It has one batch at a time."""

    def __init__(self, pool: Pool, index: int, threads: int, cores: Sequence[int] = ()) -> None:
        self.pool, self.index, self.threads, self.cores = pool, index, threads, list(cores)
        self.ready = False
        self.leaving = False
        """Whether it takes no more batches and ends after the one that it has."""
        self.batch: Batch[Request] | None = None
        self.rss = 0
        self.restarts = 0
        self.started_at = 0.0
        self._process: WorkerProcess | None = None
        self._call = 0
        self._sent = 0.0
        self._alarm = Alarm(self._silent)
        self._awaited = False
        self._loaded: asyncio.Future[None] | None = None
        self._failures = 0
        self._again: asyncio.Task[None] | None = None
        """Kept, because the event loop does not."""

    @property
    def device(self) -> str:
        """Where its model is."""
        return device_for(self.index, self.pool.devices)

    @property
    def pid(self) -> int:
        """Of the process that fills the place now."""
        return self._process.pid if self._process is not None else 0

    @property
    def shares_memory(self) -> bool:
        """Whether large bodies reach it without going through its socket."""
        return self._process is not None and self._process.shares_memory

    async def start(self) -> None:
        """Start a process; returns when it is warm or has failed."""
        pool, threads = self.pool, self.threads
        spawned = pool.spare.take(threads) if pool.spare is not None and pool.log_path is None else None
        process = self._process = WorkerProcess(self._hear, self._lost)
        self._loaded = pool.loop.create_future()
        self.started_at = time.time()
        await process.start(spawned or spawn(threads, pool.log_path))
        self._wait(START_S)
        process.write(
            wire.Load(str(pool.package.folder), pool.sizes, threads, self.cores, pool.trust, self.device, pool.explains)
        )
        await self._loaded

    def end(self) -> None:
        """Kill the process and its children."""
        self.ready = False
        self._alarm.clear()
        if self._process is not None:
            self._process.end()
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)

    def leave(self) -> None:
        """Take no more batches, and end once the last is answered."""
        self.ready, self.leaving = False, True
        if self.batch is None:
            self.pool.without(self)

    def close(self) -> None:
        """End it for good."""
        self.end()
        if self._again is not None:
            self._again.cancel()

    def run(self, batch: Batch[Request], now: float) -> None:
        """Send a batch."""
        self.batch, self._sent = batch, now
        self._call = self.pool.next_id()
        items, first = batch.items, batch.items[0]
        header: wire.ToWorker
        bodies: list[Any]
        if first.piece is not None:
            bodies = [item.body or b"" for item in items]
            header = wire.Generate(self._call, [len(body) for body in bodies])
        elif first.body is not None:
            bodies = [item.body or b"" for item in items]
            header = wire.Call(self._call, [len(body) for body in bodies], [item.kind for item in items], first.explain)
        elif first.explain:
            bodies = [wire.flat(array) for array in first.arrays]
            header = wire.Explain(self._call, [array.shape for array in first.arrays], first.target)
        else:
            bodies = [wire.flat(array) for item in items for array in item.arrays]
            header = wire.Run(self._call, batch.size, [[array.shape for array in item.arrays] for item in items])
        self._write(header, bodies)
        self._wait(self.pool.settings.timeout_ms / 1e3)

    def cancel(self, index: int) -> None:
        """Tell the worker that one prompt of its batch is not waited for."""
        self._write(wire.Cancel(self._call, index))

    def _write(self, header: wire.ToWorker, bodies: Sequence[Any] = ()) -> None:
        assert self._process is not None
        self._process.write(header, bodies)

    # -- what it says ------------------------------------------------------------------------------------------------

    def _hear(self, header: wire.FromWorker, body: memoryview) -> None:
        if isinstance(header, wire.Ready):
            self._is_ready(header)
        elif isinstance(header, wire.Pong):
            self.rss = header.rss
            self._rest()
        elif isinstance(header, wire.Failed) and header.id < 0:
            self.pool.problem = header.reason  # the process ends now, which `_lost` hears of
        elif header.id != self._call or self.batch is None:
            return  # of a call that was given up
        elif isinstance(header, wire.Piece):
            self._wait(self.pool.settings.timeout_ms / 1e3)
            self.pool.heard(self.batch.items[header.index], body, self.batch.rows, self._sent, last=header.last)
        else:
            self._answered(header, body)

    def _is_ready(self, header: wire.Ready) -> None:
        self.ready, self._failures = True, 0
        log.info("worker %d of %s ready in %.1f s", self.index, self.pool.name, header.load_s)
        self._rest()
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)
        self.pool.plan_pump()

    def _answered(self, header: wire.Done | wire.Failed, body: memoryview) -> None:
        assert self.batch is not None
        batch, self.batch = self.batch, None
        self._rest()
        if isinstance(header, wire.Done):
            self.rss = header.rss
            self.pool.finished(batch, self._sent, header, body)
        else:
            log.warning("a call of %s failed: %s", self.pool.name, header.reason)
            why = Rejected(400, header.reason, kind="input") if header.usage else Rejected(500, "the model failed")
            self.pool.failed(batch, why)
        if self.leaving:
            self.pool.without(self)
            return
        most = self.pool.settings.max_worker_bytes
        if most and self.rss > most and self.batch is None and not self.pool.closing:
            log.warning("worker %d of %s has grown to %d MiB: replaced", self.index, self.pool.name, self.rss >> 20)
            self._lost("grown")

    # -- supervision -------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        """It must say something within this time."""
        self._awaited = True
        self._alarm.set(time.perf_counter() + seconds, self.pool.loop)

    def _rest(self) -> None:
        """Idle: ask from time to time whether the process is there."""
        self._awaited = False
        self._alarm.set(time.perf_counter() + PING_S, self.pool.loop)

    def _silent(self) -> None:
        """The alarm: it was idle for a while, or did not say what was awaited."""
        if self._awaited:
            log.warning("worker %d of %s does not answer: replaced", self.index, self.pool.name)
            self._lost("hung")
        else:
            self._write(wire.Ping(0))
            self._wait(PING_S)

    def _lost(self, why: str) -> None:
        """This process is of no more use: give its call back, and start another one after a while."""
        first_start = not self.ready and not self.restarts
        batch, self.batch = self.batch, None
        self.end()
        if batch is not None:
            self.pool.failed(batch, Rejected(500, "the model's process ended during the call", kind="crash"))
        if self.leaving:
            self.pool.without(self)
        if self.leaving or first_start or self.pool.closing:
            return  # whoever asked for the first start hears of its failure
        self.restarts += 1
        self.pool.metrics.restart(why)
        wait_s = 0.0 if why == "grown" else BACK_OFF_S[min(self._failures, len(BACK_OFF_S) - 1)]
        self._failures += 1
        self._again = self.pool.loop.create_task(self._restart(wait_s))

    async def _restart(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        if self.pool.closing:
            return
        try:
            await self.start()
        except OSError as error:  # no process to be had now: memory, descriptors
            log.error("worker %d of %s cannot be started: %s", self.index, self.pool.name, error.strerror)
            self._lost("not started")
