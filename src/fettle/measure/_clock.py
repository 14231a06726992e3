"""The clock: how long one call takes, on a CPU and on a GPU.

CPU work is timed by the wall clock, and so is that of accelerators other than NVIDIA's and AMD's GPUs, which are waited
for before and after a call. GPU work is timed with CUDA events around each call, the device idle before and
after it, so host time that the device waits for counts; the L2 cache is flushed before each call, because in service
a model does not find its last input there. A model that lies on several GPUs is timed by the wall clock, for events are
those of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fettle.measure._lockstep import agreed
from fettle.workload import wait_for


class Clock:
    """Times calls on a device, or on several `gpus`. `time_ns(function)` returns nanoseconds of one call."""

    def __init__(self, device: str, gpus: Sequence[int] = ()) -> None:
        self._device, self._gpus = device, gpus
        self.held_bytes = 0
        """What it holds of the device's memory."""
        self._has_events = device == "cuda" and len(gpus) < 2 and torch.cuda.is_available()
        if self._has_events:
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            size = max(int(getattr(properties, "L2_cache_size", 0)), 1 << 20)
            self.held_bytes = 2 * size
            self._flush = torch.empty(self.held_bytes, dtype=torch.int8, device="cuda")
            self._start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def time_ns(self, function: Callable[[], Any]) -> int:
        """Run `function` once and return its time."""
        if not self._has_events:
            self.synchronize()
            start = time.perf_counter_ns()
            function()
            self.synchronize()
            return time.perf_counter_ns() - start
        self._flush.zero_()
        torch.cuda.synchronize()
        self._start.record()
        function()
        self._end.record()
        self._end.synchronize()
        return max(1, int(self._start.elapsed_time(self._end) * 1e6))  # of nothing it may be 0

    def synchronize(self) -> None:
        """Wait until the device has done everything it was given."""
        for gpu in self._gpus:
            torch.cuda.synchronize(gpu)
        if not self._gpus and self._device != "cpu":
            wait_for(self._device)


def warm_up(call: Callable[[], int], earlier: Sequence[int] = ()) -> tuple[list[int], bool]:
    """Call until the time is steady. `call` makes one call and returns its nanoseconds, as `earlier` ones took.

    Returns the samples and whether they became steady (`is_steady`) within 10 s.
    """
    samples = list(earlier)
    deadline = time.perf_counter() + 10.0
    while True:
        samples.append(call())
        if is_steady(samples):
            return samples, True
        if agreed(time.perf_counter() > deadline):
            return samples, False


def is_steady(samples_ns: Sequence[int]) -> bool:
    """Whether the median of the newest third of what was timed is within 2% of that of the third before it, or not
    lower."""
    size = len(samples_ns) // 3
    if size < 1:
        return False
    fewest = int(0.3e9 / max(samples_ns[-1], 1))  # 0.3 s of calls
    if len(samples_ns) < max(3, min(30, fewest)):
        return False
    newest = sorted(samples_ns[-size:])[size // 2]
    return newest >= sorted(samples_ns[-2 * size : -size])[size // 2] * 0.98
