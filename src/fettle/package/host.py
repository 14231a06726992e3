"""Which machine is this, as far as a cost curve is concerned? Without importing torch: a server starts at once."""

from __future__ import annotations

import hashlib
import os
import re
from itertools import takewhile
from pathlib import Path

from fettle.machine import cpu_name, installed
from fettle.procs.limits import granted_cores


def cores() -> int:
    """Logical cores that this process may use: fewer under an affinity mask or a container's quota."""
    return granted_cores()[0]


def host_id() -> str:
    """Equal where measured costs may be believed: the same processor, cores, GPUs and version of torch."""
    torch = installed(["torch"]).get("torch", "")
    return hashlib.sha256("|".join([cpu_name(), str(cores()), *sorted(_gpus()), torch]).encode()).hexdigest()[:12]


def devices() -> list[str]:
    """Devices that a model can be served on: the CPU, and the first of each model of NVIDIA GPU, of those that
    ``CUDA_VISIBLE_DEVICES`` names before the first name that is none."""
    by_model: dict[str, str] = {}
    gpus, visible = _gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # Which GPU a UUID is only the driver could say.
        places = [place if name.startswith(("GPU-", "MIG-")) else int(name) if name.isdecimal() else len(gpus)
                  for place, name in enumerate(names)]  # fmt: skip
        gpus = [gpus[place] for place in takewhile(range(len(gpus)).__contains__, places)]
    for index, model in enumerate(gpus):
        by_model.setdefault(model, f"cuda:{index}")
    return ["cpu", *by_model.values()]


def _gpus() -> list[str]:
    """The models of NVIDIA's GPUs, in the driver's order; empty where one says none."""
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        try:
            model = re.search(r"^\s*model\s*:(.*)$", path.read_text("utf-8", "replace"), re.IGNORECASE | re.MULTILINE)
        except OSError:
            model = None
        models.append(model[1].strip() if model is not None else "")
    return models
