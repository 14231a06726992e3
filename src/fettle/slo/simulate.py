"""A server in simulated time: the batcher's own decisions, measured service times, and arrivals; latencies come out.

The loop below is `BatchQueue` for requests of one row that may all share a call: it looks at batches instead of
requests, which is what makes a search of hundreds of settings a matter of seconds. A test shows that both do the same.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from fettle.load.arrivals import poisson
from fettle.package.settings import CostCurve, ServeSettings

T = TypeVar("T")
IDLE = 0.02
"""Share of the rate that calls of one row allow: a server with so little to do is almost idle."""
BUSIEST = 0.9
"""Share of the best rate of the workers beyond which no simulation is believed."""


@dataclass(frozen=True)
class Costs:
    """What a call costs: for each measured batch size its samples, in seconds, and what serving adds around it."""

    samples: dict[int, tuple[float, ...]]
    request_s: float = 0.0005
    """From the client to the queue and back, a request: HTTP, parsing, the answer."""
    batch_s: float = 0.0002
    """To the worker and back, a batch."""
    rested: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """Samples of calls that come after a pause, where those differ: then caches are cold and clocks low."""
    held_s: float = 0.0
    """How much longer a request that comes during a call makes it: it is read and answered on the model's cores."""

    @cached_property
    def curve(self) -> CostCurve:
        """Medians."""
        rows = sorted(self.samples)
        return CostCurve(tuple(rows), tuple(float(np.median(self.samples[n])) for n in rows))


@dataclass
class Predicted:
    """What the simulation saw. Seconds."""

    latency_s: np.ndarray[Any, Any]
    """In the order of arrival."""
    batch_rows: dict[int, int] = field(default_factory=dict)
    refused: int = 0
    utilisation: float = 0.0
    """Share of the time that workers were busy."""
    stretch: float = 1.0
    """Time of all calls over what the curve's medians say: they scatter, come after pauses and are held up."""
    stable: bool = True
    """The queue did not only grow."""

    def percentile(self, percent: float) -> float:
        """A percentile of the latency; infinite where nothing was answered or the queue only grew."""
        if not len(self.latency_s) or not self.stable:
            return math.inf
        return float(np.percentile(self.latency_s, percent))


def simulate(
    arrivals: Sequence[float] | np.ndarray[Any, Any], settings: ServeSettings, costs: Costs, *,
    give_up: tuple[float, float] | None = None,
) -> Predicted:  # fmt: skip
    """Serve `arrivals` (seconds, ascending; a row each) with these settings.

    Service times of a size are drawn from its samples; of a size that was not measured, from the nearest measured
    one's, scaled by the curve. `give_up` (seconds, share) ends early, as not stable, once more than that share of all
    requests has waited longer: who only asks whether a percentile is kept need not see the rest.
    """
    most, call_rows = settings.max_rows, settings.call_rows
    delay_s, bound, held_s = settings.delay_ms / 1e3, settings.max_queue_rows, costs.held_s
    draw = _service(costs, np.random.default_rng(0))
    # A request is in the queue when it has been read, and answered when it has been written.
    before = costs.request_s / 2
    queued: list[float] = (np.asarray(arrivals, dtype=float) + before).tolist()
    free = [-math.inf] * settings.workers  # when each worker is free
    done: list[float] = []  # of each batch
    rows_of: list[int] = []
    first, refused, working, late = 0, 0, 0.0, 0
    longest, allowed = (give_up[0] - costs.request_s, give_up[1] * len(queued)) if give_up else (math.inf, math.inf)
    count = len(queued)
    while first < count:
        now = max(free[0], queued[first])
        arrived = bisect_right(queued, now, first)
        if delay_s > 0:
            now, arrived = _waited(queued, first, arrived, now, delay_s, most)
        waiting = arrived - first
        if waiting > bound:  # the queue was full: the last to come were refused
            refused += waiting - bound
            del queued[first + bound : arrived]
            count, waiting, arrived = len(queued), bound, first + bound
        rows = min(waiting, most)
        took = draw(call_rows(rows), now > free[0]) + costs.batch_s
        end = now + took
        if held_s:
            end = _held(queued, arrived, end, held_s)
            took = end - now
        heapq.heapreplace(free, end)
        working += took
        done.append(end)
        rows_of.append(rows)
        if end - queued[first] > longest:
            late += bisect_right(queued, end - longest, first, first + rows) - first
            if late > allowed:
                return Predicted(np.array([]), {}, refused, 1.0, stable=False)
        first += rows
    waits = np.repeat(done, rows_of) - np.array(queued) + costs.request_s
    sizes, how_often = np.unique(np.array(rows_of, dtype=int), return_counts=True)
    batch_rows = dict(zip(sizes.tolist(), how_often.tolist(), strict=True))
    by_curve = sum(costs.curve.at(call_rows(rows)) * count for rows, count in batch_rows.items())
    span = max(max(done, default=0.0) - (queued[0] - before if queued else 0.0), 1e-9)
    half = len(waits) // 2
    # The second half waits much longer than the first: the queue has no steady state.
    growing = half > 50 and waits[half:].mean() > 2.0 * waits[:half].mean() + 10 * costs.curve.at(1)
    return Predicted(
        waits, batch_rows, refused,
        working / span / settings.workers, float((working - costs.batch_s * len(done)) / by_curve) if done else 1.0,
        bool(not growing and refused == 0),
    )  # fmt: skip


def _waited(queued: list[float], first: int, arrived: int, now: float, delay_s: float, most: int) -> tuple[float, int]:
    """When the batch that begins with `first` goes, a worker being free from `now` on, and what has come by then."""
    until = queued[first] + delay_s
    while now < until and arrived - first < most:
        now = min(until, queued[arrived]) if arrived < len(queued) else until
        arrived = bisect_right(queued, now, arrived)
    return now, arrived


def _held(queued: list[float], arrived: int, end: float, held_s: float) -> float:
    """When a call ends that each request coming during it holds up by `held_s`; `arrived` is the first that may."""
    last = len(queued)
    while arrived < last and queued[arrived] < end:
        arrived, end = arrived + 1, end + held_s
    return end


def _service(costs: Costs, random: np.random.Generator) -> Callable[[int, bool], float]:
    """Draws the seconds of a call of a size, after a pause or right after another one."""
    curve = costs.curve
    pools: dict[tuple[int, bool], list[float]] = {}

    def draw(size: int, rested: bool) -> float:
        pool = pools.get((size, rested))
        if not pool:
            samples = costs.rested if rested and costs.rested else costs.samples
            near = min(samples, key=lambda n: (abs(n - size), n))
            scale = curve.at(size) / curve.at(near)
            pool = pools[size, rested] = (random.choice(np.asarray(samples[near]), 512) * scale).tolist()
        return pool.pop()

    return draw


def capacity(
    settings: ServeSettings, costs: Costs, limit_s: float, *, requests: int = 4000
) -> tuple[float, Predicted | None]:
    """The greatest Poisson rate (a second) up to which the 99th percentile stays within the limit, to 1%.

    Up to it, not only at it: traffic is lower at times, and where a batch costs less than one row, or a delay is long,
    a server can be slower with little to do than with much. So rates are tried from that of an almost idle server on,
    each twice the last, and between the last good one and the first bad one by bisection.

    Rates that keep the workers busier than `BUSIEST` are not believed: close to saturation a simulation is
    optimistic, and so are its users. 0 where even an almost idle server is too slow.
    """
    curve, sizes = costs.curve, range(1, settings.max_rows + 1)
    rates = [n / (curve.at(settings.call_rows(n)) + costs.batch_s) * settings.workers for n in sizes]
    # Rows cost less in the large batches of a full queue: utilisation is rows over the best rate, not time.
    top = BUSIEST * max(rates)
    unit = poisson(1.0, requests * 1.2)[:requests]

    def good(rate: float) -> Predicted | None:
        outcome = simulate(unit / rate, settings, costs, give_up=(limit_s, 0.01 + 2 / requests))
        return outcome if outcome.percentile(99) <= limit_s else None

    return greatest_rate(good, IDLE * rates[0], top, 1.01)


def greatest_rate(good: Callable[[float], T | None], first: float, top: float, close: float) -> tuple[float, T | None]:
    """The greatest rate up to which `good` has an outcome, to a factor of `close`, and that outcome: doubled from
    `first` to `top`, then by bisection. 0 where it has none at `first`."""
    low, high, best = 0.0, first, None
    while (outcome := good(high)) is not None:
        low, best = high, outcome
        if high == top:
            return low, best
        high = min(2 * high, top)
    while best is not None and high / low > close:
        middle = math.sqrt(low * high)
        outcome = good(middle)
        if outcome is None:
            high = middle
        else:
            low, best = middle, outcome
    return low, best
