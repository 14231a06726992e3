"""Time that a call does not compute: the garbage collector, sleeping, DataLoaders; and the call without the last."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

from fettle.diagnose.collectors.variants import threads, timed
from fettle.diagnose.evidence import Loading
from fettle.patches import replaced
from fettle.procs.limits import scheduled_s
from fettle.workload import again, leaves, size_bytes

_KEPT_BYTES = 512 << 20
_LEAST_WATCHED_S = 0.2


class LoaderClock:
    """Times DataLoaders of this process while it is entered: making an iterator, and each batch.

    The batches of the first call are kept, in the order of their iterators, unless they are too large.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = self.rows = self.batches = 0
        self.kept: list[list[Any]] = []
        self._bytes = 0
        self._inside = False
        self._patches = ExitStack()

    def __enter__(self) -> LoaderClock:
        self._patches.enter_context(replaced(DataLoader, "__iter__", self._clocked))
        self._patches.enter_context(replaced(_BaseDataLoaderIter, "__next__", self._clocked))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def _clocked(self, original: Any) -> Any:
        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a loader that reads another one
                return original(*args, **kwargs)
            self._inside, began = True, time.perf_counter()
            try:
                result = original(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - began
            self._keep(args[0], result)
            return result

        return timed

    def _keep(self, loader: Any, result: Any) -> None:
        if isinstance(loader, DataLoader):
            self.rows = min(self.rows or sys.maxsize, loader.batch_size or sys.maxsize) % sys.maxsize
            if self.calls == 1:
                self.kept.append([])
            return
        self.batches += 1
        if self.calls == 1 and self.kept:
            self._bytes += sum(size_bytes(leaf) or sys.getsizeof(leaf) for _, leaf in leaves(result))
            if self._bytes > _KEPT_BYTES:
                self.kept.clear()
            else:
                self.kept[-1].append(again(result))


def waiting(
    call: Callable[[], Any], wall_s: float, device: str = "cpu", least: int = 3
) -> tuple[float, float, Loading]:
    """Seconds a call in the garbage collector, and asleep of the process's own will; and what its DataLoaders take.

    With one thread: threads that wait for each other would look asleep. Where loaders take more than 2% of `wall_s`,
    the call is tried with their batches at hand.
    """
    pauses: dict[int, list[float]] = defaultdict(list)
    began = 0.0

    def note(phase: str, info: dict[str, Any]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        else:
            pauses[info["generation"]].append(time.perf_counter() - began)

    blocked = 0.0
    clock = LoaderClock()
    with threads(1), ExitStack() as watched:
        call()
        gc.callbacks.append(note)
        watched.callback(gc.callbacks.remove, note)
        before, started = _run_and_wait_s(), time.perf_counter()
        with clock:
            while clock.calls < least or (time.perf_counter() - started < _LEAST_WATCHED_S and clock.calls < 500):
                clock.calls += 1
                call()
        # The main thread was neither on a core nor waiting for one: it slept. The system counts in ticks.
        wall, after = time.perf_counter() - started, _run_and_wait_s()
        if before and wall > _LEAST_WATCHED_S / 4:  # shorter than some ticks
            blocked = max(0.0, wall - (after - before))
    loader_s = clock.seconds / clock.calls
    at_hand_s = _at_hand(call, clock, device) if loader_s > 0.02 * wall_s else 0.0
    loading = Loading(loader_s, clock.rows, clock.batches // clock.calls, at_hand_s)
    # One collection says nothing of how often they come: a full one may take longer than all these calls.
    collecting = sum(sum(spans) for spans in pauses.values() if len(spans) > 1)
    return collecting / clock.calls, blocked / clock.calls, loading


def _at_hand(call: Callable[[], Any], clock: LoaderClock, device: str) -> float:
    """Seconds of a call whose loaders hand out at once what they handed out before; 0 where that cannot be tried."""
    if not any(clock.kept):
        return 0.0
    turns = itertools.cycle(clock.kept)
    with replaced(DataLoader, "__iter__", lambda _: lambda loader: map(again, next(turns))):
        return min(timed(call, device, 0.0, least=5))


def crowded(before: tuple[float, float]) -> float:
    """The share of the time in which threads of this process ran or could have run, since `all_threads_s` said
    `before`, in which they had no core."""
    ran, waited = (max(0.0, now - then) for now, then in zip(all_threads_s(), before, strict=True))
    return waited / max(ran + waited, 1e-9)


def all_threads_s() -> tuple[float, float]:
    """Seconds that the threads of this process ran, and that they waited for a core (Linux; else 0)."""
    threads = [scheduled_s(path) for path in Path("/proc/self/task").glob("*/schedstat")]
    return sum(ran for ran, _ in threads), sum(waited for _, waited in threads)


def _run_and_wait_s() -> float:
    """Seconds that this thread ran or waited for a core (Linux); 0 where the system does not say."""
    return sum(scheduled_s())
