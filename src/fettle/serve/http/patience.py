"""A limit on how long requests may wait for their bodies that costs next to nothing where they do not."""

from __future__ import annotations

import asyncio
from typing import Any


class Patience:
    """Ends tasks that wait for too long, counted in eighths of it: nothing is timed or scheduled for each of them."""

    def __init__(self, seconds: float) -> None:
        self._tick_s = seconds / 8
        self._tick = 0
        self._waiting: dict[asyncio.Task[Any], int] = {}
        self._late: set[asyncio.Task[Any]] = set()
        self._armed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> asyncio.Task[Any]:
        """The current task begins to wait."""
        loop = self._loop = self._loop or asyncio.get_running_loop()  # asking each time costs a system call in 3.11
        task = asyncio.current_task(loop)
        assert task is not None
        self._waiting[task] = self._tick
        if not self._armed:
            self._armed = True
            loop.call_later(self._tick_s, self._turn)
        return task

    def end(self, task: asyncio.Task[Any]) -> bool:
        """It waits no longer. True where it was cancelled for having waited too long."""
        self._waiting.pop(task, None)
        if task not in self._late:
            return False
        self._late.discard(task)
        return True

    def _turn(self) -> None:
        self._tick += 1
        for task, since in list(self._waiting.items()):
            if self._tick - since > 8:
                del self._waiting[task]
                self._late.add(task)
                task.cancel()
        self._armed = bool(self._waiting)
        if self._armed:
            asyncio.get_running_loop().call_later(self._tick_s, self._turn)
