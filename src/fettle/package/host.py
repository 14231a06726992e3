"""Which machine is this, as far as a cost curve is concerned? Without importing torch: a server starts at once."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from fettle.machine import cpu_name
from fettle.procs.limits import granted_cores


def cores() -> int:
    """Logical cores that this process may use: fewer under an affinity mask or a container's quota."""
    return granted_cores()[0]


def host_id() -> str:
    """Equal where measured costs may be believed: the same processor, cores, GPUs and version of torch."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    gpus = sorted(_field(path, "Model") for path in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return hashlib.sha256("|".join([cpu_name(), str(cores()), *gpus, torch]).encode()).hexdigest()[:12]


def devices() -> list[str]:
    """Devices that a model can be served on: the CPU, and the first of each model of NVIDIA GPU."""
    by_model: dict[str, str] = {}
    for index, path in enumerate(sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))):
        by_model.setdefault(_field(path, "Model"), f"cuda:{index}")
    return ["cpu", *by_model.values()]


def _field(path: Path, name: str) -> str:
    """The first value of a name in a file of ``name: value`` lines; empty where there is none."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                key, _, value = line.partition(":")
                if key.strip().lower() == name.lower():
                    return value.strip()
    except OSError:
        pass
    return ""
