"""Whether those that were just answered are worth a moment's wait: without a clock."""

import asyncio
from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fettle.package.settings import ServeSettings
from fettle.package.tensors import TensorSpec
from fettle.serve.engine import anticipation, wire
from fettle.serve.engine.anticipation import MOST_S, QUIET, SHARE, Anticipation
from fettle.serve.engine.batching import BatchQueue
from fettle.serve.engine.metrics import Metrics, ModelMetrics
from fettle.serve.engine.pool import Pool
from fettle.serve.engine.request import Request


def serve(returns, calls, answered, back, took_s=0.1):
    """So many calls, of whose `answered` requests `back` are followed by another one at once. The moment after."""
    now = 0.0
    for _ in range(calls):
        now += took_s
        returns.answered(answered, took_s, now)
        for _ in range(back):
            returns.arrived(now + 1e-4)
        be_quiet(returns)
    return now


def be_quiet(returns):
    """Turns of the event loop in which nobody comes."""
    while returns.turn():
        pass


def test_clients_that_return_are_awaited_until_all_are_back():
    returns = Anticipation()
    now = serve(returns, 8, 7, 7)
    returns.answered(7, 0.1, now + 0.1)
    now += 0.1
    assert returns.hold_s(now) == now + MOST_S
    for _ in range(6):
        returns.arrived(now + 0.001)
    assert returns.hold_s(now + 0.001) > 0
    returns.arrived(now + 0.001)
    assert returns.hold_s(now + 0.001) == 0


def test_a_single_client_waits_for_nobody():
    returns = Anticipation()
    now = serve(returns, 20, 1, 1)
    returns.answered(1, 0.1, now)
    returns.arrived(now + 1e-4)
    assert returns.hold_s(now + 1e-4) == 0


@given(st.integers(2, 64), st.integers(0, 10**6))
def test_independent_arrivals_are_not_awaited(answered, seed):
    """Fewer than half come back in time: nobody is held up."""
    returns = Anticipation()
    now = serve(returns, 20, answered, seed % (answered // 2 + 1) if answered > 2 else 0)
    returns.answered(answered, 0.1, now)
    assert returns.hold_s(now) == 0


@given(st.floats(1e-6, 10.0), st.floats(0.0, 1.0))
def test_it_holds_no_longer_than_it_may(took_s, later):
    returns = Anticipation()
    returns.share = 1.0
    now = 5.0 + later
    for most_s in (MOST_S, min(SHARE * took_s, MOST_S)):
        returns.answered(4, took_s, 5.0)
        if most_s != MOST_S:
            be_quiet(returns)
        held = returns.hold_s(now)
        assert held == 0 or now < held <= 5.0 + most_s


def test_those_who_keep_coming_are_awaited_longer_than_a_short_call_is_worth():
    returns = Anticipation()
    returns.share = 1.0
    returns.answered(4, 1e-4, 5.0)
    for after_s in (0.001, 0.002):
        assert returns.hold_s(5.0 + after_s) == 5.0 + MOST_S
        returns.arrived(5.0 + after_s)
        for _ in range(QUIET - 1):
            assert returns.turn()
    assert returns.hold_s(5.003) > 0
    assert not returns.turn()  # two have not come
    assert returns.hold_s(5.003) == 0
    returns.answered(4, 1e-4, 6.0)
    assert returns.share < 1.0


def test_those_who_come_once_it_was_quiet_did_not_come_back_in_time():
    returns = Anticipation()
    for _ in range(20):
        returns.answered(4, 1e-4, 5.0)
        be_quiet(returns)
        for _ in range(4):
            returns.arrived(5.001)
    returns.answered(4, 1e-4, 5.0)
    assert returns.hold_s(5.0) == 0


class Echo:
    """A worker process that answers each call in the event loop's next turn."""

    def __init__(self):
        self.worker, self.rows = None, []

    def write(self, header, bodies=()):
        if isinstance(header, wire.Run):
            self.rows.append(len(header.shapes))
            done = wire.Done(header.id, [(len(header.shapes), 2)], 0.0, 1e-5, 0)
            body = memoryview(bytes(8 * len(header.shapes)))
            asyncio.get_running_loop().call_soon(self.worker._on_message, done, body)

    def end(self):
        pass


def test_clients_in_two_groups_find_together(monkeypatch):
    """Three ask first and five while those are served. However short a call is, soon all eight share each."""
    monkeypatch.setattr(anticipation, "SHARE", 0.0)  # as if a call took no time at all
    spec = TensorSpec("x", "FP32", (-1, 2))
    manifest = SimpleNamespace(name="net", inputs=(spec,), outputs=(spec,), shares_calls=True)
    package = SimpleNamespace(manifest=manifest)

    async def watch():
        pool = Pool(package, ServeSettings(max_rows=8), ModelMetrics(Metrics(), "net", "1"))
        worker, process = pool.workers[0], Echo()
        process.worker, worker._process, worker.ready = worker, process, True

        async def client():
            while len(process.rows) < 300:
                await pool.submit(Request(1, "", [np.zeros((1, 2), np.float32)]))
                await asyncio.sleep(0)  # a client's next request is read a turn later

        first = [asyncio.create_task(client()) for _ in range(3)]
        while not process.rows:
            await asyncio.sleep(0)
        await asyncio.gather(*first, *(client() for _ in range(5)))
        worker._alarm.clear()
        return process.rows

    rows = asyncio.run(watch())
    assert rows[0] < 8
    assert sorted(rows[100:])[50] == 8  # three quarters of the calls at least


class Item:
    def __init__(self, rows=1):
        self.arrival_s, self.rows, self.key, self.deadline_s, self.queued = 0.0, rows, "", 1e9, False


def test_a_full_batch_does_not_wait():
    queue = BatchQueue(ServeSettings(max_rows=4))
    assert not queue.gains_by_waiting  # nobody waits
    for _ in range(3):
        queue.push(Item())
    assert queue.gains_by_waiting
    queue.push(Item())
    assert not queue.gains_by_waiting


def test_an_alarm_that_is_moved_rings_once_at_its_last_moment():
    import time

    from fettle.serve.engine.alarm import Alarm

    async def watch():
        loop, rings = asyncio.get_running_loop(), []
        alarm = Alarm(lambda: rings.append(time.perf_counter()))
        began = time.perf_counter()
        for step in range(5):
            alarm.set(began + 0.01 * step, loop)
        alarm.set(began + 0.05, loop)
        while not rings:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)
        cleared = Alarm(lambda: rings.append(0.0))
        cleared.set(time.perf_counter() + 0.01, loop)
        cleared.clear()
        await asyncio.sleep(0.03)
        return began, rings

    began, rings = asyncio.run(watch())
    assert len(rings) == 1
    assert rings[0] >= began + 0.049
