"""Children that are forked from a process which has imported what they need: that is most of what a start takes.

Within `forked` those that run one of `MODULES` with our interpreter begin so, for tests of what a child does. How one
starts, and what is in its environment from its first moment, is for tests that let it start as itself.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LAUNCHER = "fettle.procs.launcher"
_PACKAGES = ["torch._export.serde.serialize", "safetensors.torch", "fettle.applying", "fettle.package.handler",
             "fettle.package.model_runner"]  # fmt: skip
MODULES = {
    "fettle.measure._worker": ["fettle.measure._inference", "fettle.measure._training"],
    "fettle.inputs._run": [],
    "fettle.serve.engine.worker_main": _PACKAGES,
    "fettle.slo.calibrate": _PACKAGES,
    "fettle.slo.server_process": ["fettle.serve.server", "fettle.serve.engine.registry"],
    "fettle.diagnose.compile_worker": ["torch._dynamo"],
    "fettle.atlas.reading": [],
    "fettle.procs.forks": ["fettle.measure._inference", "fettle.measure._training"],
    LAUNCHER: ["torch.distributed.launcher.api", "fettle.measure._worker", "fettle.measure._training"],
}
"""What may be forked, and what each imports soon after its start."""
_READ_AT_START = ("DNNL_", "GLIBC_", "GOMP_", "KINETO_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "PYTHON",
                  "PYTORCH_", "TORCH_")  # fmt: skip
"""Variables that are read when a process starts or imports torch; of all others a fork has its own."""
_FORKABLE = {"KINETO_LOG_LEVEL", "OMP_NUM_THREADS", "PYTHONUNBUFFERED"}
"""Those of them that children may have otherwise than this process, and be forked."""
_FIRST = ["torch"]
"""What a process imports from which all other sources are forked."""
_CAN_FORK = sys.platform == "linux"
LITTLE = 768, 1 << 26
"""What peaks of the machine are measured with (`fettle.machine`), in a third of the time: no test looks at them."""
_MESSAGE = 1 << 18
_sources = dict[tuple[str, ...], "_Source"]()


@contextlib.contextmanager
def forked(*also: str) -> Iterator[None]:
    """Children begin as forks, with the modules `also` imported."""
    import pytest

    from fettle.procs import process

    class Subprocess:
        """What `fettle.procs.process` uses of that module."""

        DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

        @staticmethod
        def Popen(command: Sequence[str], **options: Any) -> Any:
            python, option, module = [*command, "", ""][:3]
            variables = dict(os.environ if options["env"] is None else options["env"])
            if python != sys.executable or option != "-m" or module not in MODULES or not _is_forkable(variables):
                return subprocess.Popen(command, **options)
            source = _source([module, *MODULES[module], *also], variables)
            shown = [1 if options["stdout"] is None else options["stdout"].fileno()]
            shown += [2 if options["stderr"] is None else options["stderr"].fileno()]
            return _Fork(source, [option, module], variables, [*shown, *options["pass_fds"]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "subprocess", Subprocess)
        yield


def run_script(script: Path, variables: Mapping[str, str], *arguments: str) -> tuple[int, str, str]:
    """Run a script that imports torch, its exit code, and what it printed to standard output and error.

    One that sets variables starts as itself, all others as forks.
    """
    if "os.environ" in script.read_text() or not _CAN_FORK:
        command = [sys.executable, script, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=300)
        return done.returncode, done.stdout, done.stderr
    source = _source(_FIRST, {name: value for name, value in variables.items() if name != "PYTHONPATH"})
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        fork = _Fork(source, [str(script), *arguments], variables, [out.fileno(), err.fileno()])
        code = fork.wait(300)
        for file in (out, err):
            file.seek(0)
        return code, out.read().decode(), err.read().decode()


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    read = {name: value for name, value in sorted(variables.items()) if name.startswith(_READ_AT_START)}
    read.pop("PYTHONSAFEPATH", None)  # which `_run` knows
    return read


def _is_forkable(variables: Mapping[str, str]) -> bool:
    changed = {name for name, value in _read_at_start(variables).items() if os.environ.get(name) != value}
    return _CAN_FORK and not changed - _FORKABLE


def _source(modules: Sequence[str], variables: Mapping[str, str]) -> "_Source":
    key = (*modules, *(f"{name}={value}" for name, value in _read_at_start(variables).items()))
    if key not in _sources:
        _sources[key] = _Source(modules, variables, None if modules == _FIRST else _source(_FIRST, variables))
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
            sys.exit()
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


def _serve(link: socket.socket, modules: Sequence[str]) -> None:
    """What a `_Source` does: a number asks how that child has ended, anything else for another child."""
    for name in modules:
        importlib.import_module(name)
    if machine := sys.modules.get("fettle.machine"):
        machine._OTHER_SIZES = LITTLE
    gc.freeze()
    while True:
        message, descriptors, *_ = socket.recv_fds(link, _MESSAGE, 8)
        if not message:  # whoever started us has gone
            return
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
                return _run(*request, descriptors)
            for descriptor in (*descriptors, begins):
                os.close(descriptor)
            os.read(begun, 1)  # until it has a process group that can be killed
            os.close(begun)
        link.send(json.dumps(answer).encode())


def _run(command: Sequence[str], folder: str, variables: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """The child, as Python would run ``-m MODULE`` or a script, which is told the numbers of its descriptors; behind an
    empty word come the modules of another source."""
    for shown, descriptor in zip((1, 2), descriptors, strict=False):
        os.dup2(descriptor, shown)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    random.seed()
    if not command[0]:
        return _serve(socket.socket(fileno=descriptors[2]), command[1:])
    is_module = command[0] == "-m"
    sys.argv = [*command[is_module:], *map(str, descriptors[2:])]
    if is_module:
        Path("/proc/self/comm").write_text(command[1][-15:])  # by which it is found
        sys.path[:0] = [] if "PYTHONSAFEPATH" in variables else [folder]
        if command[1:] == [LAUNCHER]:
            _fork_ranks()
        del sys.modules[command[1]]  # it is the main one
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[:0] = [os.path.dirname(command[0]), *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
        runpy.run_path(command[0], run_name="__main__")


def _fork_ranks() -> None:
    """Have torchrun's engine in this process start ranks as forks of what it is now, which has one thread."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    source = _Source.of_this_process()
    subprocess_handler.Popen = lambda args, env, **_: _Fork(source, args[1:], env, [1, 2])


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this file's folder
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
