"""Connections from those who know a key: others are turned away, and silent ones delay no one.

Neither torchrun's rendezvous nor the c10d store under it can do this: anyone who reaches a `TCPStore` may read and
write all of it, as PyTorch's SECURITY.md says of all its distributed features (no authorization, by intent). So ranks
meet there as torchrun's do, but who may join, and what a node is told to run, comes through here.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge

from fettle.errors import refusing

_STRANGERS = 64
"""Handshakes under way at once; who comes above that is turned away."""
_HANDSHAKE_S = 10
"""How long a visitor may be silent before it has said that it knows the key."""


class KeyedListener:
    """Listens at an address. Close it."""

    def __init__(self, host: str, port: int, key: bytes) -> None:
        with refusing(f"cannot listen on {host}:{port}:", OSError):
            self._listener = Listener((host, port), backlog=_STRANGERS)
        self.address: tuple[str, int] = (host, int(self._listener.address[1]))
        self._key, self._closed = key, False
        self._met: queue.Queue[Connection | None] = queue.Queue()
        self._places = threading.Semaphore(_STRANGERS)
        threading.Thread(target=self._listen, daemon=True).start()

    def accept(self, timeout_s: float | None = None) -> Connection | None:
        """The next one who knows the key; None where no one came in time, or it was closed."""
        try:
            return self._met.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Accept no more connections, and end the waiting of `accept`."""
        self._closed = True
        self._met.put(None)
        with contextlib.suppress(OSError):  # the listener's own `accept` returns only for a visitor
            socket.create_connection(self.address, 1).close()
        self._listener.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                visitor = self._listener.accept()
            except OSError:
                continue
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._meet, args=(visitor,), daemon=True).start()
            else:
                visitor.close()

    def _meet(self, visitor: Connection) -> None:
        try:
            _limit_silence(visitor, _HANDSHAKE_S)
            deliver_challenge(visitor, self._key)
            answer_challenge(visitor, self._key)
            _limit_silence(visitor, 0)
        except Exception:  # a stranger: whatever it sent instead
            visitor.close()
        else:
            self._met.put(visitor)
        finally:
            self._places.release()


def _limit_silence(visitor: Connection, seconds: int) -> None:
    """Let reading fail after so many seconds without a byte; 0 for no limit."""
    with socket.socket(fileno=os.dup(visitor.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
