"""What of the machine this process may use: cores by affinity, and both by its control groups, of either version."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_CORES = Path("/sys/devices/system/cpu")
_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which OpenMP binds threads to cores."""


def usable_cores() -> int:
    """Physical cores that this process may use: fewer under an affinity mask or a container's quota."""
    return max(1, int(min(physical_cores(), quota_cores())))


def physical_cores() -> int:
    """Physical cores of which this process may run on some part; as many of its logical ones as the machine has, where
    the system does not say which are whose."""
    try:
        siblings = {(_CORES / f"cpu{core}/topology/thread_siblings_list").read_text().strip() for core in affinity()}
        if siblings and "" not in siblings:
            return len(siblings)
    except OSError:
        pass
    import psutil

    physical = psutil.cpu_count(logical=False)
    per_core = max(1, round((psutil.cpu_count() or 1) / physical)) if physical else 1
    return affinity_cores() // per_core


def granted_cores() -> tuple[int, str]:
    """Logical cores that this process may use, of a quota as many as it takes to use all of it; and what says so."""
    cores, quota = affinity_cores(), quota_cores()
    if quota < cores:
        return max(1, math.ceil(quota)), f"the control group grants {quota:.3g} core{'s' * (quota != 1)}"
    return cores, "cores of this process"


def granted_memory_bytes() -> int:
    """Free memory, or what the control groups still grant where that is less. Files that are only kept in memory, as
    those of a data set that was read, are free in both: they go where the room is needed."""
    import psutil

    memory = int(psutil.virtual_memory().available)
    for folder, limit in _memory_limits():
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        memory = min(memory, max(0, limit - used + _files_kept(folder)))
    return memory


def allow_open_files(most: int = 1 << 16) -> None:
    """Let this process have so many files open, connections among them, as far as it may: where nobody has said so, it
    is 1,024."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        if 0 <= soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def total_memory_bytes() -> int:
    """The machine's memory, or what the control groups grant of it in all."""
    import psutil

    return min([int(psutil.virtual_memory().total), *(limit for _, limit in _memory_limits())])


def _memory_limits() -> Iterator[tuple[Path, int]]:
    """The control groups that limit memory, and to how much."""
    for folder in control_groups("memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < 1 << 60:
            yield folder, limit


def _files_kept(folder: Path) -> int:
    """Bytes of files that a control group holds in memory, in either version's words."""
    try:
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return sum(int(counts.get(f"total_{name}", counts[name])) for name in ("inactive_file", "active_file"))
    except (OSError, ValueError, KeyError):
        return 0


def resident_bytes() -> int:
    """Resident memory of this process now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def pages_fetched() -> int:
    """Pages of memory that this process has been given so far, by the system's own count."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def affinity_cores() -> int:
    """Logical cores that this process may run on."""
    return len(affinity()) or os.cpu_count() or 1


def affinity() -> set[int]:
    """The logical cores that this process may run on; empty where the system does not say. OpenMP, where variables ask
    for it, binds the thread that imports torch to the first of its places: all of them count."""
    if not hasattr(os, "sched_getaffinity"):
        return set()
    cores = os.sched_getaffinity(0)
    if "torch" in sys.modules and any(name in os.environ for name in _BINDING):
        import ctypes

        with contextlib.suppress(AttributeError):  # torch without OpenMP
            openmp = ctypes.CDLL(None)
            for place in range(openmp.omp_get_num_places()):
                numbers = (ctypes.c_int * openmp.omp_get_place_num_procs(place))()
                openmp.omp_get_place_proc_ids(place, numbers)
                cores.update(numbers)
    return cores


@contextlib.contextmanager
def unbound() -> Iterator[None]:
    """A process that this thread starts in here may run on all cores of `affinity`, not only on the one that OpenMP has
    bound the thread to."""
    cores = affinity()
    bound = os.sched_getaffinity(0) if cores else cores
    if cores == bound:
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def quota_cores() -> float:
    """Cores whose time the control groups grant; infinity where they do not limit it."""
    quotas = (_quota(folder) for folder in control_groups("cpu"))
    return min((quota for quota in quotas if quota is not None), default=math.inf)


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def scheduled_s(path: Path = Path("/proc/thread-self/schedstat")) -> tuple[float, float]:
    """Seconds that a thread, this one unless another is named, ran, and that it was ready and had no core (Linux; zeros
    where the system does not say)."""
    try:
        with open(path, "rb") as file:
            ran, waited, *_ = file.read().split()
        return int(ran) / 1e9, int(waited) / 1e9
    except (OSError, ValueError):  # not Linux, or a thread that has just ended
        return 0.0, 0.0


def control_groups(controller: str) -> Iterator[Path]:
    """The control groups of this process that count for a controller, innermost first, in either version's layout."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        lines = []
    roots = [(_GROUPS, "/"), (_GROUPS / controller, "/")]
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not names:  # version 2, which beside version 1 may be mounted at `unified`
            roots.insert(0, (_GROUPS / "unified", path))
            roots.insert(0, (_GROUPS, path))
        elif controller in names.split(","):
            roots.insert(0, (_GROUPS / names, path))
            roots.insert(0, (_GROUPS / controller, path))
    for root, path in roots:
        folder = root / path.strip("/")
        while ".." not in path:
            if folder.is_dir():
                yield folder
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
