"""The pool: one model version's queue, batcher and worker processes. Everything here runs in one event loop.

A request waits in the `BatchQueue`; whenever one arrives, a worker becomes free or a time comes, `_pump` asks the queue
what to send. Nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from fettle.serve import wire
from fettle.serve.host import cores
from fettle.serve.metrics import ModelMetrics
from fettle.serve.package import Package, ServeSettings
from fettle.serve.policy import Batch, BatchQueue

log = logging.getLogger("fettle.serve")
PING_S = 5.0
"""How often an idle worker is asked whether it is there."""
BACK_OFF_S = (0.1, 0.5, 2.0, 5.0, 15.0, 30.0)
"""Before a worker that ended is started again: the n-th time in a row."""
START_S = 600.0
"""The longest that loading and warming up may take."""
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD")
_ENVIRONMENT_PREFIXES = ("OMP_", "KMP_", "MKL_", "GOMP_", "PYTHON", "TORCH", "TRITON_", "CUDA_", "NVIDIA_", "XDG_")
"""What a worker inherits. Tokens and passwords in the server's environment are none of its business."""


class Rejected(Exception):
    """A request is refused or given up: the HTTP status, the reason, and when to come again."""

    def __init__(self, status: int, reason: str, retry_s: float = 0.0, kind: str = "") -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_s = status, reason, retry_s
        self.kind = kind or str(status)


@dataclass(slots=True, eq=False)
class Request:
    """One waiting request: tensors (`arrays`) or a raw body for the handler."""

    arrival_s: float
    rows: int
    key: Hashable
    deadline_s: float
    answer: asyncio.Future[Answer]
    arrays: Sequence[Any] = ()
    body: bytes | None = None
    kind: str = ""
    gone: Callable[[], bool] | None = None
    """Whether the client has gone away; asked just before dispatch."""
    explain: bool = False
    target: int = -1
    """With `explain`: the element of the first output to explain; -1 for the largest."""
    piece: Callable[[bytes], None] | None = None
    """Hears each piece of a generated text. None: the request is no prompt."""
    pieces: int = 0
    """Pieces told so far: after the first it cannot be tried again."""
    queued: bool = False
    tries: int = 0


@dataclass(slots=True)
class Answer:
    """What came back, and where the time went, in seconds."""

    outputs: list[Any] = field(default_factory=list)
    body: bytes = b""
    kind: str = ""
    queue_s: float = 0.0
    join_s: float = 0.0
    model_s: float = 0.0
    batch_rows: int = 0
    arrival_s: float = 0.0
    done_s: float = 0.0
    """Moments of `time.perf_counter`."""


class Pool:
    """The workers of one model version, and what waits for them."""

    def __init__(
        self, package: Package, settings: ServeSettings, metrics: ModelMetrics, *, machine: str = "",
        cores: Sequence[Sequence[int]] = (), trust: str = "", device: str = "cpu", log_path: str | None = None,
        explain: bool = False,
    ) -> None:  # fmt: skip
        self.package, self.settings, self.metrics = package, settings, metrics
        self.specs, self.output_specs = package.manifest.inputs, package.manifest.outputs
        self.attribution_specs = [msgspec.structs.replace(spec, datatype="FP32") for spec in self.specs]
        self.queue: BatchQueue[Request] = BatchQueue(settings.batching(), settings.cost_curve(machine))
        self.trust, self.device, self.log_path, self.explains = trust, device, log_path, explain
        self.cores = list(cores) or [[] for _ in range(settings.workers)]
        self.workers = [_Link(self, index) for index in range(settings.workers)]
        self._loop_kept: asyncio.AbstractEventLoop | None = None
        self.closing = False
        self.problem = ""
        """Why loading failed, where it did."""
        self.usage = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        self._pump_planned = False
        self._ids = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the workers and wait until all are warm. Raises `Rejected` (503) with the reason where one cannot."""
        await asyncio.gather(*(worker.start() for worker in self.workers))
        if not self.ready:
            problem = self.problem or "a worker ended while loading"
            await self.close(0)
            raise Rejected(503, problem, kind="load")

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The one event loop that all of it runs in. Asking asyncio each time costs a system call in Python 3.11."""
        if self._loop_kept is None:
            self._loop_kept = asyncio.get_running_loop()
        return self._loop_kept

    @property
    def ready(self) -> bool:
        """Whether every worker is loaded and warm."""
        return not self.closing and all(worker.ready for worker in self.workers)

    @property
    def sizes(self) -> list[int]:
        """The batch sizes that calls can have: those that are warmed."""
        return sorted(set(self.queue.plan.size) - {0})

    async def close(self, drain_s: float) -> None:
        """Take nothing new, let what was taken finish for at most `drain_s`, and end the workers."""
        self.closing = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_s)
        for request in self._all_waiting():
            self._give_up(request, Rejected(503, "the model is being unloaded", 1.0, "unload"))
        if self._timer is not None:
            self._timer.cancel()
        for worker in self.workers:
            worker.end()

    def change(self, settings: ServeSettings, machine: str) -> None:
        """Other batching settings, while running. The number of workers and threads stays."""
        self.settings = settings
        self.queue.change(settings.batching(), settings.cost_curve(machine))
        self._plan_pump()

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self, *, rows: int, key: Hashable, arrays: Sequence[Any] = (), body: bytes | None = None, kind: str = "",
        timeout_s: float | None = None, gone: Callable[[], bool] | None = None, explain: bool = False,
        target: int = -1, piece: Callable[[bytes], None] | None = None,
    ) -> asyncio.Future[Answer]:  # fmt: skip
        """Let a request wait for its batch. Raises `Rejected` at once when the queue is full or the model not ready."""
        loop = asyncio.get_running_loop()
        if explain:
            if not self.explains:
                raise Rejected(501, "explanations are off: the server was started without --explain", kind="off")
            key = ("explain", self.next_id())  # explained alone
        if self.closing or not any(worker.ready for worker in self.workers):
            self.metrics.shed("not_ready")
            raise Rejected(503, "the model is not ready", 1.0, "not_ready")
        now = time.perf_counter()
        longest = self.settings.timeout_ms / 1e3
        request = Request(
            now,
            rows,
            key,
            now + min(timeout_s or longest, longest),
            loop.create_future(),
            arrays,
            body,
            kind,
            gone,
            explain,
            target,
            piece,
        )
        try:
            taken = self.queue.push(request)
        except ValueError as error:
            raise Rejected(400, str(error), kind="rows") from None
        if not taken:
            self.metrics.shed("queue_full")
            raise Rejected(429, "too many requests wait", max(0.05, self.queue.wait_s()), "queue_full")
        self._idle.clear()
        self._plan_pump()
        return request.answer

    def stop(self, answer: asyncio.Future[Answer]) -> None:
        """Nobody wants this prompt's answer any more: the worker turns to the others."""
        for worker in self.workers:
            for index, item in enumerate(worker.batch.items if worker.batch is not None else ()):
                if item.answer is answer:
                    worker.cancel(index)
        answer.cancel()

    @property
    def waiting_rows(self) -> int:
        """Rows that wait now."""
        return self.queue.rows

    @property
    def inflight(self) -> int:
        """Requests that are with a worker now."""
        return sum(len(worker.batch.items) for worker in self.workers if worker.batch is not None)

    # -- batching ----------------------------------------------------------------------------------------------------

    def _plan_pump(self) -> None:
        """Pump once after all that has come in this turn of the event loop: requests read together go together."""
        if not self._pump_planned:
            self._pump_planned = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_planned = False
        now = time.perf_counter()
        for late in self.queue.expire(now):
            self.metrics.shed("deadline")
            self._give_up(late, Rejected(504, "the request's time was over before its turn came", kind="deadline"))
        while True:
            free = [worker for worker in self.workers if worker.ready and worker.batch is None]
            batch = self.queue.take(now, len(free))
            if batch is None:
                break
            batch = self._without_gone(batch)
            if batch is not None:
                free[0].run(batch, now)
        self._wake_at(self.queue.wake_s())
        if not self.queue.requests and not self.inflight:
            self._idle.set()

    def _without_gone(self, batch: Batch[Request]) -> Batch[Request] | None:
        kept = [item for item in batch.items if not (item.answer.done() or (item.gone is not None and item.gone()))]
        if len(kept) == len(batch.items):
            return batch
        for item in batch.items:
            if item not in kept:
                self.metrics.shed("disconnected")
                self._give_up(item, Rejected(499, "the client went away", kind="disconnected"))
        rows = sum(item.rows for item in kept)
        return Batch(kept, rows, self.queue.plan.size[rows]) if kept else None

    def _wake_at(self, moment: float) -> None:
        if moment == self._timer_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = moment
        self._timer = None
        if moment < math.inf:
            delay = max(0.0, moment - time.perf_counter())
            self._timer = self.loop.call_later(delay, self._woken)

    def _woken(self) -> None:
        self._timer, self._timer_s = None, math.inf
        self._pump()

    def _give_up(self, request: Request, why: Rejected) -> None:
        if not request.answer.done():
            request.answer.set_exception(why)

    def _all_waiting(self) -> list[Request]:
        return self.queue.expire(math.inf)

    def next_id(self) -> int:
        """A number for the next call."""
        self._ids += 1
        return self._ids

    def finished(self, batch: Batch[Request], sent: float, done: wire.Done, body: memoryview) -> None:
        """A worker answered: cut the outputs into each request's rows."""
        now = time.perf_counter()
        if not batch.items[0].explain:
            self.metrics.batch(batch.rows, batch.size, done.join_s, done.model_s)
        if done.metrics:
            self.metrics.handler(done.metrics)
        if batch.items[0].piece is not None:
            pass  # each was answered when it was whole
        elif batch.items[0].body is not None:
            place = 0
            for request, (length,), kind in zip(batch.items, done.shapes, done.kinds, strict=True):
                answer = Answer(body=bytes(body[place : place + length]), kind=kind)
                place += length
                self._give(request, answer, sent, done, batch.rows, now)
        else:
            arrays, place = [], 0
            specs = self.attribution_specs if batch.items[0].explain else self.output_specs
            for spec, shape in zip(specs, done.shapes, strict=True):
                count = math.prod(shape)
                arrays.append(np.frombuffer(body, spec.kind, count, place).reshape(shape))
                place += count * spec.kind.itemsize
            row = 0
            for request in batch.items:
                outputs = [
                    array[row : row + request.rows] if spec.batched else array
                    for spec, array in zip(specs, arrays, strict=True)
                ]
                row += request.rows
                self._give(request, Answer(outputs=outputs), sent, done, batch.rows, now)
        self._pump()

    def _give(self, request: Request, answer: Answer, sent: float, done: wire.Done, rows: int, now: float) -> None:
        answer.queue_s, answer.join_s, answer.model_s = sent - request.arrival_s, done.join_s, done.model_s
        answer.batch_rows, answer.arrival_s, answer.done_s = rows, request.arrival_s, now
        self.metrics.request(now - request.arrival_s, answer.queue_s, self.settings.limit_ms / 1e3)
        if not request.answer.done():
            request.answer.set_result(answer)

    def failed(self, batch: Batch[Request], why: Rejected) -> None:
        """A call failed. Those of a batch of several go again, each alone: one bad request fails only itself."""
        for request in batch.items:
            if request.answer.done():
                continue
            request.tries += 1
            alone = len(batch.items) == 1
            if alone or request.tries > 2 or request.pieces or self.closing:
                self._give_up(request, why)
                continue
            request.key = ("alone", id(request), request.key)
            if not self.queue.push(request):
                self._give_up(request, Rejected(429, "too many requests wait", 1.0, "queue_full"))
        self._plan_pump()


class _Link(asyncio.Protocol):
    """One worker process, seen from the server."""

    def __init__(self, pool: Pool, index: int) -> None:
        self.pool, self.index = pool, index
        self.ready = False
        self.batch: Batch[Request] | None = None
        self.rss = 0
        self.pid = 0
        self.restarts = 0
        self.started_at = 0.0
        self.warm_s: dict[int, float] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._memory: mmap.mmap | None = None
        self._buffer = bytearray()
        self._need = wire.PREFIX.size
        self._call = 0
        self._sent = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._loaded: asyncio.Future[None] | None = None
        self._failures = 0
        self._ended = False

    async def start(self) -> None:
        """Start the process; returns when it is warm or has failed."""
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        environment = {
            name: value
            for name, value in os.environ.items()
            if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
        }
        settings, pool = self.pool.settings, self.pool
        threads = settings.threads or max(1, cores() // settings.workers)
        environment["OMP_NUM_THREADS"] = str(threads)
        log_file: Any = open(pool.log_path, "ab") if pool.log_path else None  # noqa: SIM115
        given = [theirs.fileno()]
        memory = wire.shared_memory()
        if memory is not None:
            given.append(memory[0])
            self._memory = memory[1]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fettle.serve._worker", *map(str, given)],
                pass_fds=given, env=environment, stdin=subprocess.DEVNULL, stdout=log_file,
                stderr=log_file, start_new_session=True,
            )  # fmt: skip
        finally:
            theirs.close()
            if memory is not None:
                os.close(memory[0])
            if log_file is not None:
                log_file.close()
        self.pid, self.started_at, self._ended = self._process.pid, time.time(), False
        self._buffer.clear()
        self._need = wire.PREFIX.size
        self._loaded = loop.create_future()
        self._transport, _ = await loop.create_connection(lambda: self, sock=ours)
        self._watch = loop.call_later(START_S, self._hung)
        mine = list(pool.cores[self.index]) if self.index < len(pool.cores) else []
        self._write(
            wire.Load(str(pool.package.folder), pool.sizes, threads, mine, pool.trust, pool.device, pool.explains)
        )
        await self._loaded

    def end(self) -> None:
        """Kill the process and its children."""
        self._ended = True
        self.ready = False
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, 9)
            self._process.wait()

    def run(self, batch: Batch[Request], now: float) -> None:
        """Send a batch."""
        self.batch, self._sent = batch, now
        self._call = self.pool.next_id()
        first = batch.items[0]
        if first.piece is not None:
            bodies = [item.body or b"" for item in batch.items]
            self._write(wire.Generate(self._call, [len(body) for body in bodies]), bodies)
        elif first.body is not None:
            bodies = [item.body or b"" for item in batch.items]
            call = wire.Call(
                self._call, [len(body) for body in bodies], [item.kind for item in batch.items], first.explain
            )
            self._write(call, bodies)
        elif first.explain:
            shapes = [list(array.shape) for array in first.arrays]
            self._write(wire.Explain(self._call, shapes, first.target), [wire.flat(array) for array in first.arrays])
        else:
            each = [[list(array.shape) for array in item.arrays] for item in batch.items]
            run = wire.Run(self._call, batch.size, each)
            self._write(run, [wire.flat(array) for item in batch.items for array in item.arrays])
        self._wait(self.pool.settings.timeout_ms / 1e3)

    def cancel(self, index: int) -> None:
        """Tell the worker that one prompt of its batch is not waited for."""
        self._write(wire.Cancel(self._call, index))

    def _write(self, header: Any, body: Sequence[Any] = ()) -> None:
        assert self._transport is not None
        size = sum(len(part) for part in body)
        if self._memory is not None and wire.SHARED_FROM <= size <= wire.SHARED_BYTES:
            self._transport.write(wire.shared_frame(header, body, self._memory))
        else:
            self._transport.writelines(wire.frame(header, body))

    def _wait(self, seconds: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self.pool.loop.call_later(seconds, self._hung)

    def _hung(self) -> None:
        log.warning("worker %d of %s does not answer: replaced", self.index, self.pool.package.manifest.name)
        self._lost("hung")

    def _rest(self) -> None:
        """Idle: ask from time to time whether the process is there."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self.pool.loop.call_later(PING_S, self._ping)

    def _ping(self) -> None:
        if self.batch is None and not self._ended:
            self._write(wire.Ping(0))
            self._wait(PING_S)

    # -- what comes back ---------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Collect frames; a frame that is whole is handled at once."""
        self._buffer += data
        while len(self._buffer) >= self._need:
            head, body = wire.PREFIX.unpack_from(self._buffer)
            if head > wire.MAX_HEADER:
                self._lost("spoke nonsense")
                return
            whole = wire.PREFIX.size + head + body
            if len(self._buffer) < whole:
                self._need = whole
                return
            # The buffer is handed on, not copied: answers are views of it.
            if len(self._buffer) == whole:
                taken, self._buffer = self._buffer, bytearray()
            else:
                taken = self._buffer[:whole]
                del self._buffer[:whole]
            self._need = wire.PREFIX.size
            view = memoryview(taken)
            try:
                header = wire.from_worker.decode(view[wire.PREFIX.size : wire.PREFIX.size + head])
            except msgspec.MsgspecError:
                self._lost("spoke nonsense")
                return
            self._handle(header, view[wire.PREFIX.size + head :])

    def _handle(self, header: wire.FromWorker, body: memoryview) -> None:
        if isinstance(header, wire.Ready):
            self.ready, self._failures, self.warm_s = True, 0, header.seconds
            log.info("worker %d of %s ready in %.1f s", self.index, self.pool.package.manifest.name, header.load_s)
            self._rest()
            if self._loaded is not None and not self._loaded.done():
                self._loaded.set_result(None)
            self.pool._plan_pump()
            return
        if isinstance(header, wire.Pong):
            self.rss = header.rss
            self._rest()
            return
        if isinstance(header, wire.Failed) and header.id < 0:
            self.pool.problem, self.pool.usage = header.reason, header.usage
            return  # the process ends now, which `connection_lost` hears of
        if header.id != self._call or self.batch is None:
            return  # of a call that was given up
        if isinstance(header, wire.Piece):
            self._wait(self.pool.settings.timeout_ms / 1e3)
            item = self.batch.items[header.index]
            item.pieces += 1
            if header.last:
                done = wire.Done(header.id, [], 0.0, time.perf_counter() - self._sent, self.rss)
                found = Answer(body=bytes(body), kind="application/json")
                self.pool._give(item, found, self._sent, done, self.batch.rows, time.perf_counter())
            elif item.piece is not None:
                item.piece(bytes(body))
            return
        batch, self.batch = self.batch, None
        self._rest()
        if isinstance(header, wire.Done):
            self.rss = header.rss
            self.pool.finished(batch, self._sent, header, body)
        else:
            log.warning("a call of %s failed: %s", self.pool.package.manifest.name, header.reason)
            why = Rejected(400, header.reason, kind="input") if header.usage else Rejected(500, "the model failed")
            self.pool.failed(batch, why)
        most = self.pool.settings.max_worker_bytes
        if most and self.rss > most and self.batch is None and not self.pool.closing:
            log.warning("worker %d of %s has grown to %d MiB: replaced", self.index, self.pool.package.manifest.name,
                        self.rss >> 20)  # fmt: skip
            self._lost("grown")

    def connection_lost(self, error: Exception | None) -> None:
        """The process has ended, or we ended it."""
        if not self._ended:
            self._lost("ended")

    def _lost(self, why: str) -> None:
        """This process is of no more use: give its call back, and start another one after a while."""
        was_ready, batch, self.batch = self.ready, self.batch, None
        self.end()
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)
            if not self.restarts and not was_ready:
                return  # the first start: whoever asked for it hears of the failure
        if self.pool.closing:
            return
        self.restarts += 1
        self.pool.metrics.restart(why)
        if batch is not None:
            self.pool.failed(batch, Rejected(500, "the model's process ended during the call", kind="crash"))
        wait = 0.0 if why == "grown" else BACK_OFF_S[min(self._failures, len(BACK_OFF_S) - 1)]
        self._failures += 1
        loop = asyncio.get_running_loop()
        loop.call_later(wait, lambda: None if self.pool.closing else loop.create_task(self.start()))
