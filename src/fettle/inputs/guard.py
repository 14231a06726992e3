"""What a search may use of the machine: cores, memory, /dev/shm; shared with the other ranks, within control groups."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from fettle.inputs.setting import Setting
from fettle.units import size_text

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Room:
    """What one rank of this host has."""

    cores: int
    memory_bytes: int
    """Free memory, or what the control group still grants, a rank."""
    shared_bytes: int
    """Free space of /dev/shm, through which workers hand their batches over, a rank."""
    why: str = ""
    """Where the number of cores comes from."""


def room(ranks: int = 1) -> Room:
    """Cores by affinity and quota, memory by what is free and what the control group grants, divided among ranks."""
    cores, why = _cores()
    memory = psutil.virtual_memory().available
    for folder in _folders("memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        if limit is not None and limit < 1 << 60:
            memory = min(memory, max(0, limit - used))
    shared = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else memory
    if ranks > 1:
        why += f", shared by {ranks} ranks"
    return Room(max(1, cores // ranks), memory // ranks, min(memory, shared) // ranks, why)


def why_not(setting: Setting, batch_bytes: int, worker_bytes: int, here: Room) -> str:
    """Why a setting is left out: it could take more than half of /dev/shm or of memory; empty where it fits."""
    flight = setting.num_workers * setting.prefetch_factor * batch_bytes
    if flight > here.shared_bytes // 2:
        return (f"left out: {size_text(flight)} of batches in flight, and /dev/shm and memory have "
                f"{size_text(here.shared_bytes)}")  # fmt: skip
    held = setting.num_workers * worker_bytes + flight * (2 if setting.pin_memory else 1)
    if held > here.memory_bytes // 2:
        return f"left out: workers and batches would hold {size_text(held)} of {size_text(here.memory_bytes)}"
    return ""


def _cores() -> tuple[int, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    why = "cores of this process"
    for folder in _folders("cpu"):
        quota = _quota(folder)
        if quota is not None and quota < cores:
            cores, why = max(1, math.ceil(quota)), f"the control group grants {quota:.3g} cores"
    return cores, why


def _folders(controller: str) -> Iterator[Path]:
    """The control groups of this process that count for a controller, innermost first, in either version's layout."""
    try:
        lines = _OWN.read_text().splitlines()
    except OSError:
        lines = []
    roots = [(_GROUPS, "/"), (_GROUPS / controller, "/")]
    for line in lines:
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not names:
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


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
