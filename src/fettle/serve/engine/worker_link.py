"""The server's end of the link to one worker process: frames out, messages in, and the end of both."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Sequence
from typing import Any

from fettle.procs.process import Process, how_it_ended
from fettle.serve.engine import wire
from fettle.serve.engine.worker_start import SHARED_BYTES, Spawned

_SOON_S = 0.1
"""After its end of the socket pair is closed."""


class WorkerLink(asyncio.Protocol):
    """A process that runs `worker_main`, and our end of the socket pair to it.

    `on_message(header, body)` is called for each of its messages, `on_lost(why)` once: when it has gone, or sends
    what is not a message, for which asyncio closes the connection.
    """

    def __init__(
        self, on_message: Callable[[wire.FromWorker, memoryview], None], on_lost: Callable[[str], None]
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._frames = wire.Frames()
        self._process: Process | None = None
        self._transport: asyncio.Transport | None = None
        self._memory: mmap.mmap | None = None
        self._ended = False

    async def start(self, spawned: Spawned) -> None:
        """Speak with this process from now on."""
        self._process, self._memory = spawned.process, spawned.memory
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=spawned.link)

    @property
    def pid(self) -> int:
        """0 before it was started."""
        return self._process.pid if self._process is not None else 0

    @property
    def how_it_ended(self) -> str:
        """In words, of a process that has ended by itself."""
        code = self._process.wait(_SOON_S) if self._process is not None else None
        return "ended" if code is None else how_it_ended(code)

    def write(self, header: wire.ToWorker, body: Sequence[Any] = ()) -> None:
        """Send one message: a header, and buffers that follow it."""
        assert self._transport is not None
        size = sum(map(len, body))
        # Several texts may be on their way at once, and the memory holds one body.
        fits = wire.SHARED_FROM <= size <= SHARED_BYTES and not isinstance(header, wire.Generate)
        if self._memory is not None and fits:
            self._transport.write(wire.shared_frame(header, body, self._memory))
        else:
            self._transport.writelines(wire.frame(header, body))

    def end(self) -> None:
        """Kill it and its children; nothing is heard of it any more."""
        self._ended = True
        if self._transport is not None:
            self._transport.abort()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._process is not None:
            self._process.close_group()  # in the event loop, which answers other requests

    # -- what asyncio calls ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        for header, body in self._frames.feed(data):
            self._on_message(header, body)
            if self._ended:
                return

    def connection_lost(self, error: Exception | None) -> None:
        """The process has ended, or we ended it."""
        if not self._ended:
            self._on_lost("ended")
