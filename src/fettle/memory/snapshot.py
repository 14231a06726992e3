"""What a snapshot holds, as columns: the nouns of this room. All sizes are bytes, all times microseconds.

Two sizes exist for every allocation: what the program asked for (*requested*) and what the allocator set aside
(*rounded*, at least a multiple of 512 bytes). Trace events carry the requested size, blocks carry both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fettle.errors import UsageError

Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]
Flags = npt.NDArray[np.bool_]


class Action(IntEnum):
    """What the allocator did. `OTHER` covers actions of other backends, which change nothing here."""

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8
    OTHER = 9


class State(IntEnum):
    """What a block is used for. `PENDING_FREE`: freed by the program, still awaited by another stream."""

    INACTIVE = 0
    ALLOCATED = 1
    PENDING_FREE = 2


class Frame(NamedTuple):
    """One line of a call stack."""

    name: str
    filename: str
    line: int


class Annotation(NamedTuple):
    """A named mark on the trace's clock: a profiler range, an optimizer step. `stage` is START or END."""

    stage: str
    name: str
    device: int
    time_us: int


@dataclass(frozen=True)
class Segments:
    """Stretches of device memory that the allocator holds, one row each."""

    device: Ints
    address: Ints
    total_bytes: Ints
    allocated_bytes: Ints
    """Rounded bytes in blocks a tensor uses, as the file says; -1 where the format has no such field."""
    active_bytes: Ints
    requested_bytes: Ints
    stream: Ints
    small: Flags
    """True for the pool of requests up to 1 MiB."""
    pool: Ints
    """Shape (n, 2). (0, 0) is the default pool; anything else is private, to a CUDA graph for instance."""
    expandable: Flags

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True)
class Blocks:
    """What the segments are divided into, one row each, in the order of their addresses within a segment."""

    segment: Ints
    """Row in `Segments`."""
    address: Ints
    size_bytes: Ints
    requested_bytes: Ints
    state: Codes
    stack: Ints
    """Index into `Snapshot.stacks`."""
    tag: Ints
    """Index into `Snapshot.tags`."""

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True)
class Trace:
    """The last events of one device, oldest first. Sizes: requested for blocks, rounded for segments."""

    action: Codes
    address: Ints
    """For an out-of-memory event: the bytes that the device still had free."""
    size_bytes: Ints
    stream: Ints
    time_us: Ints
    """Zero throughout in files from torch 2.0, which kept no time."""
    stack: Ints
    tag: Ints
    """Index into `Snapshot.tags`: the category or the user's own note of an event; 0 for none."""

    def __len__(self) -> int:
        return len(self.action)

    @property
    def has_times(self) -> bool:
        return len(self) > 0 and bool(self.time_us[-1] > 0)


@dataclass(frozen=True)
class Snapshot:
    """One snapshot file, read and checked for form; whether its numbers agree is `invariants.check`'s question."""

    name: str
    segments: Segments
    blocks: Blocks
    traces: Mapping[int, Trace]
    """By device; devices without events are left out."""
    annotations: tuple[Annotation, ...]
    settings: Mapping[str, str | int | float | bool]
    stacks: tuple[tuple[Frame, ...], ...]
    """Innermost frame first; number 0 is the empty stack."""
    tags: tuple[str, ...]
    allocator: str
    """`cuda` for the caching allocator, `cpu` for the profiler's timeline, which reserves nothing."""
    host_memory: tuple[tuple[int, int], ...]
    """(time_us, resident bytes) of the process, where `fettle.memory.record` noted them."""
    notes: tuple[str, ...]
    """What was odd about the file, one sentence each."""

    @property
    def devices(self) -> list[int]:
        return sorted(set(np.unique(self.segments.device).tolist()) | set(self.traces))

    @property
    def expands(self) -> bool:
        """Whether expandable segments are on already."""
        return self.settings.get("expandable_segments") is True or bool(self.segments.expandable.any())

    def check_device(self, device: int) -> None:
        """Raise `UsageError` for a device of which nothing is known."""
        if device not in self.devices:
            have = ", ".join(map(str, self.devices)) or "none"
            raise UsageError(f"{self.name}: holds nothing of device {device} (devices: {have})")

    def block_rows(self, device: int) -> Ints:
        """Rows of `blocks` that lie on a device."""
        return np.flatnonzero(self.segments.device[self.blocks.segment] == device)
