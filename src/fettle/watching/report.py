"""What a watch reports when it ends."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from fettle.files import plain


@dataclass(frozen=True)
class SlowStep:
    """A step that took much longer than the others."""

    number: int
    wall_ms: float
    median_ms: float
    """Median of the steps before it."""
    largest_part: str
    trace: str | None = None
    """The file with the stacks sampled while it went on."""
    hottest: str | None = None
    """The source line most often on top of the loop's own code in those samples, with its share."""


@dataclass(frozen=True)
class StepReport:
    """Where the time of the watched steps went. The parts add up to the wall time."""

    steps: int
    wall_s: float
    data_s: float
    sync_s: float
    gc_s: float
    host_s: float
    median_ms: float
    p95_ms: float
    first_ms: float
    """The first step, which is in the sums but not in median and percentile: it loads and compiles."""
    syncs_per_step: float | None
    """None without a device."""
    device_idle: float | None
    """Share of the time in which no kernel ran, by NVML (any process's kernels count); None where NVML does not say."""
    data_bound: float
    """The most that a faster input could bring: wall time over wall time without waiting for data."""
    slow: tuple[SlowStep, ...] = ()

    def to_json(self) -> str:
        """All of it as JSON; what is infinite is null."""
        return json.dumps(plain(self), indent=1)

    def __str__(self) -> str:
        if not self.steps:
            return "no steps were seen: loop over a DataLoader or a step_timer, or call step() at the end of each"
        rows = [("data", self.data_s), ("sync", self.sync_s), ("gc", self.gc_s), ("host", self.host_s)]
        lines = [
            f"{self.steps} steps in {self.wall_s:.2f} s: median {self.median_ms:.2f} ms, "
            f"95% within {self.p95_ms:.2f} ms, the first {self.first_ms:.2f} ms"
        ]
        for name, seconds in rows:
            share = seconds / self.wall_s if self.wall_s else 0.0
            lines.append(
                f"  {name:<5}{'█' * round(30 * share):<31}{share:6.1%}  {seconds / self.steps * 1e3:9.3f} ms a step"
            )
        if self.syncs_per_step is not None:
            lines.append(f"  {self.syncs_per_step:.1f} calls a step made the host wait for the device")
        if self.device_idle is not None:
            lines.append(f"  no kernel ran for {self.device_idle:.0%} of the time (NVML)")
        if math.isfinite(self.data_bound) and self.data_bound > 1.05:
            lines.append(f"  a faster input could make it at most {self.data_bound:.2f}x as fast")
        for step in self.slow:
            lines.append(
                f"  step {step.number} took {step.wall_ms:.1f} ms, "
                f"{step.wall_ms / step.median_ms:.1f} times the median, mostly {step.largest_part}"
                + (f", at {step.hottest}" if step.hottest else "")
                + (f" -> {step.trace}" if step.trace else "")
            )
        return "\n".join(lines)
