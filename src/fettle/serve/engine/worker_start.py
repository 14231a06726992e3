"""Starting a worker process, with nothing but the standard library: before the server's own imports are done.

A worker spends its first seconds importing torch. A spare one is started first of all and does so while the server
imports what it needs and checks the packages; the first worker that it fits takes it over.
"""

from __future__ import annotations

import mmap
import os
import socket
import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fettle.procs.process import Process

SHARED_BYTES = 256 << 20
"""Size of the memory that a server shares with each worker. Pages take memory only once they were used."""
_ENVIRONMENT = (
    "PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "FETTLE_CACHE",
)  # fmt: skip
_ENVIRONMENT_PREFIXES = (
    "OMP_", "KMP_", "MKL_", "GOMP_", "ONEDNN_", "DNNL_", "MALLOC_", "PYTHON", "PYTORCH_", "TORCH", "TRITON_", "CUDA_",
    "NVIDIA_", "HIP_", "HSA_", "ROCR_", "XDG_",
)  # fmt: skip
"""What a worker inherits. Tokens and passwords in the server's environment are none of its business."""


@dataclass
class Spawned:
    """A process that runs `worker_main`, our end of its socket pair, and the memory that both have mapped."""

    process: Process
    link: socket.socket
    memory: mmap.mmap | None
    threads: int
    taken: bool = False
    """Whether a worker speaks with it."""

    def end(self) -> None:
        """End it if nobody took it."""
        if not self.taken:
            self.link.close()
            self.process.close()


def spawn(threads: int) -> Spawned:
    """Start one. What it prints goes where ours goes. OSError where none can be had."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    shared = _shared_memory()
    descriptors = [theirs.fileno(), *([shared[0]] if shared is not None else [])]
    try:
        command = ["-m", "fettle.serve.engine.worker_main", *map(str, descriptors)]
        process = Process(command, pass_fds=descriptors, environment=_environment(threads), shows=True)
    except OSError:
        ours.close()
        raise
    finally:
        theirs.close()
        if shared is not None:
            os.close(shared[0])
    return Spawned(process, ours, shared[1] if shared is not None else None, threads)


def _environment(threads: int) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _ENVIRONMENT or name.startswith(_ENVIRONMENT_PREFIXES)
    }
    # It imports nothing from the folder that it is started in: a package may lie there, unpacked, as `email` or `json`.
    return {**kept, "OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1"}


def _shared_memory() -> tuple[int, mmap.mmap] | None:
    """Memory for one worker's bodies, and the descriptor that the worker maps. None where there cannot be any."""
    if not hasattr(os, "memfd_create"):
        return None
    descriptor = os.memfd_create("fettle")
    try:
        os.ftruncate(descriptor, SHARED_BYTES)
        return descriptor, mmap.mmap(descriptor, SHARED_BYTES)
    except OSError:  # a limit on file sizes holds for this too
        os.close(descriptor)
        return None


def threads_each(threads: int, workers: int) -> int:
    """Threads of each worker: as set, else the cores divided among the workers."""
    from fettle.package.host import cores

    return threads or max(1, cores() // workers)


def likely_threads(package: Path, threads: int | None, workers: int | None) -> int:
    """What `threads_each` will be for this package, before anybody has checked it: a guess, as good as the file."""
    try:
        with (package / "serve.toml").open(encoding="utf-8") as file:
            said = tomllib.loads(file.read(8192))  # nobody has looked at it yet, and a long key takes a long time
        each = threads_each(int(threads or said.get("threads", 0)), int(workers or said.get("workers", 1)))
        return max(1, min(each, 1024))  # as settings allow
    except (OSError, ValueError, TypeError, ArithmeticError, RecursionError):  # what is wrong is said when it is opened
        return threads_each(threads or 0, workers or 1)


def cores_for(workers: int, threads: int, usable: Sequence[int], taken: Collection[int]) -> list[list[int]]:
    """Cores for each of `workers`, `threads` apiece (0: as many as there are for all), beside those `taken`: no two
    get the same one. Of the `usable` there are none where the system does not let processes be bound.

    Empty where there are not enough for that, or only one worker: then none is bound and the system schedules them.
    """
    free = [core for core in usable if core not in taken]
    each = threads or len(free) // workers
    if workers < 2 or each < 1 or each * workers > len(free):
        return []
    return [free[each * index : each * (index + 1)] for index in range(workers)]
