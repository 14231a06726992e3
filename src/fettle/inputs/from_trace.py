"""What a profiled loop waited for its data: from a trace, after the fact."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fettle.errors import UsageError
from fettle.trace import load, steps


@dataclass(frozen=True)
class Waits:
    """The steps of one trace. Times in seconds, medians over steps."""

    name: str
    steps: int
    step_s: float
    wait_s: float
    """Time of a step in which the main thread is in the loader's `__next__`."""
    waiting: float
    """Share of a step, its median."""

    @property
    def bound(self) -> float:
        """The most that removing the wait could bring: 1 / (1 - waiting)."""
        return 1 / max(1e-9, 1 - self.waiting)


def waits_in_trace(path: Path) -> Waits:
    """The waiting of a trace's steps (`profiler.step()`). Raises `UsageError` where it has no steps or no loader."""
    trace = load(path)
    windows = steps(trace)
    codes = [code for code, name in enumerate(trace.names) if name.startswith("enumerate(DataLoader)")]
    rows = np.flatnonzero(np.isin(trace.column("name"), codes) & trace.is_host)
    if not windows.height:
        raise UsageError(f"{path} has no steps: call .step() on the profiler after each")
    if not len(rows):
        raise UsageError(f"{path} has no range of a DataLoader: profile the loop with the loader in it")
    begins, ends = trace.ts[rows], trace.end[rows]
    waits, times = [], []
    for start, end in zip(windows["start_ns"].to_list(), windows["end_ns"].to_list(), strict=True):
        if end > start:
            waits.append(float(np.clip(np.minimum(ends, end) - np.maximum(begins, start), 0, None).sum()) / 1e9)
            times.append((end - start) / 1e9)
    shares = [wait / time for wait, time in zip(waits, times, strict=True)]
    return Waits(
        path.name, len(times), statistics.median(times), statistics.median(waits), min(1.0, statistics.median(shares))
    )


def compare_text(waits: Sequence[Waits]) -> list[str]:
    """One trace as a sentence, or two with what was reached against the bound."""
    lines = [
        f"{item.name}: {item.wait_s * 1e3:.1f} of {item.step_s * 1e3:.1f} ms a step are waiting for data "
        f"({item.waiting:.1%}, {item.steps} steps); removing it brings at most {item.bound:.2f}x."
        for item in waits
    ]
    if len(waits) == 2:
        before, after = waits
        reached = before.step_s / after.step_s
        kept = "within" if reached <= before.bound else "beyond: something else changed, too,"
        lines.append(f"Reached: {reached:.2f}x, {kept} the bound of {before.bound:.2f}x.")
    return lines
