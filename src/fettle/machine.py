"""The machine: what the numbers were measured on, with the peaks measured on it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from fettle.procs.limits import affinity_cores, quota_cores
from fettle.units import count_text

_PACKAGES = (
    "torch", "torchao", "onnxruntime", "openvino", "triton", "transformers", "diffusers", "numpy", "torch-fettle",
)  # fmt: skip
_OTHER_DISTRIBUTIONS = {"onnxruntime": "onnxruntime-gpu"}

_DECIDES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "LD_PRELOAD")
"""Variables that the time of a call depends on."""
_CUDA_SIZES, _OTHER_SIZES = (8192, 1 << 30), (1536, 1 << 28)
"""What peaks are measured with: rows of a square matrix, bytes of a copy."""
_LONG_S = 0.03
"""Eight times as many operations are not tried after a product that took this long."""
_NUMBERED = re.compile(r"\d[0-9A-Z]{2}")
_ALLOCATORS = {
    "jemalloc": ("libjemalloc.so.2", "libjemalloc.so"),
    "tcmalloc": ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4", "libtcmalloc.so", "libtcmalloc_minimal.so"),
}


@dataclass(frozen=True)
class Machine:
    """Hardware and software of one machine. `id` is equal where numbers may be compared, so it also goes by threads,
    instruction sets and a preloaded library that the environment sets, and by a quota of cores; numbers of what ran by
    another package than torch hold for its version (`fettle.measure.Trial.versions`)."""

    id: str
    cpu: str
    cores: int
    """Cores this process may use."""
    memory_bytes: int
    gpus: tuple[str, ...]
    platform: str
    python: str
    versions: Mapping[str, str] = field(default_factory=dict)
    peaks: Mapping[str, float] = field(default_factory=dict)
    """Measured: ``matmul_float32`` and its like in FLOP/s; in bytes/s ``copy``, read and written, and ``read``."""

    @property
    def summary(self) -> str:
        """One line for people."""
        device = ", ".join(self.gpus) or f"{self.cpu}, {count_text(self.cores, 'core')}"
        return f"{device}, torch {self.versions.get('torch', '?')}"


@lru_cache(maxsize=1)
def this_machine() -> Machine:
    """The machine this process runs on, without its peaks."""
    import torch

    gpus: tuple[str, ...] = ()
    if torch.cuda.is_available():
        gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    cpu = cpu_name()
    cores = affinity_cores()
    versions = installed()
    versions["torch"] = str(torch.__version__)
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    given = [f"{name}={os.environ[name]}" for name in _DECIDES if os.environ.get(name)]
    if (quota := quota_cores()) < cores:
        given.append(f"quota={quota:g}")
    text = "|".join([cpu, str(cores), *gpus, versions["torch"], *given])
    return Machine(
        id=hashlib.sha256(text.encode()).hexdigest()[:12],
        cpu=cpu,
        cores=cores,
        memory_bytes=int(psutil.virtual_memory().total),
        gpus=gpus,
        platform=platform.platform(),
        python=platform.python_version(),
        versions=versions,
    )


def installed(names: Iterable[str] = _PACKAGES) -> dict[str, str]:
    """Versions of those packages that are installed, by default of the libraries that decide what is measured. None is
    imported."""
    versions: dict[str, str] = {}
    for name in names:
        for distribution in (name, _OTHER_DISTRIBUTIONS.get(name, name)):
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions.setdefault(name, metadata.version(distribution))
    return versions


def find_libraries() -> dict[str, str]:
    """Paths of allocators that can be preloaded, from the linker's cache and the environment's own folder; of glibc,
    whose allocator can be set, the version."""
    if not sys.platform.startswith("linux"):
        return {}
    cache = _linker_cache()
    library, version = platform.libc_ver()
    libraries = {library: version} if library == "glibc" else {}
    for name, files in _ALLOCATORS.items():
        for file in files:
            own = Path(sys.prefix, "lib", file)
            if file in cache or own.is_file():
                libraries[name] = cache.get(file, str(own))
                break
    return libraries


@lru_cache
def measure_peaks(device: str) -> Mapping[str, float]:
    """What the device reaches in a large matrix product per dtype (FLOP/s), in a copy (bytes/s, both ways) and in
    reading alone, as a sum over memory does (bytes/s).

    Measured once in a process; the best of a few runs, as a ceiling should be, in products as large as are quick. What
    the device cannot do, or has no memory left for beside the model, is left out.
    """
    import torch

    size, copied = _CUDA_SIZES if device == "cuda" else _OTHER_SIZES

    def product_flops(dtype: torch.dtype) -> float:
        for side in (size // 8, size // 4, size // 2, size):
            a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
            took = _best_s(lambda: a @ b, device)  # noqa: B023
            if took > _LONG_S:  # without instructions for the type a larger product takes minutes
                break
        return 2 * side**3 / took

    def copy_bytes_per_s() -> float:
        source = torch.empty(copied, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return 2 * copied / _best_s(lambda: target.copy_(source), device)

    def read_bytes_per_s() -> float:
        values = torch.ones(copied // 2, device=device)
        return values.nbytes / min(_best_s(values.sum, device) for _ in range(3))

    peaks: dict[str, float] = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if device == "cpu" and dtype == torch.float16:
            continue  # emulated, and very slow, on most CPUs
        with contextlib.suppress(RuntimeError):
            peaks[f"matmul_{str(dtype).removeprefix('torch.')}"] = product_flops(dtype)
    for name, bytes_per_s in (("copy", copy_bytes_per_s), ("read", read_bytes_per_s)):
        with contextlib.suppress(RuntimeError):
            peaks[name] = bytes_per_s()
    if device == "cuda":
        torch.cuda.empty_cache()
    return peaks


def _best_s(run: Callable[[], Any], device: str) -> float:
    from fettle.workload import wait_for

    best = float("inf")
    for _ in range(4):
        wait_for(device)
        start = time.perf_counter()
        run()
        wait_for(device)
        best = min(best, time.perf_counter() - start)
    return best


def cpu_name() -> str:
    """The processor's name: Linux's own words where it has them, for asking py-cpuinfo starts a process.

    A virtual machine may say "AMD EPYC" of processors that are years and a factor of two apart: a name without a
    number is told with its family and model.
    """
    said = processor()
    if name := said.get("model name", ""):
        if "cpu family" in said and "model" in said and not _NUMBERED.search(name.partition("@")[0]):
            name += f" (family {said['cpu family']}, model {said['model']})"
        return name
    import cpuinfo

    return str(cpuinfo.get_cpu_info().get("brand_raw") or platform.processor() or platform.machine())


def processor() -> dict[str, str]:
    """What Linux says of the first processor, under names in small letters; nothing elsewhere."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    lines = (line.partition(":") for line in first.splitlines())
    return {key.strip().lower(): value.strip() for key, _, value in lines}


def _linker_cache() -> dict[str, str]:
    for command in ("ldconfig", "/sbin/ldconfig"):
        try:
            listing = subprocess.run([command, "-p"], capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        rows = [line.split() for line in listing.splitlines() if "=>" in line]
        return {row[0]: row[-1] for row in reversed(rows)}
    return {}
