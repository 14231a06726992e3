"""Reading and writing large bodies in a thread of its own, so that the event loop answers other requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE = 256 << 10
"""Bytes from which on it is the thread's work; fewer are done with before another thread could have begun."""
_Made = TypeVar("_Made")
_thread = ThreadPoolExecutor(1, "fettle-bodies")
"""One for all: Python runs one thread at a time, and a body takes many times its memory meanwhile."""


async def aside(size: int, work: Callable[[], _Made]) -> _Made:
    """What `work` makes of, or for, a body of about so many bytes."""
    if size < LARGE:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_thread, work)
