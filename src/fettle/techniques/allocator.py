"""The allocator of CPU memory. It can only be chosen before the process starts."""

from typing import ClassVar

from fettle.recipe import Recipe
from fettle.techniques._base import Code, Facts, Level, Technique

# Freed memory is kept for the next call instead of going back to the system, as the CPU tuning guide has it.
_JEMALLOC = "oversize_threshold:1,background_thread:true,metadata_thp:auto,dirty_decay_ms:-1,muzzy_decay_ms:-1"


class Allocator(Technique):
    name = "allocator"
    modes: ClassVar[frozenset[str]] = frozenset({"inference", "training"})
    title = "CPU allocator"
    given = "default"

    def levels(self, facts: Facts) -> list[Level]:
        gpu = "" if facts.device == "cpu" else "the work is on a GPU"
        return [Level("default", "the C library's own")] + [
            Level(name, f"{name}, preloaded", gpu or ("" if name in facts.libraries else f"{name} was not found"))
            for name in ("jemalloc", "tcmalloc")
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        more = {"MALLOC_CONF": _JEMALLOC} if level == "jemalloc" else {}
        return Code(environment={"LD_PRELOAD": facts.libraries[level], **more})
