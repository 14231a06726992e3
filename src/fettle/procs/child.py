"""A child process that answers requests, one at a time, each within a deadline. Both go as MessagePack, which has
infinity and NaN."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fettle.errors import UsageError
from fettle.procs.limits import granted_memory_bytes, total_memory_bytes
from fettle.procs.process import Fork, Process, how_it_ended, open_standard_streams

if TYPE_CHECKING:
    from fettle.procs.forks import ForkServer

RESERVE = 0.04
"""Share of the memory granted here that must stay free: below it a child that holds a quarter of all is ended as out of
memory, before the kernel chooses a process to end. A small child is not the cause."""
TICK_S = 0.5
"""How often a wait for an answer is interrupted to look at the memory and the other nodes."""
_MEANT_TOO_S = 1.0
"""How soon this process is asked to end where whoever ended a child politely means both."""
_VARIABLES = {"KINETO_LOG_LEVEL": "99"}
"""The profiler writes to standard error otherwise, and the last line there is shown where a child has died."""
T = TypeVar("T")
_IMPORTED: ContextVar[str] = ContextVar("_IMPORTED", default="")
"""The user's file or module that is imported right now, for what it defines."""


@contextlib.contextmanager
def importing(location: str) -> Iterator[None]:
    """While a file or module of the user's is imported it may start no child: that one might import it as well, and so
    on without end."""
    before = _IMPORTED.set(location)
    try:
        yield
    finally:
        _IMPORTED.reset(before)


class ChildError(Exception):
    """A child could not do what it was asked. The text is the reason, one line; `kind` is error, memory, timeout,
    crash, or slow: it ended by itself, as it was asked to."""

    def __init__(self, reason: str, kind: str = "error") -> None:
        super().__init__(reason)
        self.kind = kind


class Request(msgspec.Struct, tag_field="do", tag=str.lower):
    """A request to a child, tagged with the name of its class."""


class Failure(msgspec.Struct):
    """Why there is no answer."""

    reason: str
    """One line."""
    kind: str = "error"
    """As a `ChildError`'s, or usage: the user's own mistake."""
    trace: str = ""
    """For the log."""


class Reply(msgspec.Struct, omit_defaults=True):
    """A reply of a child: an answer, a failure, or only the stage it is in."""

    answer: msgspec.Raw = msgspec.Raw(b"\xc0")
    failure: Failure | None = None
    stage: str = ""


class Child(Process):
    """A process that runs `module` and answers, alive from construction to `close`: a context manager.

    The module is given a file descriptor, on which `fettle.procs.parent` answers. `variables` are added to our
    environment. Where `forks` serves that, it is one of them, in which ``main(parent)`` of the module runs. Raises
    `UsageError` in a file that is only imported.
    """

    def __init__(
        self, module: str, *, variables: Mapping[str, str] | None = None, log: Path | None = None, python: str = "",
        forks: ForkServer | None = None,
    ) -> None:  # fmt: skip
        if file := os.path.basename(_IMPORTED.get()):
            raise UsageError(f"{file} calls fettle when it is imported: put the call under if __name__ == '__main__':")
        environment = environment_of(variables or {})
        can_fork = forks is not None and not python and forks.serves(environment)
        open_standard_streams()
        self.link, theirs = Pipe()

        def fork(log: int) -> Fork | None:
            return forks.fork(module, log, theirs.fileno()) if forks is not None and can_fork else None

        with theirs:
            super().__init__(
                ["-m", module, str(theirs.fileno())], pass_fds=(theirs.fileno(),), log=log, python=python,
                environment=environment, fork=fork,
            )  # fmt: skip
        self._doing = self._stage = ""

    def call(self, request: Request, answer: type[T], timeout_s: float) -> T:
        """Send a request and wait for its answer. Raises `ChildError`, or `UsageError` for the user's own mistake.

        A child that fails in any way but an ordinary exception is gone afterwards.
        """
        self.send(request)
        return self.receive(answer, timeout_s)

    def send(self, request: object) -> None:
        """Send a request without waiting: `receive` has its answer. So two children can work side by side."""
        self.resume()
        line = msgspec.msgpack.encode(request)
        self._doing, self._stage = what(line), ""
        try:
            self.link.send_bytes(line)
        except OSError:
            raise self._ended() from None

    def receive(self, answer: type[T], timeout_s: float) -> T:
        """The answer to the request that was sent; raises what `call` raises."""
        deadline = time.monotonic() + timeout_s
        while (reply := msgspec.msgpack.decode(self._next(deadline, timeout_s, self._doing), type=Reply)).stage:
            self._stage = reply.stage
        if reply.failure is None:
            return msgspec.msgpack.decode(reply.answer, type=answer)
        if reply.failure.trace and self._log is not None:
            self._log.write(reply.failure.trace.encode())
            self._log.flush()
        if reply.failure.kind == "usage":
            raise UsageError(reply.failure.reason)
        raise ChildError(reply.failure.reason, reply.failure.kind)

    def close(self) -> None:
        """Kill it with all its descendants. Safe to call again."""
        super().close()
        self.link.close()

    def _next(self, deadline: float, timeout_s: float, doing: str) -> bytes:
        left_s = math.inf
        while left_s > 0:
            left_s = deadline - time.monotonic()
            try:
                # Once more after the deadline: it may have answered while this process was stopped.
                if self.link.poll(max(0.0, min(left_s, TICK_S))):
                    return self.link.recv_bytes()
                has_ended = self.wait(0) is not None and not self.link.poll()  # what it has started may hold the link
            except (EOFError, OSError):
                has_ended = True
            if has_ended:
                raise self._ended()
            self._look_around()
        self.close()
        where = f": {self._stage}" if self._stage else ""
        raise ChildError(f"timed out after {timeout_s:.0f} s in {doing}{where}", "timeout")

    def _look_around(self) -> None:
        """Called while an answer is awaited; raises where it will not come."""
        total = total_memory_bytes()
        if granted_memory_bytes() < RESERVE * total and (size := self.resident_bytes()) > total / 4:
            self.close()
            raise ChildError(f"out of memory: it held {size / 2**30:.1f} GiB in {self._doing}", "memory")

    def _ended(self) -> ChildError:
        code = self.wait(5)
        if code == -signal.SIGTERM:  # a cluster sends it to a whole job: then we get it too, and no child failed
            time.sleep(_MEANT_TOO_S)
        words = self.last_words()[:200]
        self.close()
        if code is None:
            return ChildError(f"it does not answer any more in {self._doing}", "crash")
        return ChildError(how_it_ended(code) + (f": {words}" if words else ""), "memory" if code == -9 else "crash")


def environment_of(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child with these variables beside ours."""
    return {**_VARIABLES, **os.environ, "PYTHONUNBUFFERED": "1", **variables}


def what(request: bytes) -> str:
    """What a request asks for."""
    return str(msgspec.msgpack.decode(request)["do"])


def replied(answer: Any) -> Reply:
    """A reply that is an answer."""
    return Reply(msgspec.Raw(msgspec.msgpack.encode(answer)))
