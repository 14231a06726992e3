"""The cost curve: how long a model takes for a batch of so many rows, as measured, samples and all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median


@dataclass(frozen=True)
class CostCurve:
    """Seconds per batch by rows. Real curves have steps, so nothing is fitted: points between are interpolated."""

    rows: tuple[int, ...]
    """Batch sizes that were measured, ascending."""
    samples: tuple[tuple[float, ...], ...]
    """The measured seconds of one call, for each of `rows`."""
    machine: Mapping[str, str] = field(default_factory=dict)
    """Where it was measured: ``id`` (comparable where equal) and ``summary``."""

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.samples) or not all(self.samples):
            raise ValueError("a cost curve needs at least one batch size, and samples for each")
        if any(b <= a for a, b in zip(self.rows, self.rows[1:], strict=False)) or self.rows[0] < 1:
            raise ValueError("the batch sizes of a cost curve ascend from at least 1")

    def seconds(self, rows: int) -> float:
        """Median seconds of a batch of `rows`, linear between the measured sizes and from the last two beyond them."""
        medians = [median(sample) for sample in self.samples]
        return _interpolate(self.rows, medians, rows)

    def table(self, most: int) -> list[float]:
        """`seconds(n)` for n = 0..most (0 rows cost nothing): what a policy and a simulation look up."""
        return [0.0, *(self.seconds(n) for n in range(1, most + 1))]


def _interpolate(rows: Sequence[int], seconds: Sequence[float], n: int) -> float:
    if n <= rows[0] or len(rows) == 1:
        return seconds[0] if n <= rows[0] else seconds[0] * n / rows[0]
    right = min(max(bisect_left(rows, n), 1), len(rows) - 1)
    x0, x1, y0, y1 = rows[right - 1], rows[right], seconds[right - 1], seconds[right]
    return max(y0 + (y1 - y0) * (n - x0) / (x1 - x0), 0.0)
