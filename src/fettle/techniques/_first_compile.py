"""Compile something small, when this is imported: the first compilation of a process takes seconds more than the next.

It finds out which vector instructions the C++ compiler and torch have, preprocesses torch's headers, hashes the sources
of torch and Triton, and registers the patterns that graphs are searched for. Forks of a process that has imported this
are spared all of it. For that the C++ compiler has to build a library for each instruction set, once for a folder of
compiled code: these are kept beside torch's precompiled headers, and copied to the folder of this process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch._inductor.config
from torch._dynamo.utils import counters
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

_GRAPHS = ("fxgraph", "aotautograd")
"""Where torch keeps whole graphs: what it finds there it does not compile."""


def _compile(folder: Path) -> None:
    """Compile in a `folder` of compiled code, and begin no thread: what has threads cannot be forked."""

    def small(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x @ x).sum(-1)

    try:
        with (
            mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(folder)),
            mock.patch("torch.hub.tqdm.monitor_interval", 0, create=True),
            torch._inductor.config.patch(compile_threads=1),
            torch.no_grad(),
        ):
            torch.compile(small)(torch.ones(8, 8))
    finally:
        torch._dynamo.reset()
        counters.clear()


def _build(folder: Path) -> None:
    """Fill `folder`, in a fork: this process must see what one takes that finds it full."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        if not (pid := os.fork()):
            with contextlib.suppress(BaseException):
                _compile(Path(unfinished))
                os._exit(0)
            os._exit(1)
        if os.waitpid(pid, 0)[1] == 0:
            with contextlib.suppress(OSError):  # another study was first
                os.rename(unfinished, folder)
                os.mkdir(unfinished)


def _get_ready() -> float:
    """Compile, and say how long what is done once took."""
    began = time.perf_counter()
    compiler = os.stat(shutil.which(get_cpp_compiler()) or "")
    shared = Path(default_cache_dir())
    shared.mkdir(exist_ok=True)
    if shared.stat().st_uid != os.getuid():
        return 0.0
    kept = shared / f"fettle-{torch.__version__}-{compiler.st_size}-{compiler.st_mtime_ns}"
    if not kept.is_dir():
        _build(kept)
    for name in _GRAPHS:
        shutil.rmtree(kept / name, ignore_errors=True)
    shutil.copytree(kept, cache_dir(), dirs_exist_ok=True)
    once_s = time.perf_counter() - began
    _compile(kept)
    return once_s


ONCE_S = _get_ready()
"""Seconds that no later process takes."""
