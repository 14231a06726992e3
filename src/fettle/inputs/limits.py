"""What a search may use of the machine: cores, memory, /dev/shm; shared with the other ranks of the host."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from fettle.inputs.setting import Setting
from fettle.procs.limits import granted_cores, granted_memory_bytes
from fettle.units import size_text

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
    """What this process may use, divided among so many ranks."""
    cores, why = granted_cores()
    memory = granted_memory_bytes()
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
