"""The allocator of the memory that the work is in. Which one is chosen before the process starts.

The C library gives each large piece pages of its own and hands them back to the system when it is freed. A program that
allocates the same pieces again and again, as each training step does, then pays for every page anew when it is first
written: where pages are expensive (virtual machines, sandboxes), many times what copying the data costs.

On a GPU torch keeps what is freed, in segments as large as what was once asked for. Where sizes change from call to
call, these do not fit the next one, and memory is asked of the driver again, which waits for the device. Segments that
grow are one piece that all sizes fit in; the driver's own pool keeps and joins what is freed as well. Or half
of what is free is asked for once, and split from then on.
"""

from typing import Any

import torch

from fettle.techniques._base import BOTH, Code, Facts, Level, Recipe, Technique, register

# Freed memory is kept for the next call instead of going back to the system, as the CPU tuning guide has it.
_JEMALLOC = "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"

_DEVICE = {
    "expandable": ("segments of device memory that grow, so that all sizes fit into them", "expandable_segments:True"),
    "cuda-async": ("the driver's pool of device memory, cudaMallocAsync", "backend:cudaMallocAsync"),
}
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The older name wins where the user has set it, on AMD's GPUs too."""


def keep_freed_memory(worker: int = 0) -> None:
    """Let the C library keep what is freed for what is allocated next; also fit as a loader's `worker_init_fn`."""
    import ctypes

    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_mmap_max = -1, -4  # as in glibc's malloc.h
    if not (mallopt(m_mmap_max, 0) and mallopt(m_trim_threshold, -1)):
        raise RuntimeError("the C library does not take these settings of its allocator")


def preheat(model: Any) -> None:
    """Ask the driver for half of the model's free device memory at once, which the allocator keeps and splits from then
    on."""
    held = model.parameters() if isinstance(model, torch.nn.Module) else ()
    device = next((tensor.device for tensor in held if tensor.is_cuda), "cuda")
    torch.empty(torch.cuda.mem_get_info(device)[0] // 2, dtype=torch.uint8, device=device)


@register
class Allocator(Technique):
    name = "allocator"
    order = 110
    modes = BOTH
    title = "allocator"
    default = "default"
    served = False
    changes_memory = False

    def levels(self, facts: Facts) -> list[Level]:
        gpu = "" if facts.device == "cpu" else "the work is on a GPU"
        cpu = "" if facts.device == "cuda" else "the work is not on a CUDA device"
        alike = "" if facts.num_input_shapes > 1 or facts.custom_call else "the batches all have one shape"
        return [
            Level("default", "the C library's own"),
            Level("keep", "the C library's own, which keeps what is freed for what comes next",
                  gpu or ("" if "glibc" in facts.libraries else "the C library is not glibc")),
            *(Level(name, f"{name}, preloaded", gpu or ("" if name in facts.libraries else f"{name} was not found"))
              for name in ("jemalloc", "tcmalloc")),
            *(Level(name, summary, cpu or facts.not_nvidia * (name == "cuda-async"))
              for name, (summary, _) in _DEVICE.items()),
            Level("preheat", "half of the free device memory, asked for at once and split from then on", cpu or alike),
        ]  # fmt: skip

    def why_not(self, level: str, facts: Facts) -> str:
        pointless = level == "preheat" and facts.device == "cuda"  # with batches of one shape, which is no reason
        return "" if pointless else super().why_not(level, facts)

    def keeps_memory(self, facts: Facts) -> str:
        if facts.device != "cpu":
            return self.default
        return "tcmalloc" if "tcmalloc" in facts.libraries else "keep"

    def usual(self, facts: Facts) -> str:
        # Work between the parts of a pipeline allocates large pieces, too.
        keeps = facts.mode == "inference" and facts.parts and facts.device == "cpu" and "glibc" in facts.libraries
        return "keep" if keeps else self.default

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if level in _DEVICE:
            return Code(environment=dict.fromkeys(_SETTINGS, _DEVICE[level][1]))
        if level == "keep":
            return Code(helpers=(keep_freed_memory,), setup=("keep_freed_memory()",))
        if level == "preheat":
            return Code(helpers=(preheat,), setup=("preheat(model)",))
        more = {"MALLOC_CONF": _JEMALLOC} if level == "jemalloc" else {}
        return Code(environment={"LD_PRELOAD": facts.libraries[level], **more})
