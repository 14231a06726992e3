"""A setting, what was measured of it, which one is taken, and what room the machine has for it: plain data."""

from __future__ import annotations

import inspect
import math
import shutil
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fettle.procs.limits import granted_cores, granted_memory_bytes
from fettle.techniques.allocator import keep_freed_memory
from fettle.units import size_text

WITHIN = 0.03
"""A smaller setting is taken where it is at most this much slower than the best."""
_PAGE = 4096
SHORT = 8
"""Epochs of so few batches, or of an unknown number, are timed as a whole, their beginnings included."""
AS_GIVEN, ONE_BY_ONE, BATCH_INDEX = "as given", "one by one", "batch index"
"""How rows are fetched: as the dataset offers it; without its `__getitems__`; by indexing it with a whole batch."""


@dataclass(frozen=True)
class Setting:
    """What a DataLoader is given, and how its batches are copied to a device."""

    num_workers: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = False
    pin_memory: bool = False
    non_blocking: bool = False
    fetch: str = AS_GIVEN
    keep_memory: bool = False
    """Workers keep the memory that they free instead of handing it back to the system."""

    @property
    def arguments(self) -> str:
        """The DataLoader's arguments as they are written."""
        words = [f"num_workers={self.num_workers}"]
        if self.num_workers:
            words += [f"prefetch_factor={self.prefetch_factor}", f"persistent_workers={self.persistent_workers}"]
        return ", ".join([*words, *(["pin_memory=True"] if self.pin_memory else [])])

    @property
    def name(self) -> str:
        """Arguments and what else differs, in one line."""
        words = [self.arguments]
        if self.fetch != AS_GIVEN:
            words.append(f"rows fetched by {self.fetch}" if self.fetch == BATCH_INDEX else "rows fetched one by one")
        if self.keep_memory:
            words.append("workers keep freed memory")
        if self.non_blocking:
            words.append("non_blocking=True")
        return ", ".join(words)

    @property
    def code(self) -> str:
        """Plain PyTorch lines for the user's own loop."""
        arguments = self.arguments + ", worker_init_fn=keep_freed_memory" * self.keep_memory
        if self.fetch == BATCH_INDEX:
            batches = "BatchSampler(sampler, batch_size, drop_last)"
            lines = [f"DataLoader(dataset, sampler={batches}, batch_size=None, {arguments})"]
        else:
            lines = [f"DataLoader(dataset, ..., {arguments})"]
        if self.fetch == ONE_BY_ONE:
            lines.insert(0, "dataset.__getitems__ = None  # rows one by one")
        if self.non_blocking:  # of whatever parts a batch has
            move = 'lambda part: part.to("cuda", non_blocking=True) if hasattr(part, "to") else part'
            lines.append(f"batch = torch.utils._pytree.tree_map({move}, batch)")
        if self.keep_memory:
            helper = inspect.getsource(keep_freed_memory).rstrip().splitlines()
            lines = [*helper, "", "", "# A worker_init_fn of your own calls it first.", *lines]
        return "\n".join(lines)

    @property
    def size(self) -> tuple[int, ...]:
        """For order: fewer workers, fewer batches in flight, fewer changes are smaller."""
        flight = self.num_workers * self.prefetch_factor
        return (self.num_workers, flight, self.fetch != AS_GIVEN, self.keep_memory, self.pin_memory,
                self.non_blocking, self.persistent_workers)  # fmt: skip


class Slice(msgspec.Struct, frozen=True):
    """One run of one setting. Times in seconds; the first batch of an epoch is counted apart."""

    batches: int
    rate: float
    """Batches a second within an epoch."""
    waiting: float
    """Share of the time spent waiting for the next batch."""
    fetch_p50_s: float
    """Producing one batch in one worker (or in the main process, without workers), as timed there."""
    fetch_p95_s: float
    fetch_p99_s: float
    fetch_mean_s: float
    fetch_busy: float
    """Share of producing on a processor or queueing for one: near 0 it waits (files, network), near 1 it computes."""
    fetch_system: float
    """Share of producing in the kernel."""
    fetch_pages: float
    """Pages of memory that the kernel gave for one batch: fresh ones, which it clears first."""
    cpu_share: float
    """Cores that the main process kept busy."""
    start_s: float
    """From making the iterator to the first batch: workers start here."""
    boundaries_s: list[float]
    """From the end of one epoch to the first batch of the next, where a slice met one."""
    batch_bytes: int
    worker_bytes: int
    """The most memory of its own that a worker held (USS); 0 without workers."""
    quiet: bool = True
    """Whether nobody else had the machine meanwhile."""
    load: dict[str, Any] = {}
    """What others had of it, a `Load` as plain data."""

    @property
    def fetch_fresh(self) -> float:
        """Share of producing that the kernel takes to give pages beyond those that the batch itself lies in.

        The kernel's time goes by pages here; what else it does (reading files) is counted with them.
        """
        beyond = self.fetch_pages - self.batch_bytes / _PAGE
        return self.fetch_system * max(0.0, beyond) / max(self.fetch_pages, 1.0)


class Facts(msgspec.Struct, frozen=True):
    """What the target made."""

    num_workers: int
    prefetch_factor: int
    persistent_workers: bool
    pin_memory: bool
    epoch_batches: int
    """Batches in an epoch; 0 where the loader does not know."""
    iterable: bool
    has_step: bool
    cuda: bool
    glibc: bool
    """Whether the C library can be made to keep freed memory."""
    fetches: list[str]
    """Ways to fetch rows that give the same batches as the one given."""
    notes: list[str] = []


@dataclass
class Measured:
    """One setting over its rounds, or why it failed."""

    setting: Setting
    slices: dict[int, Slice] = field(default_factory=dict)
    """Slices by round."""
    failure: str = ""
    left_out: bool = False
    """Whether it was never run: the failure says why."""
    epoch_batches: int = 0
    level: float = 0.0
    """Batches a second by comparisons side by side, at the speed that the plain loader had; 0 before it is known."""

    @property
    def rates(self) -> list[float]:
        """Batches a second with the epoch's beginning shared out, a round each."""
        return [self.whole(number) for number in self.slices]

    @property
    def rate(self) -> float:
        return statistics.median(map(self.whole, shared(self, self))) if self.slices else 0.0

    @property
    def waiting(self) -> float:
        """Share of the time spent waiting for data within an epoch."""
        waiting = [self.slices[number].waiting for number in shared(self, self)]
        return statistics.median(waiting) if waiting else math.nan

    @property
    def start_s(self) -> float:
        return self.first.start_s if self.slices else math.nan

    @property
    def restart_s(self) -> float:
        """To the first batch of a further epoch: as met, else one batch for workers that persist, else a start."""
        met = [time for item in self.slices.values() for time in item.boundaries_s]
        if met:
            return statistics.median(met)
        if self.setting.num_workers and not self.setting.persistent_workers:
            return self.start_s
        return statistics.median(item.fetch_p50_s for item in self.slices.values()) if self.slices else 0.0

    @property
    def first(self) -> Slice:
        return next(iter(self.slices.values()))

    @property
    def last(self) -> Slice:
        """The latest slice; its times of production are of the batches before it, too."""
        return self.slices[max(self.slices)]

    @property
    def able(self) -> bool:
        return bool(self.slices) and not self.failure

    def whole(self, number: int) -> float:
        """Batches a second in a round, the epoch's beginning shared out."""
        rate = self.slices[number].rate
        if self.epoch_batches <= SHORT:
            return rate
        extra = max(0.0, self.restart_s - 1 / rate)
        return self.epoch_batches / (self.epoch_batches / rate + extra)


def shared(one: Measured, other: Measured) -> list[int]:
    """The rounds that both ran: those in which nobody disturbed either, where there are two."""
    rounds = [number for number in one.slices if number in other.slices]
    quiet = [number for number in rounds if one.slices[number].quiet and other.slices[number].quiet]
    return quiet if len(quiet) > 1 else rounds


def ratio(one: Measured, other: Measured) -> float:
    """How much faster `one` is than `other`: the median over the rounds that both ran."""
    rounds = shared(one, other)
    if not rounds:
        return one.rate / other.rate if other.rate else math.inf
    return statistics.median(one.whole(number) / other.whole(number) for number in rounds)


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
