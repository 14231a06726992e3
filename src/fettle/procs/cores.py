"""Cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """Physical cores that this process may use: fewer under an affinity mask or a container's quota."""
    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    per_core = 1
    try:
        import psutil

        physical = psutil.cpu_count(logical=False) or 0
        per_core = max(1, round((psutil.cpu_count() or 1) / physical)) if physical else 1
    except Exception:
        pass
    cores = max(1, logical // per_core)
    quota = _cgroup_cpus()
    return max(1, min(cores, int(quota))) if quota else cores


def _cgroup_cpus() -> float | None:
    """CPUs granted by a control group of either version, None without a limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        folder = Path("/sys/fs/cgroup/cpu")
        limit = int((folder / "cpu.cfs_quota_us").read_text())
        return limit / int((folder / "cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError):
        return None
