"""A pool's worker: loaded, given batches, watched, and started again when its process ends (`worker_link`)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fettle.serve.engine import wire
from fettle.serve.engine.alarm import Alarm
from fettle.serve.engine.batching import Batch
from fettle.serve.engine.refusal import TOO_LONG, Refusal
from fettle.serve.engine.request import Request
from fettle.serve.engine.worker_link import WorkerLink
from fettle.serve.engine.worker_start import spawn

if TYPE_CHECKING:
    from fettle.serve.engine.pool import Pool

log = logging.getLogger("fettle.serve")
PING_S = 5.0
"""How often an idle worker is asked whether it is there."""
_LATE_S = 1.0
"""An alarm that rings so late says that the server itself did nothing meanwhile."""
BACK_OFF_S = (0.1, 0.5, 2.0, 5.0, 15.0, 30.0)
"""Before a worker that ended is started again: the n-th time in a row."""
START_S = 1800.0
"""The longest that loading and warming up may take: a large model is compiled for many minutes."""
AHEAD_S = 0.1
"""Calls that take longer gain nothing from a batch that waits in the worker, where it can no longer be given up."""


class Worker:
    """A worker that is there again after it was lost. It works on one batch at a time, and may have the next one."""

    def __init__(self, pool: Pool, index: int, threads: int, cores: Sequence[int] = ()) -> None:
        self.pool, self.index, self.threads, self.cores = pool, index, threads, list(cores)
        self.ready = False
        self.leaving = False
        """Whether it takes no more batches and ends after the one that it has."""
        self.batch: Batch | None = None
        self.following: Batch | None = None
        """What it goes on with after `batch`, without waiting for us in between."""
        self.texts: dict[int, Request] = {}
        """What it writes now, by their numbers; other batches are answered between two tokens of them."""
        self.most_texts = 0
        """How many its cache has room for."""
        self.rss = 0
        self.restarts = 0
        self.started_at = 0.0
        self._process: WorkerLink | None = None
        self._call = self._next_call = 0
        """The numbers of both; 0: not sent yet."""
        self.began = 0.0
        """When the last batch's turn came."""
        self._took_s = math.inf
        self._alarm = Alarm(self._silent)
        self._awaited = False
        self._patience_s = self._until = 0.0
        """How long something is waited for, and until when."""
        self._loaded: asyncio.Future[None] | None = None
        self._failures = 0
        self._again: asyncio.Task[None] | None = None
        """Kept, because the event loop does not."""

    @property
    def device(self) -> str:
        """Where its model is: no device gets a second worker before each has one."""
        devices = self.pool.settings.devices
        return devices[self.index % len(devices)]

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start a process; returns when it is warm or has failed."""
        pool, settings = self.pool, self.pool.settings
        process = self._process = WorkerLink(self._on_message, self._on_lost)
        self._loaded = pool.loop.create_future()
        self.started_at = time.time()
        self._wait(START_S)  # before it may be closed, which ends the wait
        spawned = pool.spare
        if spawned is None or spawned.taken or spawned.threads != self.threads:
            spawned = spawn(self.threads)
        spawned.taken = True
        await process.start(spawned)
        sizes = pool.queue.settings.warm_sizes(settings.max_rows)
        process.write(wire.Load(
            str(pool.package.folder), settings, sizes, self.threads, self.cores, pool.trust, self.device, pool.explains,
            sum(other.device == self.device for other in (*pool.workers, *pool.joining)),
        ))  # fmt: skip
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
        if self.idle:
            self.pool.without(self)

    def requests(self) -> list[Request]:
        """All that it was given and has not answered."""
        batches = [batch.items for batch in (self.batch, self.following) if batch is not None]
        return [*itertools.chain(*batches), *self.texts.values()]

    @property
    def idle(self) -> bool:
        return self.batch is None and not self.texts

    @property
    def free_texts(self) -> int:
        """How many more texts it can begin now."""
        return self.most_texts - len(self.texts) if self.ready else 0

    def begin_text(self, request: Request, now: float) -> None:
        """Let a text join those that it writes."""
        if self.idle:
            self._wait(self.pool.settings.timeout_ms / 1e3)
        number = self.pool.next_id()
        request.sent_s = now
        self.texts[number] = request
        self._send(wire.Generate(number), [request.body or b""])

    def cancel(self, text: Request) -> bool:
        """Give up a text that nobody waits for any more; its place is free at once. False where it has none such."""
        for number, request in self.texts.items():
            if request is text:
                del self.texts[number]
                self._send(wire.Cancel(number))
                self._text_ended()
                return True
        return False

    def close(self) -> None:
        """End it for good."""
        self.end()
        if self._again is not None:
            self._again.cancel()

    def run(self, batch: Batch, now: float, call: int = 0) -> None:
        """Work on this batch, which was sent already where it has the number of a `call`."""
        self.batch, self.began = batch, now
        self._wait(self.pool.settings.timeout_ms / 1e3)
        self._call = call or self._send(*self._message(batch))

    @property
    def may_follow(self) -> bool:
        """Whether it can be given what it goes on with after the batch that it has."""
        return self.batch is not None and self.following is None and self.ready and self._took_s < AHEAD_S

    def follow(self, batch: Batch) -> None:
        """Go on with this batch. It is sent now where the worker need not look at it before, and it finds its place."""
        assert self.batch is not None
        self.following, self._next_call = batch, 0
        header, bodies = self._message(batch)
        if sum(map(len, bodies)) < wire.SHARED_FROM:
            self._next_call = self._send(header, bodies)

    def _go_on(self, now: float) -> None:
        """With what follows, if there is anything."""
        batch, self.batch, self.following = self.following, None, None
        if batch is not None and not self._next_call:
            batch = self.pool.without_gone(batch)
        if batch is not None:
            self.run(batch, now, self._next_call)
        elif not self.texts:
            self._rest()

    def _message(self, batch: Batch) -> tuple[wire.ToWorker, list[Any]]:
        """What a batch is for the worker, under a number of its own."""
        call, items, first = self.pool.next_id(), batch.items, batch.items[0]
        if first.body is not None:
            bodies: list[Any] = [item.body or b"" for item in items]
            return wire.Call(call, [len(body) for body in bodies], [item.kind for item in items], first.explain), bodies
        bodies = [wire.flat(array) for item in items for array in item.arrays]
        shapes = [[array.shape for array in item.arrays] for item in items]
        return wire.Run(call, batch.size, shapes, first.target if first.explain else None), bodies

    def _send(self, header: Any, bodies: Sequence[Any] = ()) -> int:
        """Say this to it; the number of what was said."""
        assert self._process is not None
        self._process.write(header, bodies)
        return int(header.id)

    # -- what it says ------------------------------------------------------------------------------------------------

    def _on_message(self, header: wire.FromWorker, body: memoryview) -> None:
        if isinstance(header, wire.Ready):
            self._is_ready(header)
        elif isinstance(header, wire.Pong):
            self.rss = header.rss
            if self.idle:  # else it was pinged just before its batch came, and that answer is awaited
                self._rest()
        elif isinstance(header, wire.Failed) and header.id < 0:
            self.pool.problem = header.reason  # the process ends now, which `_on_lost` hears of
        elif isinstance(header, wire.Wrote):
            self.rss = header.rss
            if self.texts:  # also while it computes a long prompt, of which no piece comes
                self._wait(self.pool.settings.timeout_ms / 1e3)
            self.pool.wrote(header)
            self._end_or_replace()
        elif header.id in self.texts:
            self._of_text(header, body)
        elif header.id != self._call or self.batch is None or isinstance(header, wire.Piece):
            return  # of a call that was given up
        else:
            self._answered(header, body)

    def _is_ready(self, header: wire.Ready) -> None:
        self.ready, self._failures, self.most_texts = True, 0, header.texts
        log.info("worker %d of %s ready in %.1f s", self.index, self.pool.name, header.load_s)
        self._rest()
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(None)
        self.pool.plan_pump()

    def _of_text(self, header: wire.Piece | wire.Done | wire.Failed, body: memoryview) -> None:
        self._wait(self.pool.settings.timeout_ms / 1e3)
        if isinstance(header, wire.Piece):
            self.pool.on_piece(self.texts[header.id], body, len(self.texts), last=header.last)
            if header.last:
                del self.texts[header.id]
                self._text_ended()
        elif isinstance(header, wire.Failed):
            self.pool.failed(Batch([self.texts.pop(header.id)], 1, 1), _why(header))
            self._text_ended()

    def _text_ended(self) -> None:
        if self.idle:
            self._rest()
        self._end_or_replace()
        self.pool.plan_pump()

    def _end_or_replace(self) -> None:
        """One that leaves ends once it has nothing left. One that has grown too much gets nothing more, and is replaced
        then."""
        if self._has_grown():
            self.ready = False
        if self.ready or not self.idle:
            return
        if self.leaving:
            self.pool.without(self)
        else:
            log.warning("worker %d of %s has grown to %d MiB: replaced", self.index, self.pool.name, self.rss >> 20)
            self._on_lost("grown")

    def _answered(self, header: wire.Done | wire.Failed, body: memoryview) -> None:
        assert self.batch is not None
        batch, began, now = self.batch, self.began, time.perf_counter()
        self._took_s = now - began
        self._go_on(now)
        if isinstance(header, wire.Done):
            self.rss = header.rss
        if self._has_grown():
            self.ready = False
        if isinstance(header, wire.Done):
            self.pool.finished(batch, began, header, body)
        else:
            log.warning("a call of %s failed: %s", self.pool.name, header.reason)
            self.pool.failed(batch, _why(header))
        if not self.ready:
            self._end_or_replace()

    def _has_grown(self) -> bool:
        most = self.pool.settings.max_worker_bytes
        return bool(most) and self.rss > most and not self.pool.closing

    # -- supervision -------------------------------------------------------------------------------------------------

    def _wait(self, seconds: float) -> None:
        """Expect a message from it within this time."""
        self._awaited, self._patience_s = True, seconds
        self._until = time.perf_counter() + seconds
        self._alarm.set(self._until, self.pool.loop)

    def _rest(self) -> None:
        """Idle: ask from time to time whether the process is there."""
        self._awaited = False
        self._alarm.set(time.perf_counter() + PING_S, self.pool.loop)

    def _silent(self) -> None:
        """The alarm: it was idle for a while, or did not say what was awaited. Where the alarm itself is late we stood
        still, stopped or starved, and so may the worker have: it gets its time again."""
        if self._awaited and time.perf_counter() > self._until + _LATE_S:
            self._wait(self._patience_s)
        elif self._awaited:
            log.warning("worker %d of %s does not answer: replaced", self.index, self.pool.name)
            self._on_lost("hung")
        else:
            self._send(wire.Ping(0))
            self._wait(PING_S)

    def _on_lost(self, why: str) -> None:
        """This process is of no more use: give its call back, and start another one after a while."""
        first_start = not self.restarts and self._loaded is not None and not self._loaded.done()
        if why == "ended" and self._process is not None and not (first_start and self.pool.problem):
            ending = f"worker {self.index} of {self.pool.name} {self._process.how_it_ended}"
            log.warning(ending)
            if first_start:
                self.pool.problem = ending
        batch, following = self.batch, self.following
        texts, self.texts = list(self.texts.values()), {}
        self.batch = self.following = None
        self.end()
        if following is not None:  # it had not begun with it
            self.pool.returned(following)
        for lost in [*([batch] if batch is not None else []), *(Batch([text], 1, 1) for text in texts)]:
            self.pool.failed(lost, Refusal(500, "the model's process ended during the call"))
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
            self._on_lost("not started")


def _why(failed: wire.Failed) -> Refusal:
    """What is answered to a call that failed."""
    if failed.usage:
        return Refusal(400, failed.reason, code=TOO_LONG if failed.too_long else None)
    return Refusal(500, "the model failed")
