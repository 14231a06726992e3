"""The simulation against the batcher's own queue, and the curve policy against the greedy one."""

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.serve.arrivals import poisson
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


def test_nobody_is_woken_for_a_window_that_is_over():
    """They wait for a worker then. Woken for them at once and again, the server kept a core busy until one was free."""
    queue = BatchQueue(BatchSettings(max_rows=4, max_delay_s=0.005))
    queue.push(Item(1.0))
    assert queue.wake_s(1.002) == 1.005
    assert queue.wake_s(1.005) == queue.wake_s(2.0) == math.inf
    queue.push(Item(2.0, key=1))
    assert queue.wake_s(2.0) == 2.005
    assert queue.take(2.0, 1).items[0].arrival_s == 1.0


def test_a_call_after_a_pause_costs_what_such_calls_were_seen_to():
    costs = Costs({1: (0.01,)}, 0, 0, rested={1: (0.013,)})
    seen = simulate([0.0, 0.001, 1.0, 2.0], BatchSettings(max_rows=1), costs)
    assert seen.latency_s.tolist() == pytest.approx([0.013, 0.022, 0.013, 0.013])
    assert seen.stretch == pytest.approx(1.225)


def test_requests_that_come_during_a_call_hold_it_up():
    costs = Costs({1: (0.01,), 2: (0.015,)}, 0, 0, held_s=0.002)
    # The first call would end at 10 ms; two come meanwhile, and a third in the time that they took.
    seen = simulate([0.0, 0.004, 0.009, 0.0135], BatchSettings(max_rows=1), costs)
    assert seen.latency_s[0] == pytest.approx(0.016)
    assert seen.stretch == pytest.approx(1.15)
    assert seen.latency_s[1] == pytest.approx(0.026 - 0.004)
    setting = BatchSettings(max_rows=2)
    free, shared = (capacity(setting, replace(costs, held_s=held), 0.04)[0] for held in (0.0, 0.002))
    assert 0 < shared < 0.9 * free


@given(held=st.floats(0, 0.005), bound=st.sampled_from([3, 10**6]), rate=st.floats(20, 400))
@settings(max_examples=30, deadline=None)
def test_on_shared_cores_too_every_request_is_answered_or_refused(held, bound, rate):
    costs, setting = Costs({1: (0.01,), 4: (0.02,)}, 0, 0), BatchSettings(4, max_queue_rows=bound)
    arrivals = poisson(rate, 300 / rate)
    seen = simulate(arrivals, setting, replace(costs, held_s=held))
    assert len(seen.latency_s) + seen.refused == len(arrivals)
    assert len(seen.latency_s) == sum(rows * count for rows, count in seen.batch_rows.items())
    assert (seen.latency_s >= 0.01 - 1e-9).all()  # the difference of two times


def test_giving_up_says_no_where_waiting_to_the_end_would():
    costs = Costs({1: (0.01,), 2: (0.012,), 4: (0.016,)}, 0, 0)
    setting = BatchSettings(max_rows=4)
    for rate in (50, 100, 150, 200, 220, 240, 300):
        arrivals = poisson(rate, 20)
        whole = simulate(arrivals, setting, costs)
        hasty = simulate(arrivals, setting, costs, give_up=(0.05, 0.01 + 2 / len(arrivals)))
        assert (whole.percentile(99) <= 0.05) == (hasty.percentile(99) <= 0.05), rate


curves = st.lists(st.floats(0.002, 0.05), min_size=8, max_size=8)
STEPPED = (0.0188, 0.0202, 0.0208, 0.040, 0.0409, 0.0411, 0.0562, 0.057)
"""Seen on one CPU: seconds of a call of 1 to 8 rows."""


@given(cost=curves, most=st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_padding_never_makes_a_call_dearer(cost, most):
    curve = CostCurve(tuple(range(1, 9)), tuple(cost))
    for rows, size in enumerate(plan(BatchSettings(max_rows=most, pad=True), curve).size):
        assert size >= rows
        assert rows == 0 or curve.at(size) <= curve.at(rows)


def world(cost):
    return Costs({n + 1: (float(seconds),) for n, seconds in enumerate(cost)}, 0, 0)


def random_curve(random, kind):
    """Seconds by rows: rising, any, in steps, nearly a line, or one size much cheaper than all."""
    if kind == 0:
        return np.sort(random.uniform(0.005, 0.04, 8))
    if kind == 1:
        return random.uniform(0.005, 0.04, 8)
    if kind == 2:
        return 0.008 + np.cumsum(random.choice([0.0002, 0.015], 8, p=[0.7, 0.3]))
    cost = 0.005 + 0.003 * np.arange(1, 9) * random.uniform(0.9, 1.1, 8)
    if kind == 4:
        cost[random.integers(1, 8)] *= random.uniform(0.1, 0.5)
    return cost


@given(seed=st.integers(0, 10**6), kind=st.integers(0, 4), workers=st.integers(1, 3),
       load=st.sampled_from([0.01, 0.05, 0.2, 0.4, 0.6, 0.75, 0.85]))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_the_curve_policy_is_never_worse_than_greedy(seed, kind, workers, load):
    """Whatever the curve and the load: neither on average nor in the tail, but for the noise of 4000 requests."""
    cost = random_curve(np.random.default_rng(seed), kind)
    rate = load * workers * max((n + 1) / seconds for n, seconds in enumerate(cost))
    arrivals = poisson(rate, 4000 / rate, seed)
    greedy, curve = (
        simulate(arrivals, BatchSettings(max_rows=8, policy=policy, workers=workers), world(cost))
        for policy in ("greedy", "curve")
    )
    if not greedy.stable:
        return
    assert curve.latency_s.mean() <= 1.02 * greedy.latency_s.mean()
    assert curve.percentile(99) <= 1.08 * greedy.percentile(99)


@given(seed=st.integers(0, 10**6), kind=st.integers(0, 4), workers=st.integers(1, 3), limit=st.floats(1.5, 5))
@settings(max_examples=40, deadline=None)
def test_its_capacity_under_a_limit_is_never_less(seed, kind, workers, limit):
    cost = random_curve(np.random.default_rng(seed), kind)
    greedy, curve = (
        capacity(BatchSettings(max_rows=8, policy=policy, workers=workers), world(cost), limit * cost.max(),
                 requests=2000)[0]
        for policy in ("greedy", "curve")
    )  # fmt: skip
    assert curve >= 0.95 * greedy


def test_a_curve_on_which_large_batches_are_cheaper_than_one_row():
    """7 rows cost a quarter of what 1 does: nothing is gained at heavy loads by making the light ones slower."""
    cost, unit = random_curve(np.random.default_rng(694), 1), poisson(1.0, 2400)[:2000]
    greedy, curve = (BatchSettings(max_rows=8, policy=policy) for policy in ("greedy", "curve"))
    for share in (0.02, 0.1, 0.5, 1.0, 2.0):  # of the rate that single rows allow
        few = unit * cost[0] / share
        tails = [simulate(few, setting, world(cost)).percentile(99) for setting in (greedy, curve)]
        assert tails[1] <= 1.08 * tails[0]
    rates = [capacity(setting, world(cost), 1.5 * cost.max(), requests=2000)[0] for setting in (greedy, curve)]
    assert rates[1] > 5 * rates[0] > 0


def test_a_capacity_is_a_rate_up_to_which_the_limit_is_kept():
    """One row takes longer than the limit and eight do not: at a heavy load alone that limit would be kept."""
    cost = (0.03, 0.03, 0.03, 0.03, 0.03, 0.03, 0.03, 0.004)
    setting = BatchSettings(max_rows=8)
    assert capacity(setting, world(cost), 0.025)[0] == 0
    found, seen = capacity(replace(setting, pad=True), world(cost), 0.025)
    assert found > 1000
    assert seen.percentile(99) <= 0.025
    slow = replace(setting, max_delay_s=0.05)  # a delay that a full batch does not wait for
    assert capacity(slow, world(cost), 0.06)[0] == 0


def test_where_costs_have_steps_it_serves_a_fifth_more():
    setting = BatchSettings(max_rows=8, policy="greedy")
    greedy, curve = (
        capacity(replace(setting, policy=policy), world(STEPPED), 0.1)[0] for policy in ("greedy", "curve")
    )  # fmt: skip
    assert curve > 1.2 * greedy
    assert plan(replace(setting, policy="curve"), world(STEPPED).curve()).take[:9] == (0, 1, 2, 3, 3, 3, 3, 3, 3)


def test_a_call_that_is_cheap_for_those_who_wait_may_be_dear_for_those_who_come():
    """One row alone is quickest for whoever waits, but eight at once cost a row less: with many to come, eight go."""
    cost = (0.0067, 0.0132, 0.0202, 0.0278, 0.0345, 0.0364, 0.0391, 0.04)
    take = plan(BatchSettings(max_rows=8), world(cost).curve()).take
    assert take[-1] == 8  # of more than eight too


def test_batches_too_large_to_choose_among_are_greedy():
    curve = CostCurve((1, 2, 4000), (0.001, 0.0011, 9.0))
    assert plan(BatchSettings(max_rows=4000), curve).take == tuple(range(4001))


def test_a_table_for_large_batches_covers_every_queue():
    curve = CostCurve((1, 2, 4, 8, 16, 32, 64), tuple(0.01 + 0.001 * n for n in (1, 2, 4, 8, 16, 32, 64)))
    take = plan(BatchSettings(max_rows=64), curve).take
    assert take[:65] == tuple(range(65))  # nearly a line: all that wait
    assert take[-1] == 64
    assert len(take) > 64
