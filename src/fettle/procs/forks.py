"""Children that begin as forks of a process which has imported what they need.

Importing torch takes a second of a child's start, transformers three more: a study pays that in each of dozens. A fork
server imports once, runs nothing else, and has one thread when it forks, so that a fork is what a process is after its
imports. Only Linux has them; where the imports start threads or find an accelerator, whose context no fork can use,
there are none either, and children start by themselves.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from types import ModuleType

import msgspec

from fettle.procs.child import Child, ChildError, Request, environment_of
from fettle.procs.limits import resident_bytes
from fettle.procs.parent import Parent, be_a_worker
from fettle.procs.process import Fork

_TIMEOUT_S = 120.0
_MOST_BESIDE = 4
"""Servers beside one, each of which has hundreds of MB."""


class Imports(msgspec.Struct, frozen=True):
    """What importing did to a process."""

    modules: tuple[str, ...] = ()
    """In the order of their import; those of Python, of installed packages and of fettle alone, not what the user works
    on."""
    variables: dict[str, str | None] = {}
    """Variables of the environment that were set meanwhile, by the modules or by who imported them; None for those that
    were deleted."""


class Preload(Request):
    """Import modules, those that cannot be left out. Answered by `Preloaded`."""

    modules: tuple[str, ...]
    counts: bool
    """Whether a child that starts by itself counts the time of these as its workload's."""


class Preloaded(msgspec.Struct):
    """What the server is after an import."""

    usable: bool
    """It may be forked."""
    variables: dict[str, str | None]
    """As those of `Imports`."""
    seconds: float
    """What the import took, without what a module says that it did for all later processes (`ONCE_S`),"""
    size: int
    """and the bytes of memory."""


class Spared(msgspec.Struct, frozen=True):
    """What imports take of a child that makes them itself."""

    seconds: float = 0.0
    size: int = 0
    """Bytes of memory."""


class Begin(Request):
    """Fork, and have the fork answer as `module` does. The descriptors follow: what it writes how it ended to, its log,
    and its link. Answered by the fork's process id."""

    module: str
    folder: str


class ForkServer:
    """Forks for children of one environment that run one of `runs`, for which a `Parent` knows what the imports of all
    other modules took. They have the `imports` of a child that started by itself: where other variables were set there
    than the modules set alone, they may have been imported to another end, and there are no forks. Close it after its
    forks.
    """

    def __init__(self, runs: Sequence[str], variables: Mapping[str, str], imports: Imports) -> None:
        self._runs, self._variables, self.imports = runs, variables, imports
        self.saved_s = 0.0
        """What the imports took, which a fork does not make."""
        self._environment: Mapping[str, str] = {}
        self._child: Child | None = None
        self._is_ready = False
        self._spared: dict[str, Spared] = {}
        self._beside: dict[tuple[tuple[str, str], ...], ForkServer] = {}
        self._failed = sys.platform != "linux"

    def beside(self, variables: Mapping[str, str]) -> ForkServer:
        """The server for children that have these variables beside its own; itself, which serves them not, where there
        are too many."""
        key = tuple(sorted(variables.items()))
        if key and key not in self._beside and len(self._beside) < _MOST_BESIDE:
            self._beside[key] = ForkServer(self._runs, {**self._variables, **variables}, self.imports)
        return self._beside.get(key, self)

    def begin(self) -> None:
        """Start the server, which makes its first imports while others work; else it starts when it is needed."""
        if self._child is None and not self._failed:
            self._environment = environment_of(self._variables)
            self._child = Child("fettle.procs.forks", variables=self._variables)
            with contextlib.suppress(ChildError):  # it ended: found out when its answer is read
                self._child.send(Preload(tuple(self._runs), counts=False))

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Whether a child with this environment can be a fork."""
        return self._is_there() and environment == self._environment

    def spare(self, modules: Sequence[str]) -> Spared:
        """Import modules that children would import themselves, and say what that spares each begun from now on."""
        if self._is_there():
            for name in modules:
                if name not in self._spared and not self._failed:
                    self._spared[name] = self._import(name)
        known = [self._spared[name] for name in modules if name in self._spared]
        return Spared(sum(one.seconds for one in known), sum(one.size for one in known))

    def _import(self, name: str) -> Spared:
        assert self._child is not None
        try:
            done = self._child.call(Preload((name,), counts=False), Preloaded, _TIMEOUT_S)
        except BaseException as error:  # also an interrupt: it leaves an answer in the link
            self._failed = True
            self._end()
            if isinstance(error, ChildError):
                return Spared()
            raise
        self._failed = not done.usable  # the forks that there are go on
        return Spared(done.seconds, done.size)

    def fork(self, module: str, log: int, link: int) -> Fork | None:
        """Have a fork run `module`; None where the server is gone: it is not used again."""
        assert self._child is not None
        ended, theirs = os.pipe()
        try:
            self._child.send(Begin(module, os.getcwd()))
            for descriptor in (theirs, log, link):
                send_handle(self._child.link, descriptor, self._child.pid)
            return Fork(self._child.receive(int, _TIMEOUT_S), ended)
        except BaseException as error:  # also an interrupt: it leaves an answer in the link
            os.close(ended)
            self._failed = True
            self._end()
            if isinstance(error, ChildError | OSError):
                return None
            raise
        finally:
            os.close(theirs)

    def close(self) -> None:
        """End the server with those beside it, and what is left of their forks."""
        while self._beside:
            self._beside.popitem()[1].close()
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child, self._is_ready = None, False
            self._spared.clear()

    def _is_there(self) -> bool:
        if not self._is_ready and not self._failed:
            self._make_ready()
        return self._child is not None and not self._failed

    def _make_ready(self) -> None:
        self.begin()
        assert self._child is not None
        self._is_ready = self._failed = True
        try:
            first = self._child.receive(Preloaded, _TIMEOUT_S)
            done = self._child.call(Preload(self.imports.modules, counts=True), Preloaded, _TIMEOUT_S)
            self.saved_s = first.seconds + done.seconds
            self._failed = not done.usable or done.variables != self.imports.variables
        except ChildError:
            pass
        finally:
            if self._failed:
                self._end()


def imports(before: Mapping[str, str]) -> Imports:
    """What this process has imported, and what became of the environment that it had `before`."""
    import sysconfig

    installed = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    modules = tuple(name for name, module in list(sys.modules.items()) if _is_of(module, name, installed))
    return Imports(modules, _changed(before))


def _changed(before: Mapping[str, str]) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}


def _is_of(module: ModuleType, name: str, installed: tuple[str, ...]) -> bool:
    spec = getattr(module, "__spec__", None)
    if spec is None or spec.name != name:  # an attribute of another module, or a module with two names
        return False
    origin = spec.origin or ""
    return name.partition(".")[0] == "fettle" or origin.startswith(installed) or origin in ("built-in", "frozen")


class _Server:
    """The process that is forked."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.imported_s = 0.0
        self.variables = dict(os.environ)
        self.ends: dict[int, int] = {}
        """Where it is written how each fork has ended."""
        signal.signal(signal.SIGCHLD, lambda *_: self.reap())

    def answer(self, request: Preload | Begin) -> Preloaded | int:
        return self.preload(request) if isinstance(request, Preload) else self.begin(request)

    def preload(self, request: Preload) -> Preloaded:
        began, held = time.perf_counter(), resident_bytes()
        once_s = 0.0
        for name in request.modules:
            if name not in sys.modules:
                with contextlib.suppress(Exception, SystemExit):
                    once_s += getattr(importlib.import_module(name), "ONCE_S", 0.0)
        seconds, size = time.perf_counter() - began - once_s, max(0, resident_bytes() - held)
        gc.collect()
        gc.freeze()  # else a fork's collector writes to all that was imported, and each page has to be copied
        self.imported_s += request.counts * seconds
        if not request.counts:
            self.variables = dict(os.environ)
        return Preloaded(_is_forkable(), _changed(self.variables), seconds, size)

    def begin(self, request: Begin) -> int:
        ends, log, link = (recv_handle(self.parent.link) for _ in range(3))
        begun, begins = os.pipe()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            try:
                os.setsid()
                for descriptor in (begins, begun, ends, *self.ends.values()):
                    os.close(descriptor)
                self.become(request, log, Connection(link))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        self.ends[pid] = ends
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for descriptor in (begins, log, link):
            os.close(descriptor)
        os.read(begun, 1)  # until it has a process group that can be killed
        os.close(begun)
        return pid

    def become(self, request: Begin, log: int, link: Connection) -> None:
        """Be the child that `request` asks for."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        self.parent.link.close()
        for shown in (1, 2):
            os.dup2(log, shown)
        os.close(log)
        os.chdir(request.folder)
        be_a_worker()
        random.seed()
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random").seed()
        importlib.import_module(request.module).main(Parent(link, imported_s=self.imported_s))

    def reap(self) -> None:
        """Write down how forks have ended; what else has ended is a matter of who started it."""
        for pid in list(self.ends):
            with contextlib.suppress(ChildProcessError):  # another signal came meanwhile, and this was called again
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended and (to := self.ends.pop(pid, None)) is not None:
                    with contextlib.suppress(OSError):  # nobody asks any more
                        os.write(to, b"%d" % os.waitstatus_to_exitcode(status))
                    os.close(to)


def _is_forkable() -> bool:
    """Whether this process has one thread and no accelerator. Those of a BLAS end when it is forked, and begin anew in
    the fork when they are needed: it is forked once before they are counted."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        return False
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


if __name__ == "__main__":
    be_a_worker()
    own = Parent()
    own.serve(Preload | Begin, _Server(own).answer)
