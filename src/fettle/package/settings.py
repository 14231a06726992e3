"""How one model is served: the knobs of its batcher and workers, as ``serve.toml`` holds them."""

from __future__ import annotations

import itertools
import logging
import math
import re
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import msgspec
import tomli_w

log = logging.getLogger("fettle.serve.settings")
MAX_ROWS, MAX_WORKERS, MAX_THREADS = 1 << 14, 256, 1024
"""What a package may ask for: batches as large, as many processes, and threads of each."""
EACH_WARM = 32
"""Up to so many rows each size is warmed up, beyond it powers of two and the most."""
_DEVICE = re.compile(r"[a-z]{2,16}(:\d{1,3})?")


class CostCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one call costs by its number of rows, measured: seconds for each of the batch sizes in `rows`."""

    rows: tuple[int, ...]
    """Increasing, at least 1."""
    seconds: tuple[float, ...]
    machine: str = ""
    """`fettle.package.host.host_id` where it was measured: elsewhere it is not believed."""

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ValueError("a cost curve needs as many times as batch sizes, at least one")
        if self.rows[0] < 1 or any(b <= a for a, b in itertools.pairwise(self.rows)):
            raise ValueError("the batch sizes of a cost curve must increase from 1 or more")
        if any(not math.isfinite(value) or value <= 0 for value in self.seconds):
            raise ValueError("the times of a cost curve must be positive numbers")

    def at(self, rows: int) -> float:
        """Seconds for a call with that many rows: measured, else interpolated; beyond the last in proportion."""
        index = bisect_left(self.rows, rows)
        if index == len(self.rows):
            return self.seconds[-1] * rows / self.rows[-1]
        if self.rows[index] == rows or index == 0:
            return self.seconds[index]
        low, high = self.rows[index - 1], self.rows[index]
        share = (rows - low) / (high - low)
        return self.seconds[index - 1] * (1 - share) + self.seconds[index] * share


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ``serve.toml`` says. ValueError for what cannot be."""

    max_rows: int = 8
    """Most rows in one call. A single request may not have more."""
    delay_ms: float = 0.0
    """How long the first request of a batch may wait for others while a worker is free; 0 never lets one idle."""
    buckets: tuple[int, ...] = ()
    """Where not empty: a call has one of these numbers of rows, filled up with padding (compiled shapes, graphs)."""
    max_queue_rows: int = 1024
    """Rows that may wait; beyond it requests are refused."""
    workers: int = 1
    threads: int = 0
    """Threads of each worker; 0: the machine's cores divided among the workers."""
    devices: tuple[str, ...] = ("cpu",)
    """Where the workers are, one after the other: ``["cuda:0", "cuda:1"]`` with two workers is one on each."""
    timeout_ms: float = 30_000.0
    """The longest that a request may take where it does not say itself, and the longest that a batch may take."""
    max_worker_bytes: int = 0
    """A worker that has grown beyond this is replaced between two batches; 0: never."""
    cache_bytes: int = 0
    """For a model that writes texts, the most that each worker keeps of keys and values. Fewer texts are written at
    once than `max_rows` where they do not fit. 0: half of the memory that is free when it is loaded, divided among the
    workers of its device."""
    prefill_tokens: int = 256
    """Tokens of prompts that are computed before the texts that are being written go on."""
    limit_ms: float = 0.0
    """The latency limit that these settings were chosen for: slower answers are counted. 0: none."""
    curve: CostCurve | None = None
    """What calls cost on the machine that the settings were chosen on."""

    def __post_init__(self) -> None:
        if not (1 <= self.max_rows <= MAX_ROWS and 1 <= self.workers <= MAX_WORKERS and self.max_queue_rows >= 1):
            raise ValueError(
                f"max_rows is 1 to {MAX_ROWS}, workers is 1 to {MAX_WORKERS}, max_queue_rows is at least 1"
            )
        if not 0 <= self.delay_ms < math.inf:
            raise ValueError("delay_ms must be a number of milliseconds, 0 or more")
        if self.buckets and (self.buckets[0] < 1 or any(b <= a for a, b in itertools.pairwise(self.buckets))):
            raise ValueError("buckets must increase from 1 or more")
        if self.buckets and self.buckets[-1] < self.max_rows:
            raise ValueError("the largest bucket must hold max_rows")
        if not self.devices or not all(_DEVICE.fullmatch(device) for device in self.devices):
            raise ValueError('devices are named as torch does: "cpu", "cuda", "cuda:1"')
        if not (0 <= self.threads <= MAX_THREADS and 0 < self.timeout_ms < 1e9 and 0 <= self.limit_ms < math.inf):
            raise ValueError(f"threads is 0 to {MAX_THREADS}, timeout_ms a time, limit_ms 0 or more")
        if self.cache_bytes < 0 or self.prefill_tokens < 1:
            raise ValueError("cache_bytes is 0 or more, prefill_tokens 1 or more")

    def call_rows(self, rows: int) -> int:
        """Rows of the call that carries so many: where only some sizes exist, the next of them, if there is one."""
        return next((size for size in self.buckets if size >= rows), rows) if self.buckets else rows

    def warm_sizes(self, most: int) -> list[int]:
        """Sizes of calls of up to `most` rows that are run before any client's: of many that may come not all are, as
        that would take minutes."""
        rows = range(1, most + 1)
        return sorted({self.call_rows(n) for n in (rows if self.buckets else [*rows[:EACH_WARM], *powers(most)])})

    def cost_curve(self, machine: str) -> CostCurve | None:
        """The measured curve, if it is of this machine."""
        return self.curve if self.curve is not None and self.curve.machine in ("", machine) else None

    def row_s(self, machine: str) -> float:
        """Seconds a row costs at the best batch size with all workers busy; 0 where that was not measured here."""
        curve = self.cost_curve(machine)
        if curve is None:
            return 0.0
        return min(curve.at(self.call_rows(n)) / n for n in range(1, self.max_rows + 1)) / self.workers


def settings_from(data: Mapping[str, Any], where: str) -> ServeSettings:
    """Settings out of plain data. ValueError for what cannot be.

    Earlier versions could batch and pad by the cost curve: `where` says in a warning which settings still ask for it.
    """
    kept = {key: value for key, value in data.items() if key not in ("policy", "pad")}
    policy = data.get("policy", "greedy")
    if policy not in ("greedy", "curve"):
        raise ValueError(f"no such policy: {policy!r}")
    if (policy == "curve" and data.get("curve")) or data.get("pad"):
        log.warning("%s: no batching by the cost curve now, batches are greedy: fettle serve slo finds max_rows", where)
    return msgspec.convert(kept, ServeSettings)


def powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`, and that."""
    return sorted({most, *(2**power for power in range(most.bit_length()))})


def as_toml(settings: ServeSettings) -> str:
    """``serve.toml`` with these settings."""
    return tomli_w.dumps({key: value for key, value in msgspec.to_builtins(settings).items() if value is not None})
