"""The state of an earlier moment, put together again from the trace."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from memory_machine import MIB, OPERATION, Machine, act, stack

from fettle.memory import analyse, parse
from fettle.memory.fragmentation import pools
from fettle.memory.moments import state_at
from fettle.memory.replay import replay

operations = st.lists(OPERATION, min_size=1, max_size=40)


@given(operations, operations)
@settings(max_examples=80, deadline=None)
def test_pools_of_an_earlier_moment(before: list[tuple[str, int, int]], after: list[tuple[str, int, int]]) -> None:
    machine, held = Machine(), list[int]()
    act(machine, held, before)
    machine.note("snapshot", 0, [], addr=0)
    event = len(machine.events) - 1
    truth = pools(parse(machine.data()), 0)
    act(machine, held, after)
    later = parse(machine.data())
    if not later.devices:
        return
    then = state_at(later, replay(later, 0), event)
    assert then is not None
    found = {(pool.small, pool.stream): pool for pool in pools(then, 0)}
    assert set(found) == {(pool.small, pool.stream) for pool in truth}
    for pool in truth:
        other = found[pool.small, pool.stream]
        assert (other.reserved_bytes, other.releasable_bytes) == (pool.reserved_bytes, pool.releasable_bytes)
        assert other.requested_bytes == pool.requested_bytes
        slack = 0 if pool.small else MIB  # what the allocator may not have split off behind a block that is gone
        assert pool.largest_free_bytes <= other.largest_free_bytes <= pool.largest_free_bytes + slack
        assert other.reserved_bytes == other.free_bytes + other.active_bytes


def test_a_request_that_failed_is_judged_at_its_own_moment() -> None:
    machine = Machine()
    pairs = [(machine.alloc(10 * MIB - 512, stack("a")), machine.alloc(10 * MIB - 512, stack("b"))) for _ in range(5)]
    for _, second in pairs:
        machine.free(second)
    machine.note("oom", 17 * MIB, stack("big:8"), device_free=3 * MIB)
    for first, _ in pairs:  # the program catches the error and lets go of everything
        machine.free(first)
    fit = analyse(parse(machine.data())).fit
    assert fit is not None
    assert (fit.answer, fit.fragmented) == ("no", True)
    assert fit.largest_free_bytes <= 11 * MIB


def test_a_request_that_failed_among_expandable_segments_is_not_judged_by_what_came_later() -> None:
    machine = Machine()
    held = machine.alloc(70 * MIB, stack("a"))
    machine.note("oom", 60 * MIB, stack("big:8"), device_free=MIB)
    data = machine.data()
    data["segments"][0]["is_expandable"] = True
    then = analyse(parse(data)).fit
    assert then is not None
    assert then.answer == "no"  # nothing has changed since
    machine.free(held)
    data = machine.data()
    data["segments"][0]["is_expandable"] = True
    later = analyse(parse(data)).fit
    assert later is not None
    assert later.answer == "unknown"
    assert "70.0 MiB were in use when the request failed, 0 B when the snapshot was taken" in later.sentence


def test_expandable_segments_are_not_guessed_at() -> None:
    machine = Machine()
    machine.alloc(4 * MIB, stack("a"))
    data = machine.data()
    data["segments"][0]["is_expandable"] = True
    snapshot = parse(data)
    assert state_at(snapshot, replay(snapshot, 0), 0) is None
