"""Before all others for the length of a slice, where the system lets us: what a neighbour would take is then small.
Before most others while a recipe is made ready, whose first calls may take nine times as long beside a neighbour.

A process group is given the highest priority that is not a real-time one, and so is its session where the kernel groups
tasks by session (sched(7), "The autogroup feature"): without that, priority counts only within a session. Nobody is
stopped by it: others go on on all cores that are free, and between the slices.
"""

from __future__ import annotations

import contextlib
import os
from functools import lru_cache
from pathlib import Path

READY, HIGHEST = -5, -20
"""Niceness: while a worker is made ready and waits, while a slice is timed."""


@lru_cache(maxsize=1)
def may_go_first() -> bool:
    """Whether this process may raise a priority: root and whoever has CAP_SYS_NICE may."""
    try:
        usual = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, usual - 1)
        os.setpriority(os.PRIO_PROCESS, 0, usual)
    except (OSError, AttributeError):
        return False
    return True


def prefer(group: int, niceness: int) -> None:
    """Give the processes of this group, which leads its session, and that session a niceness; nothing where that is not
    allowed."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, group, niceness)
    with contextlib.suppress(OSError):
        Path(f"/proc/{group}/autogroup").write_text(str(niceness))
