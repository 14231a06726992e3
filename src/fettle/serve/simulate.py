"""A server in simulated time: the batcher's own queue, measured service times, and arrivals; latencies come out.

What the real batcher decides with, `BatchQueue`, decides here too: a setting is predicted by the code that serves it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fettle.serve.policy import BatchQueue, BatchSettings, CostCurve


@dataclass(frozen=True)
class Costs:
    """What a call costs: for each measured batch size its samples, in seconds, and what serving adds around it."""

    samples: dict[int, tuple[float, ...]]
    request_s: float = 0.0005
    """From the client to the queue and back, a request: HTTP, parsing, the answer."""
    batch_s: float = 0.0002
    """To the worker and back, a batch."""

    def curve(self) -> CostCurve:
        """Medians, for the policy."""
        rows = sorted(self.samples)
        return CostCurve(tuple(rows), tuple(float(np.median(self.samples[n])) for n in rows))


@dataclass(slots=True, eq=False)
class _Item:
    arrival_s: float
    rows: int = 1
    key: Hashable = 0
    deadline_s: float = math.inf
    queued: bool = False


@dataclass
class Predicted:
    """What the simulation saw. Seconds."""

    latency_s: np.ndarray[Any, Any]
    batch_rows: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    utilisation: float = 0.0
    """Share of the time that workers were busy."""
    stable: bool = True
    """The queue did not only grow."""

    def percentile(self, percent: float) -> float:
        """Of the latency; infinite where nothing was answered or the queue only grew."""
        if not len(self.latency_s) or not self.stable:
            return math.inf
        return float(np.percentile(self.latency_s, percent))


def simulate(
    arrivals: Sequence[float] | np.ndarray[Any, Any], settings: BatchSettings, costs: Costs, seed: int = 0
) -> Predicted:
    """Serve `arrivals` (seconds, ascending; a row each) with these settings.

    Service times of a size are drawn from its samples; of a size that was not measured, from the nearest measured
    one's, scaled by the curve.
    """
    queue: BatchQueue[_Item] = BatchQueue(settings, costs.curve())
    draw = _service(costs, settings, np.random.default_rng(seed))
    latency: list[float] = []
    sizes: dict[int, int] = {}
    busy: list[float] = []  # when each busy worker is free
    working, refused, position, now, end = 0.0, 0, 0, 0.0, 0.0
    count = len(arrivals)
    # A request is in the queue when it has been read, and answered when it has been written.
    before, after = costs.request_s / 2, costs.request_s / 2
    while True:
        moments = [arrivals[position] + before if position < count else math.inf, busy[0] if busy else math.inf]
        if len(busy) < settings.workers:
            moments.append(max(now, queue.wake_s()))
        now = min(moments)
        if now == math.inf:
            break
        while busy and busy[0] <= now:
            heapq.heappop(busy)
        while position < count and arrivals[position] + before <= now:
            if not queue.push(_Item(float(arrivals[position]))):
                refused += 1
            position += 1
        while len(busy) < settings.workers:
            batch = queue.take(now, settings.workers - len(busy))
            if batch is None:
                break
            took = draw(batch.size) + costs.batch_s
            heapq.heappush(busy, now + took)
            working += took
            end = max(end, now + took)
            sizes[batch.rows] = sizes.get(batch.rows, 0) + 1
            latency += [now + took + after - item.arrival_s for item in batch.items]
    found = np.array(latency)
    span = max(end - float(arrivals[0]), 1e-9) if count else 1e-9
    half = len(found) // 2
    # The second half waits much longer than the first: the queue has no steady state.
    growing = half > 50 and found[half:].mean() > 2.0 * found[:half].mean() + 10 * costs.curve().at(1)
    return Predicted(found, sizes, refused, working / span / settings.workers, not growing and refused == 0)


def _service(costs: Costs, settings: BatchSettings, random: np.random.Generator) -> Callable[[int], float]:
    curve = costs.curve()
    measured = sorted(costs.samples)
    pools: dict[int, list[float]] = {}

    def fill(size: int) -> list[float]:
        near = min(measured, key=lambda n: (abs(n - size), n))
        scale = curve.at(size) / curve.at(near)
        return (random.choice(np.asarray(costs.samples[near]), 512) * scale).tolist()  # type: ignore[no-any-return]

    def draw(size: int) -> float:
        pool = pools.get(size)
        if not pool:
            pool = pools[size] = fill(size)
        return pool.pop()

    return draw


def capacity(
    settings: BatchSettings, costs: Costs, limit_s: float, *, percent: float = 99.0, requests: int = 4000,
    seed: int = 0, utilisation: float = 0.9,
) -> tuple[float, Predicted | None]:  # fmt: skip
    """The greatest Poisson rate (a second) at which the percentile stays within the limit, by bisection to 1%.

    Rates that keep the workers busier than `utilisation` are not believed: close to saturation a simulation is
    optimistic, and so are its users. 0 where even an idle server is too slow.
    """
    from fettle.serve.load import poisson

    curve = costs.curve()
    best = max(n / (curve.at(n) + costs.batch_s) for n in range(1, settings.max_rows + 1)) * settings.workers
    unit = poisson(1.0, requests * 1.2, seed)[:requests]

    def good(rate: float) -> Predicted | None:
        seen = simulate(unit / rate, settings, costs, seed)
        # A full queue of large batches is cheap a row: utilisation is judged by rows against the best rate.
        return seen if seen.percentile(percent) <= limit_s and rate <= utilisation * best else None

    low, high = 0.02 * best, best
    found = good(low)
    if found is None:
        return 0.0, None
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        seen = good(middle)
        if seen is None:
            high = middle
        else:
            low, found = middle, seen
    return low, found
