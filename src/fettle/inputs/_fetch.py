"""Inside the process that runs a pipeline, and its loader workers: time each batch where it is made, name what raises.

torch's two fetchers are wrapped: a dataset wrapped instead would cost a call for each row and hide its type from the
user's `worker_init_fn`. The times go into memory that main process and workers share.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import multiprocessing.queues
import os
import resource
import statistics
import time
from collections.abc import Callable
from multiprocessing.sharedctypes import RawArray
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch as torch_fetch

from fettle.errors import first_line
from fettle.estimates import nearest_rank
from fettle.procs.limits import scheduled_s
from fettle.procs.parent import die_with_parent
from fettle.techniques.allocator import keep_freed_memory

_KEEP = 512
"""Latest batches whose times are kept, a process."""
_ERROR_BYTES = 512


class ItemError(RuntimeError):
    """A row that could not be read, named by its index."""


_ROW = 4
_SLOW_S = 1e-3
"""Batches that take longer are worth asking the kernel how long they waited for a core."""


class Board:
    """Shared memory: a ring of batches for each process, since when they count, and the error of one that ended.

    Of a batch: seconds on the wall, seconds on a processor or in the queue for one (what is left waits for something
    else), seconds in the kernel, and pages of memory that the kernel gave.
    """

    def __init__(self, processes: int) -> None:
        self._rows: Any = RawArray(ctypes.c_double, processes * _KEEP * _ROW)
        self._counts: Any = RawArray(ctypes.c_long, processes)
        self.since: Any = RawArray(ctypes.c_double, 1)
        self._error: Any = RawArray(ctypes.c_char, _ERROR_BYTES)

    def note(self, process: int, began: float, row: tuple[float, float, float, float]) -> None:
        """Keep the times of a batch, unless it was stopped on its way: the pause would be counted as its time; or a
        worker made it that is not the loader's own, but one of a loader that the data set reads from."""
        if began >= self.since[0] and process < len(self._counts):
            count = self._counts[process]
            place = _ROW * (process * _KEEP + count % _KEEP)
            self._rows[place : place + _ROW] = row
            self._counts[process] = count + 1

    def pause(self) -> None:
        """From now on the processes may be stopped: no batch counts."""
        self.since[0] = math.inf

    def go_on(self) -> None:
        """They run again: what begins from now on counts. The clock is one for all processes."""
        self.since[0] = time.perf_counter()

    def read(self) -> list[tuple[float, ...]]:
        """All batches kept."""
        kept = (process * _KEEP + at for process, count in enumerate(self._counts) for at in range(min(count, _KEEP)))
        return [tuple(self._rows[_ROW * row : _ROW * (row + 1)]) for row in kept]

    def clear(self) -> None:
        self._counts[:] = [0] * len(self._counts)

    def set_error(self, text: str) -> None:
        """Why this process is about to end."""
        self._error.value = text.encode(errors="replace")[: _ERROR_BYTES - 1]

    def error(self) -> str:
        return bytes(self._error.value).decode(errors="replace")


_board: Board | None = None


def install(board: Board) -> None:
    """Wrap torch's fetchers in this process; once. Forked workers inherit it."""
    global _board
    _board = board
    for kind in (torch_fetch._MapDatasetFetcher, torch_fetch._IterableDatasetFetcher):
        if not hasattr(kind.fetch, "fettle"):
            kind.fetch = _timed(kind.fetch)  # type: ignore[method-assign]


def worker_init(board: Board, keep_memory: bool, own: Callable[[int], None] | None, number: int) -> None:
    """Each loader worker begins here: with fettle's watch and the setting, then the user's own `worker_init_fn`."""
    die_with_parent()
    install(board)
    if keep_memory:
        keep_freed_memory()
    # A batch that cannot be handed over (/dev/shm full) only prints in the queue's thread, and the loop waits for ever.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(_not_handed_over)  # type: ignore[attr-defined]
    if own is not None:
        own(number)


def summary(board: Board) -> dict[str, Any]:
    """Quantiles of the times kept, the shares of processor and kernel in them, and the pages that the kernel gave."""
    rows = board.read() or [(0.0,) * _ROW]
    walls = [row[0] for row in rows]
    whole = max(sum(walls), 1e-12)
    return {
        "fetch_p50_s": statistics.median(walls),
        "fetch_p95_s": nearest_rank(walls, 0.95),
        "fetch_p99_s": nearest_rank(walls, 0.99),
        "fetch_mean_s": sum(walls) / len(walls),
        "fetch_busy": sum(row[1] for row in rows) / whole,
        "fetch_system": sum(row[2] for row in rows) / whole,
        "fetch_pages": statistics.median(row[3] for row in rows),
    }


def _timed(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def fetch(self: Any, index: Any) -> Any:
        began, used = time.perf_counter(), _used()
        slow = getattr(self, "fettle_slow", True)
        queued = scheduled_s()[1] if slow else 0.0
        self.fettle_batches = getattr(self, "fettle_batches", 0) + 1
        try:
            batch = original(self, index)
        except (StopIteration, ItemError):
            raise
        except Exception as error:
            raise ItemError(_named(self, index, error)) from error
        if _board is not None:
            worker = get_worker_info()
            wall = time.perf_counter() - began
            busy, system, pages = (after - before for after, before in zip(_used(), used, strict=True))
            if slow:
                busy += scheduled_s()[1] - queued
            self.fettle_slow = wall > _SLOW_S
            _board.note(0 if worker is None else worker.id + 1, began, (wall, min(busy, wall), system, pages))
        return batch

    fetch.fettle = True  # type: ignore[attr-defined]
    return fetch


def _used() -> tuple[float, float, float]:
    """What this process used: seconds on processors, seconds of them in the kernel, and pages that the kernel gave."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return time.process_time(), used.ru_stime, float(used.ru_minflt)


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
        _board.set_error(f"a worker could not hand a batch over: {first_line(error)}")
    os._exit(1)
