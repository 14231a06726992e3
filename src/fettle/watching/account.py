"""The running account of a watched loop."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fettle.errors import UsageError
from fettle.estimates import nearest_rank
from fettle.watching.report import SlowStep, StepReport
from fettle.watching.slow import Sampler, hottest, numbered, write_samples

Part = Literal["data", "sync"]
_KEPT_STEPS = 100_000
"""The last steps, of which median and percentile are."""
_MOST_SLOW = 20
"""Slow steps that are kept; more of them are no longer looked at."""
_FEWEST_FOR_SLOW = 10
_RENEW = 16


@dataclass
class Steps:
    """The running account, given to the body of `watch`. Times are nanoseconds of `perf_counter_ns`.

    What runs at every step finds the caches full of the loop's own data, so it is kept to a few plain integers.
    """

    slow_trace: Path | None = None
    slow_factor: float = 2.0
    report: StepReport | None = None
    """Set when the block ends."""
    _walls: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    _wall: int = 0
    _data: int = 0
    _sync: int = 0
    _gc: int = 0
    _before: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Data, sync, gc and how many syncs, when the step began."""
    _count: int = 0
    _first_wall: int = 0
    """What the first step took, once a few have ended."""
    _syncs: int = 0
    _started: int = 0
    _in: Part | None = None
    _slow_ns: float = math.inf
    """From how long on a step is slow; looked at anew every `_RENEW` steps."""
    _slow: list[SlowStep] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)
    _sampler: Sampler | None = None
    _on_gpu: bool = False
    _gc_started: int = 0
    _said: bool = False
    """Whether the loop says where its steps end: loaders end none then."""
    _first: weakref.ref[Any] | None = None
    """The loader's iterator with whose first batch the first step began."""

    def __repr__(self) -> str:
        return str(self.report or self.summary())

    def step(self) -> None:
        """The step ends here and the next begins. From the first call on, and for what came before it, a loader that is
        asked for the next batch ends none."""
        now = time.perf_counter_ns()
        if not self._said:
            self._said = True
            self._merge()
        self._end(now)

    def _end(self, now: int) -> None:
        if not self._started:
            self._started = now
            return
        wall, self._started = now - self._started, now
        self._walls.append(wall)
        self._wall += wall
        self._count += 1
        if wall > self._slow_ns and len(self._slow) < _MOST_SLOW:
            self._note_slow(wall)
        self._before = (self._data, self._sync, self._gc, self._syncs)
        if self._count % _RENEW == 0 or self._count == _FEWEST_FOR_SLOW + 1:
            self._first_wall = self._first_wall or self._walls[0]  # `_walls` drops it in a long loop
            self._slow_ns = self.slow_factor * self._median()

    @contextlib.contextmanager
    def waiting(self, part: Part) -> Iterator[None]:
        """What runs inside counts as `part`; inside another part, it stays that part's."""
        if self._in is not None or threading.get_ident() != self._thread:
            yield
            return
        self._in, started, collecting = part, time.perf_counter_ns(), self._gc
        try:
            yield
        finally:
            self._in = None
            spent = time.perf_counter_ns() - started - (self._gc - collecting)
            if part == "data":
                self._data += spent
            else:
                self._sync += spent

    def summary(self, device_idle: float | None = None) -> StepReport:
        """The account so far, with what NVML says of the device."""
        # What went on since the last step's end belongs to no step.
        data, sync, collecting, syncs = self._before
        first = self._first_wall or (self._walls[0] if self._walls else 0)
        walls = list(itertools.islice(self._walls, self._count <= _KEPT_STEPS, None)) or [first]
        return StepReport(
            steps=self._count,
            wall_s=self._wall / 1e9,
            data_s=data / 1e9,
            sync_s=sync / 1e9,
            gc_s=collecting / 1e9,
            host_s=(self._wall - data - sync - collecting) / 1e9,
            median_ms=statistics.median(walls) / 1e6,
            p95_ms=nearest_rank(walls, 0.95) / 1e6,
            first_ms=first / 1e6,
            syncs_per_step=syncs / self._count if self._on_gpu and self._count else None,
            device_idle=device_idle,
            data_bound=self._wall / max(1, self._wall - data) if self._wall else 1.0,
            slow=tuple(self._slow),
        )

    def _begin_again(self, now: int) -> None:
        """Forget what was before the first step, which begins at `now`."""
        self._started, self._before = now, (0, 0, 0, 0)
        self._data = self._sync = self._gc = self._syncs = 0

    def _merge(self) -> None:
        """What loaders took for steps so far is part of the one that goes on."""
        self._slow_ns = math.inf
        self._started -= self._wall
        self._wall = self._count = self._first_wall = 0
        self._before = (0, 0, 0, 0)
        self._walls.clear()
        self._slow.clear()

    def _median(self) -> float:
        """Median of the last 51 steps, without the very first; infinite while there are too few."""
        last = min(51, self._count - 1)
        recent = [self._walls[-number] for number in range(1, last + 1)]
        return statistics.median(recent) if last >= _FEWEST_FOR_SLOW else math.inf

    def _lateness(self) -> tuple[int, float]:
        """How many steps have ended, and for how long the one that goes on has been a slow one; below 0 it is none."""
        if len(self._slow) >= _MOST_SLOW:
            return self._count, -math.inf
        return self._count, time.perf_counter_ns() - self._started - self._slow_ns

    def _note_slow(self, wall: int) -> None:
        now = zip(("data", "sync", "gc"), (self._data, self._sync, self._gc), self._before[:3], strict=True)
        parts = {name: after - before for name, after, before in now}
        parts["host"] = wall - sum(parts.values())
        samples = self._sampler.of(self._count - 1) if self._sampler else []
        path = line = None
        if samples and self.slow_trace is not None:
            target = numbered(self.slow_trace, self._count) if self._slow else self.slow_trace
            line = hottest(samples)
            with contextlib.suppress(UsageError):  # the loop goes on where the disk is full
                write_samples(target, samples, self._count)
                path = str(target)
        median = self._slow_ns / self.slow_factor / 1e6
        largest = max(parts, key=lambda key: parts[key])
        self._slow.append(SlowStep(self._count, wall / 1e6, median, largest, path, line))

    def _collected(self, phase: str, info: Any) -> None:
        # Callbacks run in whichever thread set the collector off; only the loop's own thread is held up in its account.
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._gc_started = time.perf_counter_ns()
        elif self._gc_started:
            self._gc += time.perf_counter_ns() - self._gc_started
            self._gc_started = 0
