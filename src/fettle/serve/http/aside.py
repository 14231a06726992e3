"""Reading large bodies in a thread of its own, so that the event loop answers other requests meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE = 256 << 10
"""Bytes of a body that is read in the thread; fewer are read before another thread could have begun."""
_Read = TypeVar("_Read")
_thread = ThreadPoolExecutor(1, "fettle-bodies")
"""One for all: Python runs one thread at a time, and what is being read takes many times a body's memory."""


async def aside(size: int, read: Callable[[], _Read]) -> _Read:
    """What `read` makes of a body that is, or may become, of so many bytes."""
    if size < LARGE:
        return read()
    return await asyncio.get_running_loop().run_in_executor(_thread, read)
