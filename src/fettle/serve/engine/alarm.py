"""A timer for moments that are moved far more often than they come."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable


class Alarm:
    """Rings once at the moment that was set last. Moving it to a later one costs no timer.

    The event loop's timer stays where it is, and on waking looks whether the moment has come. Moments are those of
    `time.perf_counter`.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._moment_s = math.inf
        self._timer_s = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, moment_s: float, loop: asyncio.AbstractEventLoop) -> None:
        """Ring then, and not before; never at `math.inf`."""
        self._moment_s = moment_s
        if moment_s < self._timer_s:
            self._arm(loop)

    def clear(self) -> None:
        self._moment_s = self._timer_s = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._moment_s
        self._timer = loop.call_later(max(0.0, self._moment_s - time.perf_counter()), self._woken, loop)

    def _woken(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer, self._timer_s = None, math.inf
        if self._moment_s > time.perf_counter() + 1e-3:  # timers may be a little early
            if self._moment_s < math.inf:
                self._arm(loop)
            return
        self._moment_s = math.inf
        self._ring()
