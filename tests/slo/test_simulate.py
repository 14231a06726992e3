"""The simulation against the batcher's own queue."""

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from fettle.load.arrivals import poisson
from fettle.package.settings import ServeSettings
from fettle.serve.engine.batching import BatchQueue
from fettle.slo.simulate import Costs, capacity, simulate


@dataclass(eq=False)
class Item:
    arrival_s: float
    rows: int = 1
    key: int = 0
    deadline_s: float = math.inf
    queued: bool = False


def by_queue(arrivals, setting, costs):
    """The same as `simulate`, request by request through the server's `BatchQueue`; a size always costs its median."""
    queue, curve = BatchQueue(setting), costs.curve
    latency, busy, refused, position, now = {}, [], 0, 0, 0.0
    moments = [moment + costs.request_s / 2 for moment in arrivals]
    while True:
        events = [moments[position] if position < len(moments) else math.inf, busy[0] if busy else math.inf]
        if len(busy) < setting.workers:
            events.append(max(now, queue.wake_s(now)))
        now = min(events)
        if now == math.inf:
            return [latency[index] for index in sorted(latency)], refused
        while busy and busy[0] <= now:
            heapq.heappop(busy)
        while position < len(moments) and moments[position] <= now:
            item = Item(moments[position])
            item.index = position
            refused += not queue.push(item)
            position += 1
        while len(busy) < setting.workers and (batch := queue.take(now, 1)) is not None:
            end = now + curve.at(batch.size) + costs.batch_s
            heapq.heappush(busy, end)
            for item in batch.items:
                latency[item.index] = end - item.arrival_s + costs.request_s


@given(
    gaps=st.lists(st.floats(0, 0.03), min_size=1, max_size=150),
    cost=st.lists(st.floats(0.001, 0.05), min_size=6, max_size=6),
    workers=st.integers(1, 3),
    delay_ms=st.sampled_from([0.0, 4.0, 20.0]),
    buckets=st.sampled_from([(), (2, 4, 6), (6,)]),
    bound=st.sampled_from([6, 12, 10**6]),
)
@settings(max_examples=150, deadline=None)
def test_the_simulation_does_what_the_queue_does(gaps, cost, workers, delay_ms, buckets, bound):
    setting = ServeSettings(6, delay_ms, buckets, bound, workers)
    costs = Costs({n + 1: (seconds,) for n, seconds in enumerate(cost)}, 0.002, 0.001)
    arrivals = np.cumsum(gaps)
    seen = simulate(arrivals, setting, costs)
    expected, refused = by_queue(arrivals.tolist(), setting, costs)
    assert seen.refused == refused
    assert seen.latency_s.tolist() == pytest.approx(expected)


def test_nobody_is_woken_for_a_window_that_is_over():
    """They wait for a worker then. Woken for them at once and again, the server kept a core busy until one was free."""
    queue = BatchQueue(ServeSettings(max_rows=4, delay_ms=5))
    queue.push(Item(1.0))
    assert queue.wake_s(1.002) == 1.005
    assert queue.wake_s(1.005) == queue.wake_s(2.0) == math.inf
    queue.push(Item(2.0, key=1))
    assert queue.wake_s(2.0) == 2.005
    assert queue.take(2.0, 1).items[0].arrival_s == 1.0


def test_a_call_after_a_pause_costs_what_such_calls_were_seen_to():
    costs = Costs({1: (0.01,)}, 0, 0, rested={1: (0.013,)})
    seen = simulate([0.0, 0.001, 1.0, 2.0], ServeSettings(max_rows=1), costs)
    assert seen.latency_s.tolist() == pytest.approx([0.013, 0.022, 0.013, 0.013])
    assert seen.stretch == pytest.approx(1.225)


def test_requests_that_come_during_a_call_hold_it_up():
    costs = Costs({1: (0.01,), 2: (0.015,)}, 0, 0, held_s=0.002)
    # The first call would end at 10 ms; two come meanwhile, and a third in the time that they took.
    seen = simulate([0.0, 0.004, 0.009, 0.0135], ServeSettings(max_rows=1), costs)
    assert seen.latency_s[0] == pytest.approx(0.016)
    assert seen.stretch == pytest.approx(1.15)
    assert seen.latency_s[1] == pytest.approx(0.026 - 0.004)
    setting = ServeSettings(max_rows=2)
    free, shared = (capacity(setting, replace(costs, held_s=held), 0.04)[0] for held in (0.0, 0.002))
    assert 0 < shared < 0.9 * free


@given(held=st.floats(0, 0.005), bound=st.sampled_from([3, 10**6]), rate=st.floats(20, 400))
@settings(max_examples=30, deadline=None)
def test_on_shared_cores_too_every_request_is_answered_or_refused(held, bound, rate):
    costs, setting = Costs({1: (0.01,), 4: (0.02,)}, 0, 0), ServeSettings(4, max_queue_rows=bound)
    arrivals = poisson(rate, 300 / rate)
    seen = simulate(arrivals, setting, replace(costs, held_s=held))
    assert len(seen.latency_s) + seen.refused == len(arrivals)
    assert len(seen.latency_s) == sum(rows * count for rows, count in seen.batch_rows.items())
    assert (seen.latency_s >= 0.01 - 1e-9).all()  # the difference of two times


def test_giving_up_says_no_where_waiting_to_the_end_would():
    costs = Costs({1: (0.01,), 2: (0.012,), 4: (0.016,)}, 0, 0)
    setting = ServeSettings(max_rows=4)
    for rate in (50, 100, 150, 200, 220, 240, 300):
        arrivals = poisson(rate, 20)
        whole = simulate(arrivals, setting, costs)
        hasty = simulate(arrivals, setting, costs, give_up=(0.05, 0.01 + 2 / len(arrivals)))
        assert (whole.percentile(99) <= 0.05) == (hasty.percentile(99) <= 0.05), rate


def world(cost):
    return Costs({n + 1: (float(seconds),) for n, seconds in enumerate(cost)}, 0, 0)


def test_a_capacity_is_a_rate_up_to_which_the_limit_is_kept():
    """One row takes longer than the limit and eight do not: at a heavy load alone that limit would be kept."""
    cost = (0.03, 0.03, 0.03, 0.03, 0.03, 0.03, 0.03, 0.004)
    setting = ServeSettings(max_rows=8)
    assert capacity(setting, world(cost), 0.025)[0] == 0
    found, seen = capacity(structs.replace(setting, buckets=(8,)), world(cost), 0.025)  # every call has eight rows
    assert found > 1000
    assert seen.percentile(99) <= 0.025
    slow = structs.replace(setting, delay_ms=50)  # a delay that a full batch does not wait for
    assert capacity(slow, world(cost), 0.06)[0] == 0
