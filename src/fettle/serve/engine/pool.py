"""The pool: one model version's queue, batcher and worker processes. Everything here runs in one event loop.

A request waits in the `BatchQueue`; whenever one arrives, a worker becomes free or a time comes, `_pump` asks the queue
what to send. Nothing polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from fettle.package.host import host_id
from fettle.package.manifest import Package
from fettle.package.settings import ServeSettings
from fettle.serve.engine import wire
from fettle.serve.engine.alarm import Alarm
from fettle.serve.engine.anticipation import Anticipation
from fettle.serve.engine.batching import Batch, BatchQueue
from fettle.serve.engine.metrics import ModelMetrics
from fettle.serve.engine.refusal import Refusal
from fettle.serve.engine.request import Answer, Request, answers
from fettle.serve.engine.worker import Worker
from fettle.serve.engine.worker_start import Spawned, threads_each


class Pool:
    """One model version that is served: its workers, and what waits for them."""

    def __init__(
        self, package: Package, settings: ServeSettings, metrics: ModelMetrics, *,
        cores: Sequence[Sequence[int]] = (), trust: str = "", explain: bool = False, spare: Spawned | None = None,
    ) -> None:  # fmt: skip
        self.package, self.settings, self.metrics = package, settings, metrics
        self.specs, self.output_specs = package.manifest.inputs, package.manifest.outputs
        self.attribution_specs = [msgspec.structs.replace(spec, datatype="FP32") for spec in self.specs]
        self.queue = BatchQueue(self._batching(settings))
        self.texts = BatchQueue(_one_by_one(settings))
        """Requests for a text, in the order in which they came."""
        self._row_s = self.queue.settings.row_s(host_id())
        self.trust, self.explains = trust, explain
        threads = threads_each(settings.threads, settings.workers)
        self.workers = [
            Worker(self, index, threads, cores[index] if cores else ()) for index in range(settings.workers)
        ]
        self.joining: list[Worker] = []
        """Workers that are started while the others serve."""
        self.spare = spare
        self.name = package.manifest.name
        self.loop = asyncio.get_running_loop()
        """The one event loop that all of it runs in. Asking asyncio each time costs a system call in Python 3.11."""
        self.closing = False
        self.state = "LOADING"
        """LOADING, READY, UNLOADING or UNAVAILABLE, as the repository extension says."""
        self.problem = ""
        """Why loading failed, where it did."""
        self.last_ms = 0
        """When it answered last, of the clock."""
        self._anticipation, self._watching = Anticipation(), False
        self._alarm = Alarm(self._pump)
        self._pump_planned = False
        self.next_id = itertools.count(1).__next__
        """Numbers what its workers are asked."""
        self._idle = asyncio.Event()
        """Set where it closes and has nothing left to answer."""

    # -- life --------------------------------------------------------------------------------------------------------

    async def start(self, workers: Sequence[Worker]) -> None:
        """Start these and wait until all are warm. Raises `Refusal` (503) with the reason where one cannot; then none
        is left."""
        self.problem = ""
        try:
            try:
                await asyncio.gather(*(worker.start() for worker in workers))
            except OSError as error:  # no process to be had: memory, descriptors
                self.problem = f"a worker cannot be started: {error.strerror}"
            if self.closing or not all(worker.ready for worker in workers):
                raise Refusal(503, self.problem or "a worker ended while loading")
        except BaseException:
            for worker in workers:
                worker.close()
            raise

    async def scale(self, settings: ServeSettings, cores: Sequence[Sequence[int]]) -> None:
        """Have the workers that `settings` ask for, each on its `cores`, without a failed request.

        New ones take part once all of them are warm. Those that are too many, or whose threads and cores are others
        now, end after the batch that they have. Raises `Refusal` (503) where a new one cannot be started; then nothing
        has changed.
        """
        threads = threads_each(settings.threads, settings.workers)
        staying = {worker.index: worker for worker in self.workers if not worker.leaving}
        kept, self.joining = [], []
        for index in range(settings.workers):
            old, mine = staying.get(index), list(cores[index]) if cores else []
            if old is not None and old.threads == threads and (not cores or old.cores == mine):
                kept.append(old)
            else:
                self.joining.append(Worker(self, index, threads, mine))
        try:
            await self.start(self.joining)
        finally:
            joined, self.joining = self.joining, []
        left = [worker for worker in self.workers if worker not in kept]
        self.workers = sorted([*kept, *joined], key=lambda worker: worker.index) + left
        # Of the settings now, which may have been changed while the workers started.
        self.change(msgspec.structs.replace(self.settings, workers=settings.workers))
        for worker in left:
            worker.leave()

    def without(self, worker: Worker) -> None:
        """One that left has answered its last batch."""
        worker.close()
        self.workers.remove(worker)

    @property
    def ready(self) -> bool:
        """Whether every worker is loaded and warm."""
        return not self.closing and all(worker.ready for worker in self.workers if not worker.leaving)

    @property
    def cores(self) -> set[int]:
        """Cores that its workers are bound to."""
        return {core for worker in self.workers for core in worker.cores}

    async def close(self, drain_s: float) -> None:
        """Take nothing new, let what was taken finish for at most `drain_s`, and end the workers."""
        self.closing = True
        self._pump()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_s)
        for request in [*self.queue.expire(math.inf), *self.texts.expire(math.inf)]:
            self._give_up(request, Refusal(503, "the model is being unloaded", 1.0))
        self._alarm.clear()
        for worker in [*self.workers, *self.joining]:
            for request in worker.requests():
                self._give_up(request, Refusal(503, "the model was unloaded during the call", 1.0))
            worker.close()

    def change(self, settings: ServeSettings) -> None:
        """Other batching settings, while running."""
        self.settings = settings
        self.queue.change(self._batching(settings))
        self._row_s = self.queue.settings.row_s(host_id())
        self.texts.change(_one_by_one(settings))
        self.plan_pump()

    def _batching(self, settings: ServeSettings) -> ServeSettings:
        """The settings of the queue of tensors."""
        return settings if self.package.manifest.shares_calls else _one_by_one(settings)

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request, timeout_s: float | None = None) -> asyncio.Future[Answer]:
        """Let a request wait for its batch. Raises `Refusal` at once when the queue is full or the model not ready."""
        if request.explain:
            if not self.explains:
                raise Refusal(501, "explanations are off on this server")
            request.key = ("explain", self.next_id())  # explained alone
        self.admit()
        longest = self.settings.timeout_ms / 1e3
        now = request.arrival_s = time.perf_counter()
        request.deadline_s = now + min(timeout_s or longest, longest)
        request.answer = self.loop.create_future()
        if not 1 <= request.rows <= self.settings.max_rows:
            raise Refusal(400, f"a request has 1 to {self.settings.max_rows} rows, not {request.rows}")
        if not self._queue_of(request).push(request):
            self._refuse()
        if request.piece is None:
            self._anticipation.arrived(now)
        self.plan_pump()
        return request.answer

    def admit(self) -> None:
        """Raise `Refusal` where not one row could wait now. Asked before a request is read: refusing must be cheap."""
        for worker in self.workers:  # `any` would take three times as long
            if worker.ready and not self.closing:
                break
        else:
            self.metrics.shed("not_ready")
            raise Refusal(503, "the model is not ready", 1.0)
        if self.queue.rows + self.texts.rows >= self.settings.max_queue_rows:
            self._refuse()

    def _refuse(self) -> NoReturn:
        self.metrics.shed("queue_full")
        ahead = sum(worker.following.rows for worker in self.workers if worker.following is not None)
        raise Refusal(429, "too many requests wait", max(0.05, (ahead + self.waiting_rows) * self._row_s))

    def stop(self, request: Request) -> None:
        """Nobody wants this text any more: the next one takes its place."""
        request.answer.cancel()
        if self.texts.discard(request):
            self.plan_pump()
        else:
            any(worker.cancel(request) for worker in self.workers)

    def _queue_of(self, request: Request) -> BatchQueue:
        return self.queue if request.piece is None else self.texts

    @property
    def waiting_rows(self) -> int:
        return self.queue.rows + self.texts.rows

    @property
    def inflight(self) -> int:
        """Requests that are with a worker now."""
        return sum(len(worker.requests()) for worker in self.workers)

    # -- batching ----------------------------------------------------------------------------------------------------

    def plan_pump(self) -> None:
        """Pump once after all that has come in this turn of the event loop: requests read together go together."""
        if not self._pump_planned:
            self._pump_planned = True
            self.loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_planned = False
        now, wake_s = time.perf_counter(), math.inf
        if self.queue.requests:
            wake_s = self._begin_calls(now)
        if self.texts.requests:
            self._begin_texts(now)
            wake_s = min(wake_s, self.texts.wake_s(now))
        self._alarm.set(wake_s, self.loop)
        if self.closing and not self.waiting_rows and not self.inflight:
            self._idle.set()

    def _begin_calls(self, now: float) -> float:
        """Give tensors and bodies to the workers that are free. When to look again."""
        for late in self.queue.expire(now):
            self._too_late(late)
        hold_s = self._anticipation.hold_s(now) if self.queue.gains_by_waiting else 0.0
        free = [] if hold_s else [worker for worker in self.workers if worker.ready and worker.batch is None]
        while free:
            batch = self.queue.take(now, len(free))
            if batch is None:
                break
            batch = self.without_gone(batch)
            if batch is not None:
                free.pop(0).run(batch, now)
        if self.queue.has_full:
            self._send_ahead()
        wake_s = self.queue.wake_s(now)
        return min(wake_s, hold_s) if hold_s else wake_s

    def _begin_texts(self, now: float) -> None:
        """Let texts join those that are being written, wherever a worker's cache has room for one."""
        for late in self.texts.expire(now):
            self._too_late(late)
        while self.texts.requests:
            worker = max(self.workers, key=lambda worker: worker.free_texts)
            if worker.free_texts < 1:
                return
            batch = self.texts.take(now, 1)
            batch = self.without_gone(batch) if batch is not None else None
            if batch is not None:
                worker.begin_text(batch.items[0], now)

    def _send_ahead(self) -> None:
        """Give busy workers what they go on with, where what comes meanwhile could not change it.

        A worker that has to hear from us between two batches stands still while we read requests.
        """
        for worker in sorted(self.workers, key=lambda worker: worker.began):
            while worker.may_follow:
                batch = self.queue.take_full()
                if batch is None:
                    return
                batch = self.without_gone(batch)
                if batch is not None:
                    worker.follow(batch)

    def without_gone(self, batch: Batch) -> Batch | None:
        """What of a batch somebody waits for still. Asked when it is sent: later it cannot be called back."""
        kept = [item for item in batch.items if not (item.answer.done() or (item.gone is not None and item.gone()))]
        if len(kept) == len(batch.items):
            return batch
        for item in batch.items:
            if item not in kept:
                self.metrics.shed("disconnected")
                self._give_up(item, Refusal(499, "the client went away"))
        rows = sum(item.rows for item in kept)
        return Batch(kept, rows, self.settings.call_rows(rows)) if kept else None

    def _too_late(self, request: Request) -> None:
        self.metrics.shed("deadline")
        self._give_up(request, Refusal(504, "the request's time was over before its turn came"))

    def _give_up(self, request: Request, why: Refusal) -> None:
        if not request.answer.done():
            request.answer.set_exception(why)

    # -- answers -----------------------------------------------------------------------------------------------------

    def finished(self, batch: Batch, sent: float, done: wire.Done, body: memoryview) -> None:
        """A worker has done its batch: to each request its part of what came back."""
        now = time.perf_counter()
        first = batch.items[0]
        if not first.explain:
            self.metrics.batch(batch.rows, batch.size, done.join_s, done.model_s)
        if first.body is not None and not first.explain:
            self.metrics.steps(done.pre_s, done.post_s)
        if done.metrics:
            self.metrics.handler(done.metrics)
        specs = self.attribution_specs if first.explain else self.output_specs
        for request, answer in zip(batch.items, answers(batch.items, specs, done, body), strict=True):
            answer.join_s, answer.model_s = done.join_s, done.model_s
            self._give(request, answer, sent, batch.rows, now)
        others = len(batch.items) > 1 or self.queue.requests > 0
        self._anticipation.answered(len(batch.items) if others else 0, now - sent, now)
        if others and not self._watching and self.settings.max_rows > 1:
            self._watching = True
            self.loop.call_soon(self._turn)
        self._pump()

    def _turn(self) -> None:
        """The event loop has written what was answered and read what came: in each turn until those are back."""
        if self._anticipation.turn():
            self.loop.call_soon(self._turn)
        else:
            self._watching = False
            self._pump()

    def on_piece(self, request: Request, piece: memoryview, rows: int, *, last: bool) -> None:
        """A worker wrote the next piece of a text, one of `rows`."""
        now = time.perf_counter()
        self.metrics.piece(now - (request.last_piece_s or request.arrival_s), first=not request.pieces)
        request.pieces += 1
        request.last_piece_s = now
        if request.piece is not None and not request.answer.done():
            request.piece(bytes(piece))
        if last:
            self._give(request, Answer(model_s=now - request.sent_s), request.sent_s, rows, now)

    def wrote(self, message: wire.Wrote) -> None:
        """A worker says what its texts cost."""
        for rows, calls, seconds in message.calls:
            self.metrics.batch(rows, rows, 0.0, seconds / calls, calls)
        self.metrics.handler(message.metrics)

    def _give(self, request: Request, answer: Answer, sent: float, rows: int, now: float) -> None:
        answer.queue_s, answer.batch_rows = sent - request.arrival_s, rows
        answer.arrival_s, answer.done_s = request.arrival_s, now
        self.metrics.request(now - request.arrival_s, answer.queue_s, self.settings.limit_ms / 1e3)
        if not request.answer.done():
            request.answer.set_result(answer)

    def returned(self, batch: Batch) -> None:
        """A worker ended before it began with these: they wait once more."""
        for request in batch.items:
            if not request.answer.done():
                self._wait_again(request)
        self.plan_pump()

    def failed(self, batch: Batch, why: Refusal) -> None:
        """A call failed. Those of a batch of several go again, each alone: one bad request fails only itself."""
        for request in batch.items:
            if request.answer.done():
                continue
            request.tries += 1
            # A text is given up for what it asks, and tried again where others that were written with it may be why.
            alone = len(batch.items) == 1 and (request.piece is None or why.status == 400)
            if alone or request.tries > 2 or request.pieces or self.closing:
                self._give_up(request, why)
                continue
            request.key = ("alone", id(request), request.key)
            self._wait_again(request)
        self.plan_pump()

    def _wait_again(self, request: Request) -> None:
        if not self._queue_of(request).push(request):
            self._give_up(request, Refusal(429, "too many requests wait", 1.0))


def _one_by_one(settings: ServeSettings) -> ServeSettings:
    """The settings of a queue whose requests go each for itself: nothing is gained by waiting."""
    return msgspec.structs.replace(settings, max_rows=1, delay_ms=0.0, buckets=())
