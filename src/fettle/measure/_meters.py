"""Memory and energy of this process, where the machine reports them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Sequence
from pathlib import Path

import torch

from fettle.measure._load import nvml_of

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RAPL = Path("/sys/class/powercap")


def trim() -> None:
    """Give back what is free, so that the resident set means what is held."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak(device: str) -> bool:
    """Start a new peak; False where the machine cannot. A GPU's free memory goes back first: the others need it."""
    if device == "cuda":
        torch.cuda.empty_cache()
        for gpu in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(gpu)
        return True
    try:
        _CLEAR.write_text("5")  # Linux: set the high-water mark of the resident set to its present size
    except OSError:
        return False
    return True


def empty(gpus: Sequence[int], fullest: float = 0.0) -> bool:
    """Give back what the allocator keeps for the next call, where more than this share of a GPU is taken; whether it
    did."""
    if not any(free < (1 - fullest) * total for free, total in map(torch.cuda.mem_get_info, gpus)):
        return False
    torch.cuda.empty_cache()
    return True


def peak_bytes(device: str) -> int | None:
    """The peak since `reset_peak`: the CUDA allocator's on all GPUs, or the resident set's high-water mark."""
    if device == "cuda":
        return sum(torch.cuda.max_memory_allocated(gpu) for gpu in range(torch.cuda.device_count()))
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def spent(before_j: float | None, after_j: float | None, calls: int) -> float | None:
    """Joules of each call between two readings of `energy_j`; None where a counter is missing or began again at 0."""
    if before_j is None or after_j is None or after_j < before_j:
        return None
    return (after_j - before_j) / calls


def uuid_of(gpu: int) -> str:
    """As NVML names a GPU, which it numbers otherwise where a process sees only some of them."""
    return f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"


def energy_j(gpus: Sequence[int]) -> float | None:
    """A running total of energy in joules, or None: NVML for GPUs; RAPL packages for a CPU, where there are none."""
    if gpus:
        try:
            devices = [nvml_of(uuid_of(gpu)) for gpu in gpus]
            return float(sum(nvml.nvmlDeviceGetTotalEnergyConsumption(device) for nvml, device in devices)) / 1e3
        except Exception:  # NVML raises its own types, and may be absent altogether
            return None
    try:
        # Not those of a package's parts, nor that of the whole board, which holds the packages.
        zones = [path for path in _RAPL.glob("intel-rapl:[0-9]*") if path.name.count(":") == 1]
        packages = [path for path in zones if (path / "name").read_text().startswith("package")]
        return sum(int((path / "energy_uj").read_text()) for path in packages) / 1e6 if packages else None
    except (OSError, ValueError):
        return None
