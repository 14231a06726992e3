"""What processes that fettle starts do first."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import warnings

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def be_a_worker() -> None:
    """End with the parent, leave Ctrl-C to it, and keep warnings for oneself."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.filterwarnings("ignore")


def die_with_parent(number: signal.Signals = signal.SIGKILL, pipe: int | None = None) -> None:
    """Have the kernel send this signal when the parent ends, even while this process is stopped (Linux).

    A parent that ended before the kernel was asked is not heard of. `pipe` is a descriptor whose other end only the
    parent holds: where that is closed already, this process ends at once. Needed by whoever does not read it soon.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)
    if pipe is not None:
        hung_up = select.poll()
        hung_up.register(pipe, 0)  # the end of the other side is told without being asked for
        if hung_up.poll(0):
            os._exit(0)
