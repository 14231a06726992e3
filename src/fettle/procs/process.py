"""A process that fettle starts, with all that it starts in turn.

Only the standard library is imported at once: a server starts its first worker before it imports anything else.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Self

from fettle.procs.limits import unbound

if TYPE_CHECKING:
    import psutil


class Fork:
    """A process that another one has forked and writes the exit code of to a pipe, whose other end is `ended`; with
    what is used of `subprocess.Popen`."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid, self._ended = pid, ended
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired` where it has not ended after `timeout` seconds."""
        if self.returncode is None:
            written = select.poll()
            written.register(self._ended, select.POLLIN)
            if not written.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            # Nothing is written where the process that forked it was killed, which kills the fork as well.
            self.returncode = int(os.read(self._ended, 16) or -signal.SIGKILL)
            os.close(self._ended)
        return self.returncode


class Process:
    """Python with these arguments, in a session of its own, alive from construction to `close`: a context manager.

    What it prints goes to the end of `log`, else to an unnamed file, for its last line; with `shows` to where ours
    goes. `environment` is all that it inherits, ours where it is None; `python` the interpreter, ours where it is
    empty. With `fork` it is what that gives for the descriptor of its log, if anything. Raises OSError where none can
    be had.
    """

    def __init__(
        self, arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, pass_fds: Sequence[int] = (),
        log: Path | str | None = None, shows: bool = False, python: str = "",
        fork: Callable[[int], Fork | None] | None = None,
    ) -> None:  # fmt: skip
        self._log = None if shows else _opened(log)
        self._log_start = self._log.tell() if self._log is not None else 0
        try:
            forked = fork(self._log.fileno()) if fork is not None and self._log is not None else None
            with unbound():
                self._process = forked or subprocess.Popen(
                    [python or sys.executable, *arguments], env=environment, pass_fds=pass_fds,
                    stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                    start_new_session=True,  # its own process group: stopped, continued and killed with its children
                )  # fmt: skip
        except BaseException:
            if self._log is not None:
                self._log.close()
            raise
        self._paused = self._killed = self._closed = False

    @property
    def pid(self) -> int:
        """Process id, which is that of its process group too."""
        return self._process.pid

    @property
    def is_fork(self) -> bool:
        """Whether it began as a fork."""
        return isinstance(self._process, Fork)

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None where it has not ended or was not waited for."""
        return self._process.returncode

    def wait(self, timeout_s: float | None = None) -> int | None:
        """The exit code; None where it has not ended in that time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def pause(self) -> None:
        """Stop the process group, so that it really idles: OpenMP threads spin for a while after their last work."""
        if not self._paused:
            self._signal(signal.SIGSTOP, self._groups())
            self._paused = True

    def resume(self) -> None:
        """Let it go on where it was paused."""
        if self._paused:
            self._signal(signal.SIGCONT, self._groups())
            self._paused = False

    def tree(self) -> list[psutil.Process]:
        """The process and all its descendants, as far as they are alive."""
        import psutil

        try:
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def resident_bytes(self) -> int:
        """Resident set of the process and its descendants."""
        import psutil

        total = 0
        for process in self.tree():
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def printed(self, most: int = 4096) -> str:
        """The end of what it has printed, at most so many bytes; empty where that went elsewhere."""
        if self._log is None:
            return ""
        try:
            self._log.seek(0, os.SEEK_END)
            self._log.seek(max(self._log_start, self._log.tell() - most))
            return self._log.read().decode(errors="replace")
        except (OSError, ValueError):  # closed
            return ""

    def last_words(self) -> str:
        """The last line that it has printed."""
        lines = [line.strip() for line in self.printed().splitlines() if line.strip()]
        return lines[-1][:400] if lines else ""

    def kill(self, *, whole_tree: bool = True) -> None:
        """Kill its process group and all its descendants, whose end `close` waits for."""
        if self._killed:
            return
        self._killed = True
        # Before the kill: orphans are no longer found through their parent.
        tree = self.tree() if whole_tree and self.wait(0) is None else []
        self._signal(signal.SIGKILL, {self.pid})
        for process in tree:
            with contextlib.suppress(Exception):  # psutil's own: it has ended
                process.kill()

    def close(self) -> None:
        """Kill it with all its descendants. Safe to call again."""
        self.kill()
        self._closed = True
        self._process.wait()
        if self._log is not None:
            self._log.close()

    def close_group(self) -> None:
        """Kill it with its process group only, for where there is no time to look at every process of the machine."""
        self.kill(whole_tree=False)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _groups(self) -> set[int]:
        return {self.pid}

    def _signal(self, number: int, groups: Iterable[int]) -> None:
        for group in groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)


def open_standard_streams() -> None:
    """Have those of descriptors 0 to 2 that are closed, as in some daemons, lead nowhere: a pipe that took the place of
    one would be closed to the child that it is for."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(opened)


def how_it_ended(code: int) -> str:
    """In words: ``ended with exit code 1``, ``was ended by SIGSEGV``."""
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, as the kernel does when memory runs out (leave it more, or use smaller batches)"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _opened(log: Path | str | None) -> IO[bytes]:
    if log is not None:
        return open(log, "a+b")
    import tempfile

    return tempfile.TemporaryFile()
