"""What the machine offers: instructions, packages, allocators."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_bf16", "amx_int8", "neon", "sve")
_CAPABILITIES = {"avx512f": "avx512_f"}
"""Names in /proc/cpuinfo that torch spells otherwise."""
_OTHER_DISTRIBUTIONS = {"onnxruntime": "onnxruntime-gpu"}
_ALLOCATORS = {
    "jemalloc": ("libjemalloc.so.2", "libjemalloc.so"),
    "tcmalloc": ("libtcmalloc.so.4", "libtcmalloc_minimal.so.4", "libtcmalloc.so", "libtcmalloc_minimal.so"),
}


def cpu_flags() -> tuple[str, ...]:
    """Those vector and matrix instructions that this CPU has and the system lets torch use."""
    present = set(_cpuinfo_flags())
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    present |= {flag for flag in _FLAGS if capabilities.get(_CAPABILITIES.get(flag, flag))}
    if "asimd" in present or platform.machine() in ("arm64", "aarch64"):
        present.add("neon")
    if not getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)():  # the kernel must grant the tiles
        present -= {"amx_bf16", "amx_int8"}
    return tuple(flag for flag in _FLAGS if flag in present)


def installed(names: Iterable[str]) -> dict[str, str]:
    """Versions of those packages that are installed, without importing any."""
    found = {}
    for name in sorted(names):
        for distribution in (name, _OTHER_DISTRIBUTIONS.get(name, name)):
            try:
                found[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def find_libraries() -> dict[str, str]:
    """Paths of allocators that can be preloaded, from the linker's cache and the environment's own folder; of glibc,
    whose allocator can be set, the version."""
    if not sys.platform.startswith("linux"):
        return {}
    cache = _linker_cache()
    library, version = platform.libc_ver()
    found = {library: version} if library == "glibc" else {}
    for name, files in _ALLOCATORS.items():
        for file in files:
            path = cache.get(file) or next(
                (str(p) for p in [Path(sys.prefix, "lib", file)] if p.is_file()),
                "",
            )
            if path:
                found[name] = path
                break
    return found


def _cpuinfo_flags() -> list[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("flags", "features"):
                return value.split()
    except OSError:
        pass
    return []


def _linker_cache() -> dict[str, str]:
    for command in ("ldconfig", "/sbin/ldconfig"):
        try:
            listing = subprocess.run([command, "-p"], capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        rows = [line.split() for line in listing.splitlines() if "=>" in line]
        return {row[0]: row[-1] for row in reversed(rows)}
    return {}
