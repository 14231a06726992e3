"""What the machine offers: instructions, and what its GPU can do."""

from __future__ import annotations

import platform
from typing import Any

import torch

from fettle.machine import processor

_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_bf16", "amx_int8", "neon", "sve")


def cpu_flags() -> tuple[str, ...]:
    """Those vector and matrix instructions that this CPU has and the system lets torch use."""
    said = processor()
    present = set(said.get("flags", said.get("features", "")).split())
    capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    present |= {flag for flag in _FLAGS if capabilities.get(flag.replace("512f", "512_f"))}  # as torch spells it
    if "asimd" in present or platform.machine() in ("arm64", "aarch64"):
        present.add("neon")
    if not getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)():  # the kernel must grant the tiles
        present -= {"amx_bf16", "amx_int8"}
    return tuple(flag for flag in _FLAGS if flag in present)


def gpu(is_used: bool) -> dict[str, Any]:
    """What the GPU can do, as fields of `Facts`. torch's build for AMD's calls them CUDA devices, and numbers their
    architectures as if they were NVIDIA's."""
    if not is_used:
        return {}
    if torch.version.hip:
        return {"amd": torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]}
    return {"cuda_capability": torch.cuda.get_device_capability()}
