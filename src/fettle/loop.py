"""The event loop: the fastest there is, and waiting in it for exact moments."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import signal
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_MONOTONIC, _ABSOLUTE = 1, 1
"""From Linux' time.h and sys/timerfd.h."""
_CLOSE_S = 20e-6
"""What is nearer than this is not worth a system call."""
_TIMERS_LATE_S = 0.0008
"""How late the event loops' own timers, which count milliseconds, may wake up late."""


_ENDING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""What people and systems end a program with."""


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. What Ctrl-C did before it does again afterwards."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.run(work)
    ours = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in _ENDING} if ours else {}
    try:
        made: T = uvloop.run(work)
    finally:  # uvloop leaves its own handlers behind, and nobody listens to them any more
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler or signal.SIG_DFL)
    return made


def stopped_by_interrupt() -> asyncio.Event:
    """An event that Ctrl-C, SIGTERM, and SIGHUP unless it is ignored, set from now on, in place of ending the
    program."""
    stop = asyncio.Event()
    for number in _ENDING:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


class _Time(ctypes.Structure):
    _fields_ = (("again_s", ctypes.c_long), ("again_ns", ctypes.c_long), ("s", ctypes.c_long), ("ns", ctypes.c_long))


class PreciseTimer:
    """Waits for moments of `time.perf_counter` without keeping a core busy. Close it.

    An event loop's timers are whole milliseconds. Linux has timers that are read like a file, which wake an idle core
    up to 0.3 ms late: so for the last `polled_s` of a wait the clock is asked again and again. A tenth of the usual
    wait keeps that cheap. Where there are no such timers it is the last millisecond.
    """

    def __init__(self, polled_s: float = 0.0003) -> None:
        self._polled_s = min(0.0003, polled_s)
        self._fd = -1
        self._came: asyncio.Future[None] | None = None
        self._when = _Time()
        with contextlib.suppress(OSError, AttributeError, TypeError):  # no such library, or none of its functions
            library = ctypes.CDLL(None)
            self._fd = library.timerfd_create(_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            self._set = functools.partial(library.timerfd_settime, self._fd, _ABSOLUTE, ctypes.byref(self._when), None)

    async def wait(self, moment_s: float) -> None:
        """Return at that moment, never before it."""
        loop = asyncio.get_running_loop()
        while (left_s := moment_s - time.perf_counter()) > 0:
            if self._fd < 0:
                await asyncio.sleep(left_s - _TIMERS_LATE_S if left_s > 0.001 else 0)
            elif left_s < self._polled_s + _CLOSE_S:
                await asyncio.sleep(0)
            else:
                if self._came is None:
                    loop.add_reader(self._fd, self._ring)
                self._came = loop.create_future()
                self._when.s, self._when.ns = divmod(int((moment_s - self._polled_s) * 1e9), 10**9)
                self._set()
                await self._came

    def close(self) -> None:
        """Give the timer back."""
        if self._fd >= 0:
            if self._came is not None:
                asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._fd, 8)
        if self._came is not None and not self._came.done():
            self._came.set_result(None)
