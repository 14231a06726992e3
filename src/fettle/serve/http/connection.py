"""What is ours between uvicorn and the socket: an answer in one write, and an end to connections that say nothing."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fettle.serve.alarm import Alarm

MAX_HEAD = 64 << 10
"""Bytes of a request that are not its body: first line, headers, a chunk's size, what follows the last chunk."""


class Protocol(HttpToolsProtocol):
    """uvicorn's HTTP with three differences.

    An answer of one piece is one write: a system call and a wake-up of the client less. And a connection on which no
    request is under way is closed after `timeout_keep_alive` also before its first request and in the middle of its
    headers, where uvicorn waits for ever; the alarm for that is moved with each request, which costs no timer.
    And headers are bounded, in number and length: uvicorn would keep all that a client sends.
    """

    _head_bytes = 0
    """Received since the last part of a request that was whole."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client connected."""
        super().connection_made(_OneWrite(transport))  # type: ignore[arg-type]
        self._idle = Alarm(self.timeout_keep_alive_handler)
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        """Bytes of a client."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")

    def on_headers_complete(self) -> None:
        """A request has begun: its body has limits of its own."""
        self._head_bytes = 0
        self._idle.set(math.inf, self.loop)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of a body."""
        self._head_bytes -= len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """The size of a chunk: a body may have many."""
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._head_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is out: the next request of this connection, or a wait for one."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        else:
            self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._idle.clear()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        self._idle.set(time.perf_counter() + self.timeout_keep_alive, self.loop)


class _OneWrite:
    """A transport that holds the head of an answer back until its body comes, or the event loop turns."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head = b""
        self._call_soon = asyncio.get_running_loop().call_soon

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._call_soon(self._flush)
            return
        self._transport.write(data)

    def _flush(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
