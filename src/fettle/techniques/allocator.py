"""The allocator of CPU memory: the C library's own, or another, which can only be chosen before the process starts.

The C library gives each large piece pages of its own and hands them back to the system when it is freed. A program that
allocates the same pieces again and again, as each training step does, then pays for every page anew when it is first
written: where pages are dear (virtual machines, sandboxes), for a copy many times what the copying costs.
"""

from typing import ClassVar

from fettle.recipe import Recipe
from fettle.techniques._base import Code, Facts, Level, Technique

# Freed memory is kept for the next call instead of going back to the system, as the CPU tuning guide has it.
_JEMALLOC = "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"


def keep_freed_memory(worker: int = 0) -> None:
    """Let the C library keep what is freed for what is allocated next; also fit as a loader's `worker_init_fn`."""
    import ctypes

    mallopt = ctypes.CDLL(None).mallopt
    m_trim_threshold, m_mmap_max = -1, -4  # as in glibc's malloc.h
    if not (mallopt(m_mmap_max, 0) and mallopt(m_trim_threshold, -1)):
        raise RuntimeError("the C library does not take these settings of its allocator")


class Allocator(Technique):
    name = "allocator"
    modes: ClassVar[frozenset[str]] = frozenset({"inference", "training"})
    title = "CPU allocator"
    given = "default"

    def levels(self, facts: Facts) -> list[Level]:
        gpu = "" if facts.device == "cpu" else "the work is on a GPU"
        found = [
            Level("default", "the C library's own"),
            Level("keep", "the C library's own, which keeps what is freed for what comes next",
                  gpu or ("" if "glibc" in facts.libraries else "the C library is not glibc")),
        ]  # fmt: skip
        return found + [
            Level(name, f"{name}, preloaded", gpu or ("" if name in facts.libraries else f"{name} was not found"))
            for name in ("jemalloc", "tcmalloc")
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if level == "keep":
            return Code(helpers=(keep_freed_memory,), setup=("keep_freed_memory()",))
        more = {"MALLOC_CONF": _JEMALLOC} if level == "jemalloc" else {}
        return Code(environment={"LD_PRELOAD": facts.libraries[level], **more})
