"""Every setting that can be tried, simulated: a few milliseconds each, where a load test takes seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from fettle.package.settings import powers
from fettle.slo.overheads import Overheads
from fettle.slo.points import Branch, Measured, Point, Setting
from fettle.slo.simulate import capacity
from fettle.units import count_text

DELAYS = (0.0, 0.25)
"""Waiting for a fuller batch, as shares of the cost of one row."""
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ALIKE = 0.02
"""Predictions within this share are as good as equal: the simpler setting goes first then, with fewer workers,
no delay, and smaller batches, of which a slow moment of the machine makes fewer requests late."""
Known = dict[tuple[Branch, float, float, Overheads | None], list[Point]]
"""Points by what they follow from: a branch, the limit, and what its costs were corrected by and lie within."""


def worker_splits(cores: int, device: str = "cpu") -> list[tuple[int, int]]:
    """Workers and threads of each: all cores to one worker, then divided; also one core left for the front end.

    Workers that share another device than the CPU need a core each, to hand it work.
    """
    if device != "cpu":
        return [(workers, 1) for workers in (1, 2) if workers <= max(cores, 1)]
    splits = [(workers, cores // workers) for workers in powers(cores)]
    return splits + ([(1, cores - 1)] if cores > 1 else [])


def between(workers: int, known: Sequence[int]) -> list[int]:
    """Numbers of workers halfway to the neighbours among those `known`."""
    place = known.index(workers)
    near = [known[i] for i in (place - 1, place + 1) if 0 <= i < len(known)]
    return sorted({(workers + other) // 2 for other in near} - set(known))


def rank(
    branches: Iterable[Measured], limit_s: float, on_progress: Callable[[str], None] = lambda text: None,
    known: Known | None = None,
) -> list[Point]:  # fmt: skip
    """Every setting, simulated; best first. What is in `known` is not simulated again, what is simulated goes there."""
    points: list[Point] = []
    known = {} if known is None else known
    for measured in branches:
        key = (measured.branch, limit_s, measured.scale, measured.known_overheads)
        if key not in known:
            known[key] = _simulated(measured, limit_s)
        points += [replace(point) for point in known[key]]
        on_progress(f"{count_text(len(points), 'setting')} simulated")
    best = max((point.predicted for point in points), default=0.0)

    def place(point: Point) -> tuple[float, int, float, int, float]:
        behind = math.floor(math.log(best / point.predicted) / ALIKE) if point.predicted else math.inf
        setting = point.setting
        return behind, setting.workers, setting.delay_s, setting.max_rows, -point.predicted

    return sorted(points, key=place)


def _simulated(measured: Measured, limit_s: float) -> list[Point]:
    own, costs = measured.settings, measured.costs
    fixed = vars(measured.branch) | {"buckets": own.buckets, "max_queue_rows": own.max_queue_rows}
    curve = costs.curve
    points = []
    for rows in (size for size in ROWS if size <= min(curve.rows[-1], measured.most_rows)):
        for delay in DELAYS if rows > 1 else DELAYS[:1]:
            setting = Setting(**fixed, max_rows=rows, delay_s=delay * curve.at(1))
            best, outcome = capacity(setting.batching(), costs, limit_s)
            points.append(Point(setting, best, predicted_p50_s=outcome.percentile(50) if outcome else math.nan))
    return points
