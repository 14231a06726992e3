"""Load on a server: an open loop, whose latency counts from the moment a request was due, and a closed loop.

An open loop fixes its schedule beforehand, as users who do not know of each other would: a slow answer delays nobody's
request, and so is counted in full. A closed loop waits for each answer before it asks again: it finds the greatest
throughput, and hides what a user would wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import ssl
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fettle.errors import UsageError
from fettle.load.client import Connection, Request, why_unsafe
from fettle.load.run import KINDS, LITTLE, LOST, UNANSWERED, UNREACHED, Run, Text, TextLimits, warm_up
from fettle.load.texts import TextConnection, TextRequest
from fettle.loop import PreciseTimer
from fettle.procs.limits import allow_open_files

_Array = np.ndarray[Any, Any]
WINDOW_S = 1.0
MAX_CONNECTIONS = 2048
_PAUSE_S = 0.05
"""From a connection that could not be made to the next try."""
CONNECT_S = 10.0
"""The longest that one of the first connections may take: where nothing answers, the system tries for minutes."""


async def open_loop(
    requests: Sequence[Request], due: np.ndarray[Any, Any], *, limit_s: float = 0.0, patience_s: float = 10.0,
    limits: TextLimits | None = None,
    on_progress: Callable[[float, int], None] = lambda seconds, waiting: None, stop: asyncio.Event | None = None,
) -> Run:  # fmt: skip
    """Send requests when they are due, whatever the server does. `requests` are used in turn.

    Ends early where the backlog only grows. After the last request it waits up to `patience_s` for answers.
    """
    load = _Load(requests, limit_s)
    rate = len(due) / (float(due[-1]) or 1.0)
    # As many as are in flight where an answer takes 20 ms: connecting costs both sides more than a request does.
    await load.connect(max(8, min(256, int(0.02 * rate))))
    with _quiet_collector(), contextlib.closing(PreciseTimer(0.1 / rate)) as clock:
        start = time.perf_counter() + 0.05
        load.start = start
        next_window, grown, last, stable = start + WINDOW_S, 0, 0, True
        for index, moment in enumerate(due):
            if stop is not None and (left_s := start + moment - time.perf_counter()) > 0.5:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), left_s - 0.1)
                    break
            await clock.wait(start + moment)
            load.send(index, float(moment))
            if not index % 16:
                await asyncio.sleep(0)  # answers are read also while we are behind
            if time.perf_counter() > next_window:
                grown = grown + 1 if load.waiting > last + 0.05 * rate * WINDOW_S else 0
                last, next_window = load.waiting, next_window + WINDOW_S
                on_progress(time.perf_counter() - start, load.waiting)
                # It grows anyway until the first answers come.
                begun = 3 * WINDOW_S + (load.longest_s or patience_s)
                if grown * WINDOW_S > begun and load.waiting > 0.15 * rate * WINDOW_S * grown:
                    stable = False
                    break
            if stop is not None and stop.is_set():
                break
        await load.drain(patience_s if stable else 1.0, stop)
    run = load.result("open")
    run.limits = limits or run.limits
    lost = sum(run.statuses.get(kind, 0) for kind in KINDS)
    run.stable = stable and lost <= 0.02 * max(1, sum(run.statuses.values()))
    run.rate = rate
    run.interrupted = stop is not None and stop.is_set()
    bound = max(0.001, 0.01 * limit_s, 0.01 * run.limits.ttft_s)
    if run.late_s > bound:
        run.void = f"requests were sent {run.late_s * 1e3:.1f} ms late (p99): this client is too slow for the rate"
    elif run.stable:
        run.void = _inconsistent(run)
    return run


async def closed_loop(
    requests: Sequence[Request], concurrency: int, seconds: float, *, limit_s: float = 0.0, patience_s: float = 10.0,
    limits: TextLimits | None = None,
    on_progress: Callable[[float, int], None] = lambda seconds, waiting: None, stop: asyncio.Event | None = None,
) -> Run:  # fmt: skip
    """A fixed number of clients for a time, each asking again as soon as it has its answer. After that time it waits up
    to `patience_s` for those that are on their way."""
    load = _Load(requests, limit_s)
    load.again = True
    await load.connect(concurrency)
    with _quiet_collector():
        load.start = time.perf_counter()
        for _ in range(concurrency):
            load.send(next(load.turns), time.perf_counter() - load.start)
        while time.perf_counter() - load.start < seconds and not (stop is not None and stop.is_set()):
            await asyncio.sleep(min(0.25, max(0.001, seconds - (time.perf_counter() - load.start))))
            on_progress(time.perf_counter() - load.start, load.waiting)
        load.again, load.until = False, time.perf_counter() - load.start
        await load.drain(patience_s, stop)
    run = load.result("closed")
    run.limits = limits or run.limits
    run.concurrency, run.rate = concurrency, run.throughput
    run.void = run.void or _inconsistent(run)
    run.interrupted = stop is not None and stop.is_set()
    return run


def _inconsistent(run: Run) -> str:
    """Why a run is void by Little's law. One with few requests a place in the system has too much beginning and end."""
    if sum(run.statuses.values()) < max(100.0, 20 * run.mean_inflight) or abs(run.little - 1) <= LITTLE:
        return ""
    return f"Little's law is off by {run.little:.2f}: what was counted and what was timed do not agree"


class _Load:
    """Connections and what came back on them."""

    def __init__(self, requests: Sequence[Request], limit_s: float) -> None:
        allow_open_files()
        self.requests, self.limit_s = requests, limit_s
        self.start = 0.0
        self.waiting = 0
        self.again = False
        self.until = math.inf
        """When a closed loop stopped asking."""
        self._ending = False
        self._rows = array("d")
        """Due, sent, answered and status of each request, one behind the other: a load test may have millions."""
        self._texts: dict[tuple[float, float, float, int], Text] = {}
        """For a server that writes texts, what came, by the row of each."""
        self.refusal = ""
        """What a server said that would not write a text."""
        self.longest_s = 0.0
        """The longest that an answer took, from when its request was sent; 0: none has come."""
        self._moves = array("d")
        """When the number on their way changed, and to what, one behind the other."""
        self._free: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._queue: deque[tuple[int, float, float]] = deque()
        self._loop = asyncio.get_running_loop()
        self._empty = asyncio.Event()
        self.turns = itertools.count()
        """Whose turn it is, of requests that are asked without a schedule: each once before any is asked again."""
        self._most = MAX_CONNECTIONS
        self._opening = 0
        """Connections that are being made."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, count: int) -> None:
        self._most = max(MAX_CONNECTIONS, count)  # each of so many clients has one
        for _ in range(count):
            try:
                async with asyncio.timeout(CONNECT_S):
                    self._free.append(await self._open())
            except TimeoutError as error:
                where = f"{self.requests[0].host}:{self.requests[0].port}"
                raise UsageError(f"nothing answers at {where}: no connection within {CONNECT_S:.3g} s") from error

    async def _open(self) -> Connection:
        request = self.requests[0]
        kind = TextConnection if isinstance(request, TextRequest) else Connection
        try:
            _, connection = await self._loop.create_connection(
                lambda: kind(self._done), request.host, request.port, ssl=request.tls
            )
        except ssl.SSLError as error:
            raise UsageError(f"no secure connection to {request.host}:{request.port}: {why_unsafe(error)}") from error
        except (OSError, UnicodeError) as error:  # a name that can be none
            why = getattr(error, "strerror", None) or error
            raise UsageError(f"nothing answers at {request.host}:{request.port}: {why}") from error
        self._all.add(connection)
        return connection

    def send(self, index: int, due: float, sent: float | None = None) -> None:
        """Send on a free connection, or on a new one; where there are too many, wait for one to become free: that is
        the server's doing, and `sent` is when it should have been sent, where that was earlier."""
        sent = time.perf_counter() - self.start if sent is None else sent
        self._move(1)
        self._empty.clear()
        while self._free:
            connection = self._free.pop()
            if connection.alive:
                connection.send(self.requests[index % len(self.requests)], (due, sent))
                return
            self._all.discard(connection)
        if len(self._all) + self._opening < self._most:  # those that are due meanwhile do not wait for it
            self._send_on_new(self.requests[index % len(self.requests)], due, sent)
        else:
            self._queue.append((index, due, sent))

    def _send_on_new(self, request: Request, due: float, sent: float) -> None:
        """On a new connection, when there is one; `sent` is when it should have been sent."""
        self._opening += 1
        task = self._loop.create_task(self._opened(request, due, sent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _opened(self, request: Request, due: float, sent: float) -> None:
        try:
            connection = await self._open()
        except (UsageError, asyncio.CancelledError):
            self.note(due, sent, time.perf_counter() - self.start, UNANSWERED if self._ending else UNREACHED)
            self._move(-1)
            if not self.waiting:
                self._empty.set()
            self._loop.call_later(_PAUSE_S, self._go_on)  # a port where nobody listens refuses at once
            return
        finally:
            self._opening -= 1
        connection.send(request, (due, sent))

    def _done(self, connection: Connection, status: int) -> None:
        now = time.perf_counter() - self.start
        due, sent = connection.tag
        if not status and connection.was_stale and not self._ending:
            self._all.discard(connection)
            self._send_on_new(connection.request, due, sent)
            return
        if status:
            self.longest_s = max(self.longest_s, now - sent)
        row = (due, sent, now, status or (UNANSWERED if self._ending else LOST))
        self.note(*row)
        if isinstance(connection, TextConnection):
            if status == 200:
                self._texts[row] = Text(due, now, *connection.heard(self.start))
            self.refusal = self.refusal or connection.refusal
        self._move(-1)
        if not self.waiting:
            self._empty.set()
        if connection.alive:
            self._free.append(connection)
        else:
            self._all.discard(connection)
            connection.close()
        self._go_on()

    def _go_on(self) -> None:
        """Send what one that has ended makes room for: its client's next request, or one that waits to be sent."""
        if self.again:
            self.send(next(self.turns), time.perf_counter() - self.start)
        elif self._queue:
            self._move(-1)  # `send` counts it again
            self.send(*self._queue.popleft())

    def note(self, due: float, sent: float, answered: float, status: int) -> None:
        """Take down a request that has ended."""
        self._rows.extend((due, sent, answered, status))

    def _move(self, change: int) -> None:
        self.waiting += change
        self._moves.extend((time.perf_counter() - self.start, self.waiting))

    def _mean_waiting(self, first: float, end: float) -> float:
        """The mean of the count between two moments."""
        times, counts = np.array(self._moves).reshape(-1, 2).T
        begin, stop = int(np.searchsorted(times, first, "right")), int(np.searchsorted(times, end, "right"))
        levels = np.concatenate([[counts[begin - 1] if begin else 0], counts[begin:stop]])
        edges = np.concatenate([[first], times[begin:stop], [end]])
        return float((levels * np.diff(edges)).sum() / max(end - first, 1e-9))

    def _due(self) -> tuple[_Array, _Array, float, float]:
        """For an open loop: requests that were due in the steady part, their statuses, its first and last moment."""
        rows = np.array(self._rows).reshape(-1, 4)
        rows = rows[np.lexsort(rows.T[::-1])]
        table, status = rows[:, :3], rows[:, 3].astype(int)
        begin = warm_up(table[:, 2] - table[:, 0]) if table[0, 0] < table[-1, 0] else 0
        table, status = table[begin:], status[begin:]
        first, last = float(table[0, 0]), float(table[-1, 0])
        return table, status, first, last if last > first else float(table[:, 2].max())  # all were due at once

    def _answered(self) -> tuple[_Array, _Array, float, float]:
        """For a closed loop: what was answered in the steady part.

        Answers are counted, not requests: with many clients, what is asked in it is answered long after it began, and
        answers that come once no client asks any more are of a server that runs empty. Failures count at any time.
        """
        rows = np.array(self._rows).reshape(-1, 4)
        rows = rows[np.argsort(rows[:, 2], kind="stable")]
        table, status = rows[:, :3], rows[:, 3].astype(int)
        counted = (table[:, 2] <= self.until) | (status != 200)
        if not (status[counted] == 200).any():  # not one answer was that quick
            return table, status, 0.0, float(table[:, 2].max())
        table, status = table[counted], status[counted]
        asked = table[table[:, 2] <= self.until]  # by then, and so the first ones
        begin = warm_up(asked[:, 2] - asked[:, 0])
        # A window from the first request on ends with the last answer. Answers come batch by batch: a window that
        # begins anywhere within a batch must end anywhere within one, too.
        first = float(table[begin - 1, 2]) if begin else 0.0
        end = self.until if begin else float(table[status == 200, 2].max())
        return table[begin:], status[begin:], first, end

    async def drain(self, seconds: float, stop: asyncio.Event | None) -> None:
        """Wait for what is still on its way, then close everything; what has not come counts as lost.

        After Ctrl-C, which sets `stop`, the wait is a second at most.
        """
        if stop is not None and stop.is_set():
            seconds, stop = min(1.0, seconds), None
        if self.waiting:
            waits = [asyncio.ensure_future(event.wait()) for event in (self._empty, stop) if event is not None]
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        self.again, self._ending = False, True
        for task in self._tasks:
            task.cancel()
        now = time.perf_counter() - self.start
        # What was never sent counts as lost, like what was never answered.
        for _, due, sent in self._queue:
            self.note(due, sent, now, UNANSWERED)
        self._queue.clear()
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0.02)

    def result(self, mode: str) -> Run:
        """The steady part: a prefix is left out that makes the mean surer without it (MSER)."""
        if not self._rows:
            return Run(mode, 0.0, 0.0, np.array([]), limit_s=self.limit_s, void="nothing was answered")
        table, status, first, end = self._due() if mode == "open" else self._answered()
        good = status == 200
        span = max(end - first, 1e-9)
        if mode == "open" and table[0, 0] < table[-1, 0]:
            span *= len(table) / (len(table) - 1)  # n arrivals have n - 1 gaps
        written = table[good].tolist() if self._texts else []
        latency, kinds = table[:, 2] - table[:, 0], np.unique(status, return_counts=True)
        return Run(
            mode, 0.0, span, latency[good], statuses=dict(zip(*(each.tolist() for each in kinds), strict=True)),
            limit_s=self.limit_s, late_s=float(np.percentile(table[:, 1] - table[:, 0], 99)), warm_up_s=first,
            mean_inflight=self._mean_waiting(first, end),
            expected_inflight=float((table[:, 2] - table[:, 1]).sum() / span),  # lateness is reported on its own
            done_s=table[good, 2], refusal=self.refusal,
            texts=[self._texts[due, sent, end, 200] for due, sent, end in written],
        )  # fmt: skip


@contextlib.contextmanager
def _quiet_collector() -> Any:
    """No garbage collection while times are taken: its pauses would be the server's latency."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
