"""Is reserved memory going to waste, and would a request of S bytes have fitted?

Free memory is not all alike. A free block serves only requests of its own stream and its own pool (small up to 1 MiB,
large above; a private pool belongs to its CUDA graph), and memory can go back to the device only as whole segments.
So "reserved minus allocated" is not fragmentation: most of it is usually cache that the next request, or
``empty_cache()``, takes at once. What is distinguished here, per pool:

- *releasable*: segments without any block in use;
- *non-releasable*: free blocks in segments that are partly in use (PyTorch's ``inactive_split_bytes``). Expandable
  segments give back every whole page of a free block, so there only the rest of a page is stuck;
- *external index*: 1 - largest free block / all free bytes;
- *internal*: what rounding costs, (allocated - requested) / allocated.

`would_fit` follows the caching allocator's own steps (``c10/cuda/CUDACachingAllocator.cpp``: ``round_size``,
``get_allocation_size``, ``get_free_block``, ``release_cached_blocks``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fettle.memory.snapshot import Action, Flags, Ints, Snapshot, State
from fettle.units import size_text

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
SMALL_REQUEST_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""Unless ``large_segment_size_mb`` says otherwise."""
OWN_SEGMENT_BYTES = 10 * MIB
"""Requests from this size on get a segment of their own, rounded up to 2 MiB."""


@dataclass(frozen=True)
class Pool:
    """One kind of memory whose free blocks can stand in for each other. Bytes are rounded bytes."""

    device: int
    stream: int
    pool: tuple[int, int]
    small: bool
    segments: int
    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int
    """Allocated, or freed by the program and still awaited by another stream."""
    requested_bytes: int
    free_bytes: int
    releasable_bytes: int
    non_releasable_bytes: int
    largest_free_bytes: int

    @property
    def utilisation(self) -> float:
        return self.active_bytes / self.reserved_bytes if self.reserved_bytes else 1.0

    @property
    def internal(self) -> float:
        return (self.allocated_bytes - self.requested_bytes) / self.allocated_bytes if self.allocated_bytes else 0.0

    @property
    def external(self) -> float:
        return 1 - self.largest_free_bytes / self.free_bytes if self.free_bytes else 0.0

    @property
    def name(self) -> str:
        private = "" if self.pool == (0, 0) else f", private pool {self.pool[0]}.{self.pool[1]}"
        return f"{'small' if self.small else 'large'}, stream {self.stream}{private}"


@dataclass(frozen=True)
class Fit:
    """Would a request have fitted? Sizes in bytes."""

    request_bytes: int
    rounded_bytes: int
    answer: str
    """cache, device, after_release, no, or unknown, as the device's free memory or the moment of the failure is."""
    sentence: str
    fragmented: bool
    """Enough is free in the request's own pool, but in pieces that are all too small."""
    free_bytes: int
    """In the request's own pool."""
    largest_free_bytes: int
    needed_from_device_bytes: int
    """The segment that the allocator would ask the device for; 0 when the cache serves the request."""
    releasable_bytes: int
    """What it could give back first, over all pools of the device but private ones."""
    device_free_bytes: int | None


def pools(snapshot: Snapshot, device: int) -> tuple[Pool, ...]:
    """The device's pools, largest reserved first."""
    segments, blocks = snapshot.segments, snapshot.blocks
    pages = _whole_pages(snapshot)
    inactive, allocated = blocks.state == State.INACTIVE, blocks.state == State.ALLOCATED
    idle = np.ones(len(segments), np.bool_)  # holds no block in use, so that it could be given back
    idle[blocks.segment[~inactive]] = False
    held = (segments.expandable | ~idle)[blocks.segment]
    keys = np.column_stack([segments.stream, segments.pool, segments.small.astype(np.int64)])
    here = segments.device == device
    pools = []
    for kind in np.unique(keys[here], axis=0).tolist():
        chosen = here & (keys == kind).all(axis=1)
        mine = chosen[blocks.segment]
        free = blocks.size_bytes[mine & inactive]
        pool = Pool(
            device,
            kind[0],
            (kind[1], kind[2]),
            bool(kind[3]),
            segments=int(chosen.sum()),
            reserved_bytes=int(segments.total_bytes[chosen].sum()),
            allocated_bytes=int(blocks.size_bytes[mine & allocated].sum()),
            active_bytes=int(blocks.size_bytes[mine & ~inactive].sum()),
            requested_bytes=int(blocks.requested_bytes[mine & allocated].sum()),
            free_bytes=int(free.sum()),
            releasable_bytes=int(segments.total_bytes[chosen & idle & ~segments.expandable].sum() + pages[mine].sum()),
            non_releasable_bytes=int((blocks.size_bytes - pages)[mine & inactive & held].sum()),
            largest_free_bytes=int(free.max(initial=0)),
        )
        pools.append(pool)
    return tuple(sorted(pools, key=lambda pool: -pool.reserved_bytes))


def would_fit(
    snapshot: Snapshot,
    device: int,
    request_bytes: int,
    *,
    stream: int = 0,
    pool: tuple[int, int] = (0, 0),
    device_free_bytes: int | None = None,
) -> Fit:
    """Follow a request through the allocator as it stood when the snapshot was taken.

    `device_free_bytes` is what the device had free outside the allocator; if None, the last out-of-memory event of
    the trace is asked. Freed blocks that another stream still uses do not count as free.
    """
    rounded = round_size(request_bytes, snapshot.settings)
    small = rounded <= SMALL_REQUEST_BYTES
    releasable = sum(kind.releasable_bytes for kind in pools(snapshot, device) if kind.pool == (0, 0))
    segments, blocks = snapshot.segments, snapshot.blocks
    mine = (
        (segments.device == device)
        & (segments.stream == stream)
        & (segments.pool == np.array(pool)).all(axis=1)
        & (segments.small == small)
    )
    free = blocks.size_bytes[(blocks.state == State.INACTIVE) & mine[blocks.segment]]
    free_bytes, largest = int(free.sum()), int(free.max(initial=0))
    usable = free[(free >= rounded) & _may_be_split(free, rounded, snapshot.settings)]
    serving = int(usable.min()) if len(usable) else 0  # the smallest block that can
    needed = 0 if serving else _needed_from_device(snapshot, mine, rounded)
    if device_free_bytes is None:
        device_free_bytes = last_device_free(snapshot, device)
    fragmented = not serving and free_bytes >= rounded

    where = f"the {'small' if small else 'large'} pool of stream {stream}"
    why = f"{size_text(free_bytes)} are free in {where}, the largest block has {size_text(largest)}"
    why += ": fragmentation" if fragmented else ""
    need = f"a new segment of {size_text(needed)} is needed from the device"
    idle, has = size_text(releasable), size_text(device_free_bytes or 0)
    if serving:
        answer = "cache"
        sentence = f"yes: a free block of {size_text(serving)} in {where} serves it at once"
    elif device_free_bytes is None:
        answer = "unknown"
        sentence = f"not from the cache ({why}); {need}, after releasing up to {idle} of idle segments"
    elif device_free_bytes >= needed:
        answer = "device"
        sentence = f"yes: not from the cache ({why}), but the device has {has} free"
    elif device_free_bytes + releasable >= needed:
        answer = "after_release"
        sentence = (
            f"yes, slowly: {need}, which has {has}; the allocator first gives back idle segments ({idle} in all) and "
            "waits for the device"
        )
    else:
        answer = "no"
        sentence = f"no: {why}; {need}, which has {has} and would get back {idle} at most"
    return Fit(
        request_bytes=request_bytes,
        rounded_bytes=rounded,
        answer=answer,
        sentence=sentence,
        fragmented=fragmented,
        free_bytes=free_bytes,
        largest_free_bytes=largest,
        needed_from_device_bytes=needed,
        releasable_bytes=releasable,
        device_free_bytes=device_free_bytes,
    )


def _needed_from_device(snapshot: Snapshot, mine: Flags, rounded: int) -> int:
    """What the allocator would ask the device for: a segment, or the pages by which an expandable one has to grow."""
    growing = mine & snapshot.segments.expandable
    if not growing.any() and snapshot.settings.get("expandable_segments") is not True:
        return segment_size(rounded, snapshot.settings)
    page = SMALL_SEGMENT_BYTES if rounded <= SMALL_REQUEST_BYTES else _large_segment(snapshot.settings)
    return math.ceil((rounded - _free_at_the_end(snapshot, growing)) / page) * page


def _large_segment(settings: Mapping[str, object]) -> int:
    """Bytes of a segment for requests between 1 and 10 MiB, and of a page of a large expandable segment."""
    setting = re.search(r"large_segment_size_mb:\s*([0-9]{1,6})\b", str(settings.get("PYTORCH_CUDA_ALLOC_CONF", "")))
    return max(1, int(setting[1])) * MIB if setting else LARGE_SEGMENT_BYTES


def _whole_pages(snapshot: Snapshot) -> Ints:
    """Of each free block in an expandable segment the bytes in whole pages: those can go back to the device."""
    segments, blocks = snapshot.segments, snapshot.blocks
    page = np.where(segments.small, SMALL_SEGMENT_BYTES, _large_segment(snapshot.settings))[blocks.segment]
    free = (blocks.state == State.INACTIVE) & segments.expandable[blocks.segment]
    return np.where(free, blocks.size_bytes // page * page, 0)


def _free_at_the_end(snapshot: Snapshot, chosen: Flags) -> int:
    """The largest free block at the end of a growing segment: new pages are mapped behind it."""
    blocks = snapshot.blocks
    if len(blocks) == 0 or not chosen.any():
        return 0
    last = np.flatnonzero(np.append(blocks.segment[1:] != blocks.segment[:-1], True))
    last = last[chosen[blocks.segment[last]] & (blocks.state[last] == State.INACTIVE)]
    return int(blocks.size_bytes[last].max(initial=0))


def round_size(request_bytes: int, settings: Mapping[str, object]) -> int:
    """What the allocator sets aside for a request: a multiple of 512 bytes, or of a power-of-two division."""
    if request_bytes < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    divisions = _divisions(request_bytes, settings)
    if divisions > 1 and request_bytes > MIN_BLOCK_BYTES * divisions:
        lower = 1 << (request_bytes.bit_length() - 1)
        if lower == request_bytes:
            return request_bytes
        step = max(lower // divisions, 1)
        return lower + math.ceil((request_bytes - lower) / step) * step
    return math.ceil(request_bytes / MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def segment_size(rounded_bytes: int, settings: Mapping[str, object]) -> int:
    """What the allocator asks the device for when no free block serves a request of this rounded size."""
    if rounded_bytes <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded_bytes < OWN_SEGMENT_BYTES:
        return _large_segment(settings)
    return math.ceil(rounded_bytes / (2 * MIB)) * 2 * MIB


def last_device_free(snapshot: Snapshot, device: int) -> int | None:
    """What the device had free at the last out-of-memory event of the trace; None without one."""
    trace = snapshot.traces.get(device)
    if trace is None:
        return None
    failed = np.flatnonzero(trace.action == Action.OOM)
    return int(trace.address[failed[-1]]) if len(failed) else None


def _may_be_split(sizes: Ints, rounded: int, settings: Mapping[str, object]) -> Flags:
    """With `max_split_size` set, large blocks are kept for large requests, which take no far larger one."""
    limit = settings.get("max_split_size", -1)
    if not isinstance(limit, int) or limit <= 0:
        return np.ones(len(sizes), np.bool_)
    if rounded < limit:
        return sizes < limit
    return sizes < rounded + _large_segment(settings)


def _divisions(request_bytes: int, settings: Mapping[str, object]) -> int:
    mebibytes = max(1, request_bytes // MIB)
    bucket = min(1 << (mebibytes.bit_length() - 1), 32768)
    value = settings.get(f"roundup_power2_divisions[{bucket}]", 0)
    return value if isinstance(value, int) else 0
