"""Children that are forked from a process which has imported what they need: that is most of what a start takes.

Within `forked` those that run one of `MODULES`, or the command line, with our interpreter begin so, for tests of what a
child does. How one starts, and what is in its environment from its first moment, is for tests that let it start as
itself.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

LAUNCHER = "fettle.procs.launcher"
SERVER = "fettle.slo.server_process"
MODULES = (
    "fettle.measure._worker", "fettle.inputs._run", "fettle.serve.engine.worker_main", "fettle.slo.calibrate", SERVER,
    "fettle.diagnose.compile_worker", "fettle.atlas.reading", "fettle.procs.forks", LAUNCHER,
)  # fmt: skip
_PROGRAMS = "fettle.cli", "torch._inductor"
"""What may be forked: these modules, and programs of one line that use one of these."""
_FIRST = ["torch"]
"""What a process imports from which scripts are forked, and the process that modules are forked from,"""
_ALL = [
    "torch._dynamo", "torch._export.serde.serialize", "torch.distributed.launcher.api", "safetensors.torch",
    "fettle.measure._inference", "fettle.measure._training", "fettle.diagnose.collect", "fettle.applying",
    "fettle.package.export", "fettle.package.handler", "fettle.package.model_runner", "fettle.serve.server",
    "fettle.serve.engine.registry", *MODULES,
]  # fmt: skip
"""which has imported all that one of them imports soon after its start: one process for all of them."""
_READ_AT_START = ("DNNL_", "GLIBC_", "GOMP_", "KINETO_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "PYTHON",
                  "PYTORCH_", "TORCH_")  # fmt: skip
"""Variables that are read when a process starts or imports torch; of all others a fork has its own."""
_QUIET = {"KINETO_LOG_LEVEL": "99", "PYTHONUNBUFFERED": "1"}
"""What our own children have of them; nothing depends on it in one that has not,"""
_SET_LATER = {*_QUIET, "OMP_NUM_THREADS", "PYTHONSAFEPATH"}
"""and what `_run` sets in a fork."""
_CAN_FORK = sys.platform == "linux"
LITTLE = 384, 1 << 24
"""What peaks of the machine are measured with (`fettle.machine`), in no time: no test looks at them."""
_MESSAGE = 1 << 18
_sources = dict[tuple[str, ...], "_Source"]()


@contextlib.contextmanager
def forked(*also: str) -> Iterator[None]:
    """Children begin as forks, with the modules `also` imported."""
    with _begun_by(lambda variables: _source([*_ALL, *also], variables)):
        yield


@contextlib.contextmanager
def forked_here() -> Iterator[None]:
    """Children begin as forks of what this process is now, which has one thread: for one that is a fork itself."""
    if not _CAN_FORK:
        yield
        return
    source = _Source.of_this_process()
    with _begun_by(lambda variables: source):
        yield


@contextlib.contextmanager
def _begun_by(source: Callable[[Mapping[str, str]], "_Source"]) -> Iterator[None]:
    from fettle.procs import process

    class Subprocess:
        """What `fettle.procs.process` uses of that module."""

        DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

        @staticmethod
        def Popen(command: Sequence[str], **options: Any) -> Any:
            variables = dict(os.environ if options["env"] is None else options["env"])
            if command[0] != sys.executable or not _runs(*command[1:3]) or not _is_forkable(variables):
                return subprocess.Popen(command, **options)
            shown = [1 if options["stdout"] is None else options["stdout"].fileno()]
            shown += [2 if options["stderr"] is None else options["stderr"].fileno()]
            # Behind the module come the numbers of its descriptors, which are others in the fork.
            words = command[1 : 3 if command[1] == "-m" else None]
            return _Fork(source(variables), words, variables, [*shown, *options["pass_fds"]])

    before, process.subprocess = process.subprocess, Subprocess
    try:
        yield
    finally:
        process.subprocess = before


def _runs(option: str, what: str = "") -> bool:
    return what in MODULES if option == "-m" else option == "-c" and any(name in what for name in _PROGRAMS)


class Begun:
    """Python with a program that uses fettle, in a session of its own; what it starts within `forked_here` is forked.
    Its output goes to files in `folder`."""

    def __init__(self, folder: Path, program: str, *arguments: str) -> None:
        self.out, self.err = folder / "out.txt", folder / "err.txt"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            if _CAN_FORK:
                words, shown = ["-c", program, *arguments], [out.fileno(), err.fileno()]
                self._process: Any = _Fork(_source(_ALL, os.environ), words, os.environ, shown)
            else:
                words = [sys.executable, "-c", program, *arguments]
                self._process = subprocess.Popen(words, stdout=out, stderr=err, start_new_session=True)
        self.pid: int = self._process.pid

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        if not self.has_ended():
            os.kill(self.pid, number)

    def wait(self) -> int:
        return self._process.wait(120)


def run_script(script: Path, variables: Mapping[str, str], *arguments: str) -> tuple[int, str, str]:
    """Run a script that imports torch, its exit code, and what it printed to standard output and error.

    One that sets variables starts as itself, all others as forks.
    """
    if "os.environ" in script.read_text() or not _CAN_FORK:
        command = [sys.executable, script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
        return done.returncode, done.stdout, done.stderr
    source = _source(_FIRST, variables)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        fork = _Fork(source, [str(script), *arguments], variables, [out.fileno(), err.fileno()])
        code = fork.wait(300)
        for file in (out, err):
            file.seek(0)
        return code, out.read().decode(), err.read().decode()


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(_READ_AT_START) and name not in _SET_LATER
    }


def _is_forkable(variables: Mapping[str, str]) -> bool:
    return _CAN_FORK and all(os.environ.get(name) == value for name, value in _read_at_start(variables).items())


def _source(modules: Sequence[str], variables: Mapping[str, str]) -> "_Source":
    read = _read_at_start(variables)
    if modules == _FIRST:
        read.pop("PYTHONPATH", None)  # which comes first on the path of what is forked
    key = (*modules, *(f"{name}={value}" for name, value in read.items()))
    if key not in _sources:
        ours = {name: value for name, value in os.environ.items() if not name.startswith(_READ_AT_START)}
        first = None if modules == _FIRST else _source(_FIRST if modules == _ALL else _ALL, variables)
        _sources[key] = _Source(modules, {**ours, **read, **_QUIET}, first)
    return _sources[key]


class _Source:
    """A process that has imported modules and is forked, a fork of another one itself where one is given. It ends with
    this process."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], first: "_Source | None") -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = threading.Lock()
        with theirs:
            if first is not None:
                first.ask([["", *modules], os.getcwd(), variables], [1, 2, theirs.fileno()])
                return
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules], env=variables, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    @classmethod
    def of_this_process(cls) -> "_Source":
        """One that has imported what this process has; it goes on in a child."""
        made = cls.__new__(cls)
        made._turn = threading.Lock()
        made._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            os.closerange(3, theirs.fileno())  # as a child that is started has none of them
            os.closerange(theirs.fileno() + 1, 1 << 16)
            _serve(theirs, [])
        theirs.close()
        return made

    def ask(self, request: object, descriptors: Sequence[int] = ()) -> Any:
        with self._turn:
            socket.send_fds(self._link, [json.dumps(request).encode()], descriptors)
            return json.loads(self._link.recv(_MESSAGE))


class _Fork:
    """A child of a `_Source`, with what is used of `subprocess.Popen`."""

    def __init__(
        self, source: _Source, command: Sequence[str], variables: Mapping[str, str], descriptors: Sequence[int]
    ) -> None:
        self._source = source
        self.pid: int = source.ask([command, os.getcwd(), dict(variables)], descriptors)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._source.ask(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(0.005)
        return code


def _serve(link: socket.socket, modules: Sequence[str]) -> NoReturn:
    """What a `_Source` does: a number asks how that child has ended, anything else for another child."""
    for name in modules:
        importlib.import_module(name)
    if machine := sys.modules.get("fettle.machine"):
        machine._OTHER_SIZES = LITTLE
    gc.freeze()
    while True:
        message, descriptors, *_ = socket.recv_fds(link, _MESSAGE, 8)
        if not message:  # whoever started us has gone
            os._exit(0)
        request = json.loads(message)
        if isinstance(request, int):
            ended, status = os.waitpid(request, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
        else:
            begun, begins = os.pipe()
            answer = os.fork()
            if not answer:
                link.close()
                os.setsid()
                os.close(begun)
                os.close(begins)
                _end(lambda asked=request, with_=descriptors: _run(*asked, with_))
            for descriptor in (*descriptors, begins):
                os.close(descriptor)
            os.read(begun, 1)  # until it has a process group that can be killed
            os.close(begun)
        link.send(json.dumps(answer).encode())


def _end(run: Callable[[], None]) -> NoReturn:
    """Run it and end as Python does, but for taking apart all that was imported: that takes long, and what the
    collector of garbage leaves alone some libraries call leaks."""
    code: Any = 0
    try:
        run()
    except SystemExit as error:
        code = error.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 255)


def _run(command: Sequence[str], folder: str, variables: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """The child, as Python would run ``-m MODULE``, which is told the numbers of its descriptors, ``-c PROGRAM`` or a
    script; behind an empty word come the modules of another source."""
    for shown, descriptor in zip((1, 2), descriptors, strict=False):
        os.dup2(descriptor, shown)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    random.seed()
    of_others = list(filter(None, variables.get("PYTHONPATH", "").split(os.pathsep)))
    if not command[0]:
        sys.path[:0] = of_others
        return _serve(socket.socket(fileno=descriptors[2]), command[1:])
    if threads := variables.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    option, what, *_ = [*command, ""]
    sys.argv = [*command[option == "-m" :], *map(str, descriptors[2:])]
    if option == "-m":
        Path("/proc/self/comm").write_text(what[-15:])  # by which it is found
        sys.path[:0] = [] if "PYTHONSAFEPATH" in variables else [folder]
        if command[1:] == [LAUNCHER]:
            _fork_ranks()
        with forked_here() if what == SERVER else contextlib.nullcontext():
            del sys.modules[what]  # it is the main one
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv[1:2] = []
        sys.path[:0] = [folder]
        exec(what, {"__name__": "__main__"})
    else:
        sys.path[:0] = [os.path.dirname(option), *of_others]
        runpy.run_path(option, run_name="__main__")


def _fork_ranks() -> None:
    """Have torchrun's engine in this process start ranks as forks of what it is now, which has one thread."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    source = _Source.of_this_process()
    subprocess_handler.Popen = lambda args, env, **_: _Fork(source, args[1:], env, [1, 2])


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this file's folder
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
