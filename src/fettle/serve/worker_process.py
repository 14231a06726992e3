"""One worker process, from its start to its end: spawned with a clean environment, spoken to in frames."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from fettle.serve import wire

_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD")
_ENVIRONMENT_PREFIXES = ("OMP_", "KMP_", "MKL_", "GOMP_", "PYTHON", "TORCH", "TRITON_", "CUDA_", "NVIDIA_", "XDG_")
"""What a worker inherits. Tokens and passwords in the server's environment are none of its business."""


class WorkerProcess(asyncio.Protocol):
    """A process that runs `_worker`, and our end of the socket pair to it.

    `hear(header, body)` is called for each of its messages, `lost(why)` once when it has gone or speaks nonsense.
    """

    def __init__(self, hear: Callable[[wire.FromWorker, memoryview], None], lost: Callable[[str], None]) -> None:
        self._hear, self._lost = hear, lost
        self._frames = wire.Frames(wire.from_worker)
        self._process: subprocess.Popen[bytes] | None = None
        self._transport: asyncio.Transport | None = None
        self._memory: mmap.mmap | None = None
        self._ended = False

    async def start(self, threads: int, log_path: str | None) -> None:
        """Spawn it. What it prints goes to the end of `log_path`, else where ours goes."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        shared = wire.shared_memory()
        given = [theirs.fileno()]
        if shared is not None:
            given.append(shared[0])
            self._memory = shared[1]
        log_file: Any = open(log_path, "ab") if log_path else None  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fettle.serve._worker", *map(str, given)],
                pass_fds=given, env=_environment(threads), stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file,
                start_new_session=True,
            )  # fmt: skip
        finally:
            theirs.close()
            if shared is not None:
                os.close(shared[0])
            if log_file is not None:
                log_file.close()
        self._transport, _ = await asyncio.get_running_loop().create_connection(lambda: self, sock=ours)

    @property
    def pid(self) -> int:
        """0 before it was started."""
        return self._process.pid if self._process is not None else 0

    @property
    def shares_memory(self) -> bool:
        """Whether large bodies need not go through the socket."""
        return self._memory is not None

    def write(self, header: wire.ToWorker, body: Sequence[Any] = ()) -> None:
        """Send one message: a header, and buffers that follow it."""
        assert self._transport is not None
        size = sum(len(part) for part in body)
        if self._memory is not None and wire.SHARED_FROM <= size <= wire.SHARED_BYTES:
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
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, 9)
            self._process.wait()

    # -- what asyncio calls ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Hand on every message that is whole."""
        try:
            for header, body in self._frames.feed(data):
                self._hear(header, body)
                if self._ended:
                    return
        except wire.Nonsense:
            self._lost("spoke nonsense")

    def connection_lost(self, error: Exception | None) -> None:
        """The process has ended, or we ended it."""
        if not self._ended:
            self._lost("ended")


def _environment(threads: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }
    return {**kept, "OMP_NUM_THREADS": str(threads)}
