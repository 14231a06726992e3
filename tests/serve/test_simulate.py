"""The simulation against the batcher's own queue, and the curve policy against the greedy one."""

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.serve.load import poisson
from fettle.serve.policy import BatchQueue, BatchSettings, CostCurve, plan
from fettle.serve.simulate import Costs, capacity, simulate


@dataclass(eq=False)
class Item:
    arrival_s: float
    rows: int = 1
    key: int = 0
    deadline_s: float = math.inf
    queued: bool = False


def by_queue(arrivals, setting, costs):
    """The same as `simulate`, request by request through the server's `BatchQueue`; a size always costs its median."""
    queue, curve = BatchQueue(setting, costs.curve()), costs.curve()
    latency, busy, refused, position, now = {}, [], 0, 0, 0.0
    moments = [moment + costs.request_s / 2 for moment in arrivals]
    while True:
        events = [moments[position] if position < len(moments) else math.inf, busy[0] if busy else math.inf]
        if len(busy) < setting.workers:
            events.append(max(now, queue.wake_s()))
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
    policy=st.sampled_from(["greedy", "curve"]),
    delay=st.sampled_from([0.0, 0.004, 0.02]),
    pad=st.booleans(),
    buckets=st.sampled_from([(), (2, 4, 6), (6,)]),
    bound=st.sampled_from([6, 12, 10**6]),
)
@settings(max_examples=150, deadline=None)
def test_the_simulation_does_what_the_queue_does(gaps, cost, workers, policy, delay, pad, buckets, bound):
    setting = BatchSettings(6, delay, policy, pad, buckets, bound, workers)
    costs = Costs({n + 1: (seconds,) for n, seconds in enumerate(cost)}, 0.002, 0.001)
    arrivals = np.cumsum(gaps)
    seen = simulate(arrivals, setting, costs)
    expected, refused = by_queue(arrivals.tolist(), setting, costs)
    assert seen.refused == refused
    assert seen.latency_s.tolist() == pytest.approx(expected)


def test_giving_up_says_no_where_waiting_to_the_end_would():
    costs = Costs({1: (0.01,), 2: (0.012,), 4: (0.016,)}, 0, 0)
    setting = BatchSettings(max_rows=4)
    for rate in (50, 100, 150, 200, 220, 240, 300):
        arrivals = poisson(rate, 20)
        whole = simulate(arrivals, setting, costs)
        hasty = simulate(arrivals, setting, costs, give_up=(0.05, 0.01 + 2 / len(arrivals)))
        assert (whole.percentile(99) <= 0.05) == (hasty.percentile(99) <= 0.05), rate


curves = st.lists(st.floats(0.002, 0.05), min_size=8, max_size=8)
rising = curves.map(sorted)


@given(cost=curves, waiting=st.integers(1, 32))
@settings(max_examples=200, deadline=None)
def test_what_waits_is_done_no_later_in_sum_than_by_greedy(cost, waiting):
    """What the curve policy promises: with nobody else to come, those that wait now wait no longer in total."""
    costs = Costs({n + 1: (seconds,) for n, seconds in enumerate(cost)}, 0, 0)
    total = {
        policy: simulate(np.zeros(waiting), BatchSettings(max_rows=8, policy=policy), costs).latency_s.sum()
        for policy in ("greedy", "curve")
    }
    assert total["curve"] <= total["greedy"] * (1 + 1e-9)


@given(cost=curves, most=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_padding_never_makes_a_call_dearer(cost, most):
    curve = CostCurve(tuple(range(1, 9)), tuple(cost))
    for rows, size in enumerate(plan(BatchSettings(max_rows=most, pad=True), curve).size):
        assert size >= rows
        assert rows == 0 or curve.at(size) <= curve.at(rows)


def test_alone_the_curve_policy_can_be_worse():
    """Under arrivals that never end, the promise for those that wait now is none for the percentile: so both are tried.

    This curve is one where greedy keeps the limit at a higher rate; the search (see test_search) takes the better one.
    """
    found = [(cost, *pair) for cost in worse_curves() if (pair := both(cost))[1] < 0.97 * pair[0]]
    assert found


def worse_curves():
    random = np.random.default_rng(5)
    return [np.sort(random.uniform(0.005, 0.04, 8)) for _ in range(40)]


def both(cost):
    """Capacity of the greedy and of the curve policy."""
    costs = Costs({n + 1: (float(seconds),) for n, seconds in enumerate(cost)}, 0, 0)
    setting = BatchSettings(max_rows=8, policy="greedy")
    return tuple(
        capacity(replace(setting, policy=policy), costs, 0.1, requests=2000)[0] for policy in ("greedy", "curve")
    )
