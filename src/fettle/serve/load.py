"""Load on a server: an open loop, whose latency counts from the moment a request was due, and a closed loop.

An open loop fixes its schedule beforehand, as users who do not know of each other would: a slow answer delays nobody's
request, and so is counted in full. A closed loop waits for each answer before it asks again: it finds the greatest
throughput, and hides what a user would wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fettle.errors import UsageError
from fettle.serve.client import Connection, Shot

WINDOW_S = 1.0
MAX_CONNECTIONS = 2048


@dataclass
class Run:
    """What one run on a server showed. Times in seconds; latencies are those of the steady part, in due order."""

    mode: str
    """``open`` or ``closed``."""
    rate: float
    """Requests a second that were due; of a closed loop those that were answered."""
    duration_s: float
    """Of the steady part."""
    latency_s: np.ndarray[Any, Any]
    """Of the answered requests: from due (open) or sent (closed) to the last byte."""
    concurrency: int = 0
    statuses: dict[int, int] = field(default_factory=dict)
    """Answers by HTTP status in the steady part; 0: the connection was lost."""
    limit_s: float = 0.0
    late_s: float = 0.0
    """99th percentile of how late requests were sent."""
    warm_up_s: float = 0.0
    """What was left out at the beginning."""
    mean_inflight: float = 0.0
    stable: bool = True
    void: str = ""
    """Why nothing may be concluded; empty where something may."""
    interrupted: bool = False
    done_s: np.ndarray[Any, Any] = field(default_factory=lambda: np.array([]))
    """When each of `latency_s` was answered, from the start of the run."""

    @property
    def answered(self) -> int:
        """Requests that were answered with success."""
        return self.statuses.get(200, 0)

    @property
    def shed(self) -> int:
        """Requests that the server refused because it was full."""
        return self.statuses.get(429, 0) + self.statuses.get(503, 0)

    @property
    def failed(self) -> int:
        """Requests that were neither answered nor refused."""
        return sum(self.statuses.values()) - self.answered - self.shed

    @property
    def throughput(self) -> float:
        """Successful answers a second."""
        return self.answered / self.duration_s if self.duration_s else 0.0

    @property
    def goodput(self) -> float:
        """Successful answers within the limit, a second."""
        good = int((self.latency_s <= self.limit_s).sum()) if self.limit_s else self.answered
        return good / self.duration_s if self.duration_s else 0.0

    @property
    def within(self) -> float:
        """Share of all requests that were answered within the limit."""
        total = sum(self.statuses.values())
        return self.goodput * self.duration_s / total if total else 0.0

    def percentile(self, percent: float) -> float:
        """Of the latency; NaN where nothing was answered."""
        return float(np.percentile(self.latency_s, percent)) if len(self.latency_s) else math.nan

    def interval(self, percent: float, batches: int = 10) -> tuple[float, float] | None:
        """95% interval of a percentile by batch means: answers near in time are alike, batches far apart hardly are.

        None where a batch would hold too few answers to have such a percentile.
        """
        if len(self.latency_s) < batches * max(10.0, 1.0 / (1.0 - percent / 100.0)):
            return None
        from scipy import stats

        parts = [float(np.percentile(part, percent)) for part in np.array_split(self.latency_s, batches)]
        half = float(stats.t.ppf(0.975, batches - 1)) * float(np.std(parts, ddof=1)) / math.sqrt(batches)
        middle = float(np.mean(parts))
        return middle - half, middle + half

    def batches(self, count: int = 10) -> dict[str, list[float]]:
        """The steady part in stretches of equal length, and what each shows: the units of a comparison of two runs.

        A percentile is left out where a stretch would hold too few answers to have it.
        """
        found: dict[str, list[float]] = {"p50_ms": [], "p99_ms": [], "throughput": []}
        for percent in (50, 99):
            if len(self.latency_s) >= count * max(10.0, 1.0 / (1.0 - percent / 100.0)):
                parts = np.array_split(self.latency_s, count)
                found[f"p{percent}_ms"] = [float(np.percentile(part, percent)) * 1e3 for part in parts]
        if len(self.done_s) >= 10 * count:
            edges = np.linspace(self.done_s.min(), self.done_s.max() + 1e-9, count + 1)
            found["throughput"] = (np.histogram(self.done_s, edges)[0] / np.diff(edges)).tolist()
        return found

    @property
    def little(self) -> float:
        """Requests in the system over rate times mean latency: 1 where the run is consistent (Little's law)."""
        expected = self.throughput * float(self.latency_s.mean()) if len(self.latency_s) else 0.0
        return self.mean_inflight / expected if expected else math.nan


def poisson(rate: float, seconds: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Moments at which requests are due, seconds from the start: independent arrivals."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1.0 / rate, int(rate * seconds + 6 * math.sqrt(rate * seconds) + 16))
    moments = np.cumsum(gaps)
    return moments[moments < seconds]


def constant(rate: float, seconds: float) -> np.ndarray[Any, Any]:
    """Moments at even distances."""
    return np.arange(max(1, int(rate * seconds))) / rate


def read_schedule(path: Path) -> np.ndarray[Any, Any]:
    """Moments from a file: one number of seconds a line. Raises `UsageError`."""
    try:
        if path.stat().st_size > 256 << 20:
            raise UsageError(f"{path} is too large for a schedule")
        if not path.read_text().strip():
            raise ValueError
        moments = np.loadtxt(path, dtype=np.float64, ndmin=1, comments="#")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no schedule: one number of seconds a line is wanted") from error
    if moments.ndim != 1 or not len(moments) or not np.isfinite(moments).all() or (moments < 0).any():
        raise UsageError(f"{path} is no schedule: one number of seconds a line is wanted")
    moments = np.sort(moments)
    return np.asarray(moments - moments[0])


async def open_loop(
    shots: Sequence[Shot], due: np.ndarray[Any, Any], *, limit_s: float = 0.0, patience_s: float = 10.0,
    tell: Callable[[float, int], None] = lambda seconds, waiting: None, stop: asyncio.Event | None = None,
) -> Run:  # fmt: skip
    """Send requests when they are due, whatever the server does. `shots` are used in turn.

    Ends early where the backlog only grows. After the last request it waits up to `patience_s` for answers.
    """
    load = _Load(shots, limit_s)
    await load.connect(8)
    with _quiet_collector():
        start = time.perf_counter() + 0.05
        load.start = start
        next_window, grown, last, stable = start + WINDOW_S, 0, 0, True
        rate = len(due) / max(float(due[-1]), 1e-9)
        for index, moment in enumerate(due):
            while (left := start + moment - time.perf_counter()) > 0:
                # The event loop's timers wake up to a millisecond late: sleep less, and poll the rest.
                await asyncio.sleep(left - 0.0008 if left > 0.001 else 0)
            await load.send(index, float(moment))
            if not index % 16:
                await asyncio.sleep(0)  # answers are read also while we are behind
            if time.perf_counter() > next_window:
                grown = grown + 1 if load.waiting > last + 0.05 * rate * WINDOW_S else 0
                last, next_window = load.waiting, next_window + WINDOW_S
                tell(time.perf_counter() - start, load.waiting)
                if grown >= 3 and load.waiting > 0.15 * rate * WINDOW_S * grown:
                    stable = False
                    break
            if stop is not None and stop.is_set():
                break
        await load.drain(patience_s if stable else 1.0)
    run = load.result("open", due)
    lost = run.statuses.get(0, 0)
    run.stable = stable and lost <= 0.02 * max(1, sum(run.statuses.values()))
    run.rate = rate
    run.interrupted = stop is not None and stop.is_set()
    bound = max(0.001, 0.01 * limit_s)
    if run.late_s > bound:
        run.void = f"requests were sent {run.late_s * 1e3:.1f} ms late (p99): this client is too slow for the rate"
    return run


async def closed_loop(
    shots: Sequence[Shot], concurrency: int, seconds: float, *, limit_s: float = 0.0,
    tell: Callable[[float, int], None] = lambda seconds, waiting: None, stop: asyncio.Event | None = None,
) -> Run:  # fmt: skip
    """So many clients, each asking again as soon as it has its answer, for so long."""
    load = _Load(shots, limit_s)
    load.again = True
    await load.connect(concurrency)
    with _quiet_collector():
        load.start = time.perf_counter()
        for index in range(concurrency):
            await load.send(index, time.perf_counter() - load.start)
        while time.perf_counter() - load.start < seconds and not (stop is not None and stop.is_set()):
            await asyncio.sleep(min(0.25, max(0.001, seconds - (time.perf_counter() - load.start))))
            tell(time.perf_counter() - load.start, load.waiting)
        load.again = False
        await load.drain(10.0)
    run = load.result("closed", np.array([]))
    run.concurrency, run.rate = concurrency, run.throughput
    run.interrupted = stop is not None and stop.is_set()
    return run


class _Load:
    """Connections and what came back on them."""

    def __init__(self, shots: Sequence[Shot], limit_s: float) -> None:
        self.shots, self.limit_s = shots, limit_s
        self.start = 0.0
        self.waiting = 0
        self.again = False
        self.rows: list[tuple[float, float, float, int]] = []
        """Due, sent, answered, status."""
        self._free: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._queue: deque[tuple[int, float]] = deque()
        self._loop = asyncio.get_running_loop()
        self._empty = asyncio.Event()
        self._count = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, count: int) -> None:
        """Open connections beforehand."""
        for _ in range(count):
            self._free.append(await self._open())

    async def _open(self) -> Connection:
        shot = self.shots[0]
        try:
            _, connection = await self._loop.create_connection(lambda: Connection(self._done), shot.host, shot.port)
        except OSError as error:
            raise UsageError(f"nothing answers at {shot.host}:{shot.port}: {error.strerror or error}") from error
        self._all.add(connection)
        return connection

    async def send(self, index: int, due: float) -> None:
        """Send on a free connection, or on a new one; where there are too many, wait for one to become free."""
        self.waiting += 1
        self._empty.clear()
        while self._free:
            connection = self._free.pop()
            if connection.alive:
                connection.send(self.shots[index % len(self.shots)], (due, time.perf_counter() - self.start))
                return
            self._all.discard(connection)
        if len(self._all) < MAX_CONNECTIONS:
            try:
                connection = await self._open()
            except UsageError:
                self.waiting -= 1
                self.rows.append((due, due, time.perf_counter() - self.start, 0))
                return
            connection.send(self.shots[index % len(self.shots)], (due, time.perf_counter() - self.start))
        else:
            self._queue.append((index, due))

    def _done(self, connection: Connection, status: int) -> None:
        now = time.perf_counter() - self.start
        due, sent = connection.tag
        self.rows.append((due, sent, now, status))
        self.waiting -= 1
        if not self.waiting:
            self._empty.set()
        if not connection.alive:
            self._all.discard(connection)
            connection.close()
            if self.again:
                self._later(self._count, now)
            elif self._queue:
                self.waiting -= 1  # `send` counts it again
                self._later(*self._queue.popleft())
            return
        self._count += 1
        if self.again:
            self.waiting += 1
            self._empty.clear()
            connection.send(self.shots[self._count % len(self.shots)], (now, now))
        elif self._queue:
            index, due = self._queue.popleft()
            connection.send(self.shots[index % len(self.shots)], (due, now))
        else:
            self._free.append(connection)

    def _later(self, index: int, due: float) -> None:
        task = self._loop.create_task(self.send(index, due))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self, seconds: float) -> None:
        """Wait for what is still on its way, then close everything; what has not come counts as lost."""
        if self.waiting:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), seconds)
        self.again = False
        now = time.perf_counter() - self.start
        self.rows += [(due, now, now, 0) for _, due in self._queue]  # never sent: as lost as what never came back
        self._queue.clear()
        for connection in list(self._all):
            connection.close()
        await asyncio.sleep(0.02)

    def result(self, mode: str, due: np.ndarray[Any, Any]) -> Run:
        """The steady part: a prefix is left out that makes the mean surer without it (MSER)."""
        rows = sorted(self.rows)
        if not rows:
            return Run(mode, 0.0, 0.0, np.array([]), limit_s=self.limit_s, void="nothing was answered")
        table = np.array([row[:3] for row in rows])
        status = np.array([row[3] for row in rows])
        begin = warm_up(table[:, 2] - table[:, 0])
        first = float(table[begin, 0])
        table, status = table[begin:], status[begin:]
        # A closed loop ends with its last answer; an open one with its last due moment.
        end = float(table[:, 2].max() if mode == "closed" else max(table[:, 0].max(), first))
        good = status == 200
        span = max(end - first, 1e-9)
        if mode == "open" and len(table) > 1:
            span *= len(table) / (len(table) - 1)  # n arrivals have n - 1 gaps
        latency = table[:, 2] - table[:, 0]
        inside = np.minimum(table[:, 2], end) - table[:, 0]
        return Run(
            mode, 0.0, span, latency[good], statuses={int(k): v for k, v in Counter(status.tolist()).items()},
            limit_s=self.limit_s, late_s=float(np.percentile(table[:, 1] - table[:, 0], 99)), warm_up_s=first,
            mean_inflight=float(inside[good].clip(0).sum() / span), done_s=table[good, 2],
        )  # fmt: skip


def warm_up(values: np.ndarray[Any, Any], most: float = 0.5) -> int:
    """How many values at the beginning to leave out: the cut that makes the standard error of the rest's mean least.

    MSER (White 1997, "An effective truncation heuristic for bias reduction in simulation output"), on means of five,
    cutting at most the share `most`.
    """
    group = max(5, len(values) // 2000)
    count = len(values) // group
    if count < 10:
        return 0
    means = values[: count * group].reshape(count, group).mean(1)
    rest = np.arange(count, 0, -1)
    total, squares = means[::-1].cumsum()[::-1], (means**2)[::-1].cumsum()[::-1]
    error = (squares / rest - (total / rest) ** 2) / rest
    return int(np.argmin(error[: max(1, int(count * most))])) * group


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


TORCHSERVE_COLUMNS = (
    "Benchmark", "TS failed requests", "TS throughput", "TS latency P50", "TS latency P90", "TS latency P99",
    "TS latency mean", "TS error rate", "Batch size", "Batch delay", "Workers", "Model", "Concurrency", "Input",
    "Requests", "Model_p50", "Model_p90", "Model_p99", "Queue time p50", "Queue time p90", "Queue time p99",
    "predict_mean", "handler_time_mean", "waiting_time_mean", "worker_thread_mean", "cpu_percentage_mean",
    "memory_percentage_mean", "gpu_percentage_mean", "gpu_memory_percentage_mean", "gpu_memory_used_mean",
)  # fmt: skip
"""Of its ``ab_report.csv``, in its order. What a client cannot know stays empty."""


def as_data(run: Run) -> dict[str, Any]:
    """The run as plain data."""
    ends = run.interval(99)
    return {
        "mode": run.mode, "rate": run.rate, "concurrency": run.concurrency, "duration_s": run.duration_s,
        "warm_up_s": run.warm_up_s, "answered": run.answered, "shed": run.shed, "failed": run.failed,
        "statuses": run.statuses, "throughput": run.throughput, "goodput": run.goodput, "within_limit": run.within,
        "limit_ms": run.limit_s * 1e3, "latency_ms": {f"p{p}": run.percentile(p) * 1e3 for p in (50, 90, 95, 99, 100)},
        "mean_ms": float(run.latency_s.mean() * 1e3) if len(run.latency_s) else math.nan,
        "p99_interval_ms": [end * 1e3 for end in ends] if ends else None, "late_ms": run.late_s * 1e3,
        "little": run.little, "stable": run.stable, "void": run.void, "interrupted": run.interrupted,
        "batches": run.batches(),
    }  # fmt: skip


def as_torchserve_row(run: Run, url: str) -> dict[str, Any]:
    """The run in the columns of TorchServe's benchmark."""
    total = sum(run.statuses.values())
    bad = total - run.answered
    row = dict.fromkeys(TORCHSERVE_COLUMNS, "")
    row |= {
        "Benchmark": "fettle", "TS failed requests": str(bad), "TS throughput": f"{run.throughput:.2f}",
        "TS latency P50": f"{run.percentile(50) * 1e3:.2f}", "TS latency P90": f"{run.percentile(90) * 1e3:.2f}",
        "TS latency P99": f"{run.percentile(99) * 1e3:.2f}", "TS latency mean": f"{as_data(run)['mean_ms']:.2f}",
        "TS error rate": f"{bad / total * 100 if total else 0:.2f}", "Model": url, "Requests": str(total),
        "Concurrency": str(run.concurrency or ""),
    }  # fmt: skip
    return row
