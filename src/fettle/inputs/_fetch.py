"""Inside the process that runs a pipeline, and its loader workers: time each batch where it is made, name what raises.

torch's two fetchers are wrapped: a dataset wrapped instead would cost a call for each row and hide its type from the
user's `worker_init_fn`. The times go into memory that main process and workers share.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import multiprocessing.queues
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch as torch_fetch

from fettle.errors import first_line
from fettle.processes import die_with_parent

_KEEP = 512
"""Latest batches whose times are kept, a process."""
_WORDS = 512


class ItemError(RuntimeError):
    """A row that could not be read, named by its index."""


_RING = 1 + 2 * _KEEP
_SLOW_S = 1e-3
"""Batches that take longer are worth asking the kernel how long they waited for a core."""


class Board:
    """Shared memory: a ring of (wall, busy) seconds for each process, when the last pause began, and last words.

    Busy is the time on a processor or in the queue for one: what is left of the wall time waits for something else.
    """

    def __init__(self, processes: int) -> None:
        self.times: Any = RawArray(ctypes.c_double, processes * _RING)
        self.paused: Any = RawArray(ctypes.c_double, 1)
        self.words: Any = RawArray(ctypes.c_char, _WORDS)
        self.processes = processes

    def note(self, process: int, began: float, wall: float, busy: float) -> None:
        """Keep the times of a batch, unless it was stopped on its way: the pause would be counted as its time."""
        if began < self.paused[0]:
            return
        begin = process * _RING
        count = int(self.times[begin])
        place = begin + 1 + 2 * (count % _KEEP)
        self.times[place], self.times[place + 1] = wall, busy
        self.times[begin] = count + 1

    def pause(self) -> None:
        """From now on the processes may be stopped. The clock is one for all processes."""
        self.paused[0] = time.perf_counter()

    def read(self) -> list[tuple[float, float]]:
        """All times kept."""
        found = []
        for process in range(self.processes):
            begin = process * _RING
            for row in range(min(_KEEP, int(self.times[begin]))):
                place = begin + 1 + 2 * row
                found.append((self.times[place], self.times[place + 1]))
        return found

    def clear(self) -> None:
        for process in range(self.processes):
            self.times[process * _RING] = 0

    def say(self, text: str) -> None:
        self.words.value = text.encode(errors="replace")[: _WORDS - 1]

    def said(self) -> str:
        return bytes(self.words.value).decode(errors="replace")


_board: Board | None = None


def install(board: Board) -> None:
    """Wrap torch's fetchers in this process; once. Forked workers inherit it."""
    global _board
    _board = board
    for kind in (torch_fetch._MapDatasetFetcher, torch_fetch._IterableDatasetFetcher):
        if not hasattr(kind.fetch, "fettle"):
            kind.fetch = _timed(kind.fetch)  # type: ignore[method-assign]


def worker_init(board: Board, own: Callable[[int], None] | None, number: int) -> None:
    """Each loader worker begins here: with fettle's watch, then the user's own `worker_init_fn`."""
    die_with_parent()
    install(board)
    # A batch that cannot be handed over (/dev/shm full) only prints in the queue's thread, and the loop waits for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_not_handed_over)  # type: ignore[attr-defined]
    if own is not None:
        own(number)


def init_function(board: Board, own: Callable[[int], None] | None) -> Callable[[int], None]:
    """A `worker_init_fn` that can be sent to workers which are started and not forked."""
    return functools.partial(worker_init, board, own)


def quantile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie; of nothing, 0."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summary(board: Board) -> dict[str, float]:
    """Quantiles of the times kept, and the processor's share of them."""
    times = board.read()
    walls = [wall for wall, _ in times]
    return {
        "fetch_p50_s": statistics.median(walls) if walls else 0.0,
        "fetch_p95_s": quantile(walls, 0.95),
        "fetch_p99_s": quantile(walls, 0.99),
        "fetch_busy": sum(busy for _, busy in times) / max(sum(walls), 1e-12),
    }


def _timed(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def fetch(self: Any, index: Any) -> Any:
        began, cpu = time.perf_counter(), time.process_time()
        slow = getattr(self, "fettle_slow", True)
        queued = _queued() if slow else 0.0
        self.fettle_batches = getattr(self, "fettle_batches", 0) + 1
        try:
            batch = original(self, index)
        except (StopIteration, ItemError):
            raise
        except Exception as error:
            raise ItemError(_named(self, index, error)) from error
        if _board is not None:
            worker = get_worker_info()
            wall, busy = time.perf_counter() - began, time.process_time() - cpu
            if slow:
                busy += _queued() - queued
            self.fettle_slow = wall > _SLOW_S
            _board.note(0 if worker is None else worker.id + 1, began, wall, min(busy, wall))
        return batch

    fetch.fettle = True  # type: ignore[attr-defined]
    return fetch


def _queued() -> float:
    """Seconds for which this thread was ready and had no core (Linux; elsewhere 0)."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _named(fetcher: Any, index: Any, error: Exception) -> str:
    """Which row raised: the rows of the batch are read once more, one by one."""
    rows = list(index) if isinstance(index, (list, tuple)) else [index]
    if isinstance(fetcher, torch_fetch._IterableDatasetFetcher):
        worker: Any = get_worker_info()
        where = "" if worker is None else f" of worker {worker.id}"
        begin = (getattr(fetcher, "fettle_batches", 1) - 1) * len(rows)
        return f"one of the rows {begin} to {begin + len(rows) - 1} of the stream{where} raised {first_line(error)}"
    few = f"{rows[0]!r} to {rows[-1]!r}" if len(rows) > 1 else repr(rows[0])
    if isinstance(error, MemoryError):
        return f"out of memory in the batch of items {few}"
    for row in rows if fetcher.auto_collation else []:
        try:
            fetcher.dataset[row]
        except Exception as again:
            return f"item {row!r} raised {first_line(again)}"
    if len(rows) == 1 or not fetcher.auto_collation:
        return f"item {few} raised {first_line(error)}"
    return f"the items {few} can each be read, but their batch raised {first_line(error)}"


def _not_handed_over(error: BaseException, batch: object) -> None:
    if _board is not None:
        _board.say(f"a worker could not hand a batch over: {first_line(error)}")
    os._exit(1)
