"""Waiting for exact moments: never early, in order, and without a busy core where the system can do that."""

import asyncio
import os
import signal
import sys
import time
from contextlib import closing

import pytest

from fettle.loop import PreciseTimer, run, stopped_by_interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_whoever_ends_a_command_stops_what_runs_in_the_loop(number):
    async def wait():
        stop = stopped_by_interrupt()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 60)
        return True

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert run(wait())
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


@pytest.mark.parametrize("timers", [True, False])
def test_it_never_wakes_early(timers):
    async def wait():
        woken = []
        with closing(PreciseTimer()) as clock:
            if not timers:
                clock.close()  # what a system without such timers has
            began = time.perf_counter()
            for wanted in (-1.0, 0.0, 0.00001, 0.0002, 0.003, 0.012, 0.0121, 0.012):
                await clock.wait(began + wanted)
                woken.append(time.perf_counter() - began - wanted)
        return woken

    assert min(run(wait())) >= 0


def test_others_run_meanwhile():
    async def count():
        turns = 0

        async def others():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0.001)

        busy = asyncio.create_task(others())
        with closing(PreciseTimer()) as clock:
            await clock.wait(time.perf_counter() + 0.05)
        busy.cancel()
        return turns

    assert run(count()) > 5


@pytest.mark.skipif(sys.platform != "linux", reason="timers that are files are Linux'")
def test_waiting_costs_no_core():
    async def spend():
        with closing(PreciseTimer(0.0)) as clock:
            assert clock._fd >= 0
            began = time.perf_counter()
            spent = time.process_time()
            for step in range(200):
                await clock.wait(began + 0.002 * step)
            return time.process_time() - spent, time.perf_counter() - began

    spent, took = run(spend())
    assert spent < 0.7 * took  # asking the clock all the time would be all of it


@pytest.mark.skipif(sys.platform != "linux", reason="timers that are files are Linux'")
def test_timers_are_given_back():
    def opened():
        return len(os.listdir("/proc/self/fd"))

    before = opened()
    for _ in range(50):
        PreciseTimer().close()
    assert opened() <= before  # fewer where the garbage of another test was collected meanwhile
