"""What a profiled loop waited for its data: from a trace, after the fact."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from fettle.errors import UsageError
from fettle.trace import load, loader_waits, steps
from fettle.units import count_text


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
    """The waiting of a trace's steps. Raises `UsageError` where it has no steps or no loader."""
    trace = load(path)
    if steps(trace)["step"][0] < 0:
        raise UsageError(f"{path} has no steps: give the profiler a schedule, and call its .step() after each step")
    waits = loader_waits(trace).filter(pl.col("wall_ns") > 0)
    if not waits.height:
        raise UsageError(f"{path} has no range of a DataLoader: profile the loop with the loader in it")
    wall_s, wait_s = ((waits[name] / 1e9).to_list() for name in ("wall_ns", "wait_ns"))
    share = statistics.median(wait / wall for wait, wall in zip(wait_s, wall_s, strict=True))
    return Waits(path.name, waits.height, statistics.median(wall_s), statistics.median(wait_s), min(1.0, share))


def compare_text(waits: Sequence[Waits]) -> list[str]:
    """One trace as a sentence, or two with what was reached against the bound."""
    lines = [
        f"{item.name}: {item.wait_s * 1e3:.1f} of {item.step_s * 1e3:.1f} ms a step are waiting for data "
        f"({item.waiting:.1%}, {count_text(item.steps, 'step')}); removing it brings at most {item.bound:.2f}x."
        for item in waits
    ]
    if len(waits) == 2:
        before, after = waits
        reached = before.step_s / after.step_s
        kept = "within" if reached <= before.bound else "beyond: something else changed, too,"
        lines.append(f"Reached: {reached:.2f}x, {kept} the bound of {before.bound:.2f}x.")
    return lines
