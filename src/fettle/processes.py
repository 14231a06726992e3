"""What processes that fettle starts do first."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import warnings

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def be_a_worker() -> None:
    """End with the parent, leave Ctrl-C to it, and keep warnings for oneself."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.filterwarnings("ignore")


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this signal when the parent ends, even while this process is stopped (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)
