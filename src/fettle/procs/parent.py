"""The child's side: what a process of fettle's does first, and how it answers its parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec

from fettle.errors import UsageError, first_line
from fettle.procs.child import Failure, Reply, replied

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


def be_a_worker() -> None:
    """End with the parent, and what is forked here with this process; leave Ctrl-C to it, and show no warnings.

    Workers of a loader look for their parent too, but not while they are stopped with it (`Process.pause`). What is
    started by `subprocess` goes without: no hook runs there.
    """
    die_with_parent()
    main = threading.get_ident()

    def after_fork() -> None:
        if threading.get_ident() == main:  # the signal comes when the forking thread ends, as others may
            die_with_parent()

    os.register_at_fork(after_in_child=after_fork)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.filterwarnings("ignore")


def die_with_parent(number: signal.Signals = signal.SIGKILL, pipe: int | None = None) -> None:
    """Have the kernel send this signal when the parent ends, even while this process is stopped (Linux).

    A parent that ended before the kernel was asked goes unnoticed. `pipe` is a descriptor whose other end only the
    parent holds: where that is closed already, this process ends at once. Needed where it is not read soon.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, number)
    if pipe is not None:
        hung_up = select.poll()
        hung_up.register(pipe, 0)  # a hang-up is reported without being asked for
        if hung_up.poll(0):
            os._exit(0)


def failure_of(error: BaseException) -> Failure:
    """An error as the parent will show it."""
    is_usage = isinstance(error, UsageError)
    cause = (error.__cause__ or error) if is_usage else error  # a factory may fail for what else holds the memory
    text = first_line(cause)[:400]
    full = any(words in text.lower() for words in ("out of memory", "_alloc_failed"))  # so CUDA's libraries
    if full or isinstance(cause, MemoryError) or "can't allocate memory" in str(cause):
        return Failure(f"out of memory: {text}", "memory")
    return Failure(str(error), "usage") if is_usage else Failure(text)


class Parent:
    """The process that asks this one: it sends requests and gets one reply to each.

    Without a link it is the process that started us as a `fettle.procs.child.Child`, with an argument that the user's
    code does not find. Of several nodes the first is 0. `imported_s` is what our imports took, where we are a fork of a
    process that had made them.
    """

    def __init__(self, link: Connection | None = None, node: int = 0, imported_s: float = 0.0) -> None:
        self.link = link if link is not None else Connection(int(sys.argv.pop(1)))
        self.node, self.imported_s = node, imported_s

    def requests(self) -> Iterator[bytes]:
        """Requests as they come, until the parent has gone."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                yield self.link.recv_bytes()

    def send(self, reply: Reply) -> None:
        """Reply to the last request."""
        self.link.send_bytes(msgspec.msgpack.encode(reply))

    def stage(self, name: str) -> None:
        """Report the current stage, so that it is known where this process hung or died."""
        self.send(Reply(stage=name))

    def serve(
        self, request: Any, answer: Callable[[Any], object], explain: Callable[[BaseException], Failure] = failure_of
    ) -> NoReturn:
        """Answer requests of this type until the parent goes, then end. An exception is answered as a failure."""
        for line in self.requests():
            try:
                reply = replied(answer(msgspec.msgpack.decode(line, type=request)))
            except (Exception, SystemExit) as error:
                reply = Reply(failure=explain(error))
            self.send(reply)
        os._exit(0)  # no atexit of compilers and runtimes: nothing here is worth waiting for
