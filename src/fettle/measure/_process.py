"""The parent's side of a worker: start it, ask it, stop it while others run, and be rid of it with its children."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from fettle.errors import UsageError
from fettle.measure._ranks import Gathering, free_ports, variables_of

if TYPE_CHECKING:
    from fettle.measure._nodes import Nodes

RESERVE = 0.04
"""Share of the machine's memory that must stay free: below it a worker that holds a quarter of all is ended as out of
memory, before the kernel ends whatever it likes. A small worker is not to blame for what others hold."""

_TICK_S = 0.5
"""How often whoever waits for an answer looks around."""
_WORD_S = 10.0
"""When a node leaves, the ranks that are left say so; where its ranks had not come yet, nobody would. Wait so long."""


class WorkerError(Exception):
    """A worker could not do what it was asked. The text is the reason, one line; `kind` is error, memory, timeout,
    crash or usage."""

    def __init__(self, reason: str, kind: str = "error") -> None:
        super().__init__(reason)
        self.kind = kind


class Worker:
    """One worker process, alive from construction to `close`. Use as a context manager.

    `module` is what it runs: it is given two file descriptors, and answers each line of JSON with one line of JSON.
    With several `ranks` it is the process that starts them (`fettle.measure._ranks`), and they are its children; of
    `nodes` each has an equal share of them.
    """

    def __init__(
        self, environment: Mapping[str, str] | None = None, log: Path | None = None, *,
        module: str = "fettle.measure._worker", ranks: int = 1, nodes: Nodes | None = None,
    ) -> None:  # fmt: skip
        # A large environment of its own, nothing inherited that a recipe might have set in the parent.
        variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._nodes = nodes if ranks > 1 else None
        self._gathering = _gathering(ranks, self._nodes) if ranks > 1 else None
        if self._gathering is not None:
            module = "fettle.measure._ranks"
            variables |= variables_of(self._gathering)
            if self._nodes is not None:
                self._nodes.begin(self._gathering, environment or {})
        variables |= environment or {}
        ask_read, ask_write = os.pipe()
        answer_read, answer_write = os.pipe()
        self._log = log.open("a+b") if log is not None else tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(ask_read), str(answer_write)],
            env=variables,
            pass_fds=(ask_read, answer_write),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # its own process group: stopped, continued and killed with its children
        )
        os.close(ask_read)
        os.close(answer_write)
        self._ask, self._answer = os.fdopen(ask_write, "wb", buffering=0), answer_read
        self._buffer = bytearray()
        self._stopped = False
        _LIVE.add(self)

    @property
    def pid(self) -> int:
        """Process id of the worker, which is its process group too."""
        return self._process.pid

    def ask(self, do: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises `WorkerError`, or `UsageError` for the user's own mistake.

        A worker that fails in any way but an ordinary exception is gone afterwards.
        """
        self.begin(do, **fields)
        return self.finish(do, timeout_s)

    def begin(self, do: str, **fields: Any) -> None:
        """Send a request without waiting: `finish` has its answer. So two workers can work side by side."""
        self.resume()
        try:
            self._ask.write(msgspec.json.encode({"do": do, **fields}) + b"\n")
        except OSError:
            raise self._ended() from None

    def finish(self, do: str, timeout_s: float) -> dict[str, Any]:
        """The answer to the request that was begun; raises what `ask` raises."""
        line = self._read_line(time.monotonic() + timeout_s, timeout_s, do)
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            if answer.get("trace"):
                self._log.write(str(answer["trace"]).encode())
                self._log.flush()
            if answer["kind"] == "usage":
                raise UsageError(answer["error"])
            raise WorkerError(answer["error"], answer["kind"])
        return answer

    def pause(self) -> None:
        """Stop the process group, so that it really idles: OpenMP threads spin for a while after their last work."""
        if not self._stopped:
            self._signal(signal.SIGSTOP)
            self._stopped = True

    def resume(self) -> None:
        """Let a paused worker go on."""
        if self._stopped:
            self._signal(signal.SIGCONT)
            self._stopped = False

    def resident_bytes(self) -> int:
        """Resident set of the worker and its children."""
        total = 0
        for process in _tree(self.pid):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def close(self) -> None:
        """Kill the worker with all its children. Safe to call again."""
        if self not in _LIVE:
            return
        _LIVE.discard(self)
        children = _tree(self.pid)  # before the kill: orphans are no longer found through their parent
        self._signal(signal.SIGKILL)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        self._process.wait()
        self._ask.close()
        os.close(self._answer)
        self._log.close()
        if self._nodes is not None and self._gathering is not None:
            self._nodes.end(self._gathering)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _signal(self, number: int) -> None:
        groups = {self.pid}
        if self._gathering is not None:  # torchrun's engine starts each rank in a session of its own
            for child in _tree(self.pid):
                with contextlib.suppress(OSError):
                    groups.add(os.getpgid(child.pid))
        for group in groups - {os.getpgid(0)}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)

    def _read_line(self, deadline: float, timeout_s: float, do: str) -> bytes:
        left_s = 0.0
        while True:
            end = self._buffer.find(b"\n")
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                return line
            left = deadline - time.monotonic()
            if left <= 0:
                self.close()
                raise WorkerError(f"timed out after {timeout_s:.0f} s in {do}", "timeout")
            ready, _, _ = select.select([self._answer], [], [], min(left, _TICK_S))
            if ready:
                data = os.read(self._answer, 1 << 16)
                if not data:
                    raise self._ended()
                self._buffer += data
            else:
                why = self._nodes.why_fewer() if self._nodes is not None else ""
                left_s = left_s + _TICK_S if why else 0.0
                if left_s > _WORD_S:
                    self.close()
                    raise UsageError(why)
                memory = psutil.virtual_memory()
                if memory.available < RESERVE * memory.total and (size := self.resident_bytes()) > memory.total / 4:
                    self.close()
                    raise WorkerError(f"out of memory: it held {size / 2**30:.1f} GiB in {do}", "memory")

    def _ended(self) -> WorkerError:
        """Say how the process came to its end."""
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        words = self._last_words()
        self.close()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            if name == "SIGKILL":
                return WorkerError("killed by SIGKILL, as the kernel does when memory runs out", "memory")
            return WorkerError(f"crashed with {name}{words}", "crash")
        return WorkerError(f"ended with exit code {code}{words}", "crash")

    def _last_words(self) -> str:
        try:
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, self._log.tell() - 4096))
            lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        except (OSError, ValueError):
            return ""
        return f": {lines[-1][:200]}" if lines else ""


def _gathering(ranks: int, nodes: Nodes | None) -> Gathering:
    host, count = (nodes.host, nodes.count) if nodes is not None else ("127.0.0.1", 1)
    store_port, port = free_ports(host, 2)
    return Gathering(secrets.token_hex(8), ranks // count, host, store_port, port, secrets.token_hex(16), count)


_LIVE: set[Worker] = set()


def close_all() -> None:
    """Kill every worker that is still alive: for an interrupt that comes from anywhere."""
    for worker in list(_LIVE):
        worker.close()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []
