"""The replay is exact, whatever the ring has lost."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_machine import MIB, OPERATION, Machine, act, healthy_training, stack

from fettle.memory import parse
from fettle.memory.invariants import check
from fettle.memory.replay import replay

operations = st.lists(OPERATION, min_size=1, max_size=60)


@given(operations, st.floats(0, 1))
@settings(max_examples=120, deadline=None)
def test_exact_for_every_history_and_every_ring(plan: list[tuple[str, int, int]], kept: float) -> None:
    machine = Machine()
    act(machine, [], plan)
    window = round(len(machine.events) * kept)
    snapshot = parse(machine.data(window))
    if not snapshot.devices:
        return
    result = replay(snapshot, 0)
    truth = machine.used[len(machine.used) - window :]
    before = machine.used[-window - 1] if window < len(machine.used) else 0
    assert result.start_bytes == before
    assert result.used_bytes.tolist() == truth
    assert result.peak_bytes == max([before, *truth])
    for event in (-1, result.peak_event, len(truth) - 1):
        alive = result.allocations.alive_at(event)
        assert int(result.allocations.size_bytes[alive].sum()) == result.at(event)
    assert not check(snapshot)


def test_frees_of_older_blocks_count() -> None:
    machine = Machine()
    old = [machine.alloc(10 * MIB, stack("old:1")) for _ in range(5)]
    seen = len(machine.events)
    machine.alloc(4 * MIB, stack("new:2"))
    for address in old:
        machine.free(address)
    machine.alloc(6 * MIB, stack("new:3"))
    result = replay(parse(machine.data(len(machine.events) - seen)), 0)
    assert result.frees_from_before == 5
    assert (result.start_bytes, result.peak_bytes, result.end_bytes) == (50 * MIB, 54 * MIB, 10 * MIB)


def test_the_peak_may_be_the_start_of_the_window() -> None:
    machine = Machine()
    address = machine.alloc(10 * MIB, stack("f"))
    seen = len(machine.events)
    machine.free(address)
    result = replay(parse(machine.data(len(machine.events) - seen)), 0)
    assert (result.peak_event, result.peak_bytes) == (-1, 10 * MIB)


def test_a_freed_block_that_another_stream_awaits_is_still_in_use() -> None:
    machine = Machine()
    machine.free(machine.alloc(10 * MIB, stack("f")), complete=False)
    snapshot = parse(machine.data())
    result = replay(snapshot, 0)
    assert result.start_bytes == 0
    assert result.end_bytes == 10 * MIB
    assert check(snapshot) == []


def test_a_file_without_completed_frees_is_replayed_by_the_requested_ones() -> None:
    machine = healthy_training()
    data = machine.data()
    data["device_traces"][0] = [e for e in data["device_traces"][0] if e["action"] != "free_completed"]
    assert replay(parse(data), 0).peak_bytes == max(machine.used)


def test_reserved_memory_is_replayed_too() -> None:
    machine = Machine()
    machine.free(machine.alloc(30 * MIB, stack("f")))
    machine.give_back(stack("empty_cache"))
    machine.alloc(MIB, stack("f"))
    result = replay(parse(machine.data()), 0)
    assert (result.start_reserved_bytes, result.peak_reserved_bytes) == (0, 30 * MIB)
    assert int(result.reserved_bytes[-1]) == 2 * MIB


@pytest.mark.parametrize("field", ["total_size", "allocated_size", "active_size", "requested_size"])
def test_each_sum_is_checked(field: str) -> None:
    data = copy.deepcopy(healthy_training().data())
    data["segments"][0][field] += 512
    violations = check(parse(data))
    assert len(violations) == 1
    assert violations[0].expected - violations[0].found == 512


def test_the_other_rules_are_checked() -> None:
    data = copy.deepcopy(healthy_training().data())
    data["device_traces"][0][3]["time_us"] += 10**9
    assert [row.rule for row in check(parse(data))] == ["events that go back in time"]
    data = copy.deepcopy(healthy_training().data())
    data["device_traces"][0].append({"action": "alloc", "addr": 1, "size": 4, "stream": 0, "time_us": 2**60})
    assert any("no block holds" in row.rule for row in check(parse(data)))
    data = copy.deepcopy(healthy_training().data())
    block = data["segments"][0]["blocks"][-1]
    block["address"] += 4096
    assert any("outside their segment" in row.rule for row in check(parse(data)))


def test_long_histories_stay_exact() -> None:
    rng = np.random.default_rng(0)
    machine, held = Machine(), []
    for _ in range(1500):
        if held and rng.random() < 0.5:
            machine.free(held.pop(int(rng.integers(len(held)))))
        else:
            held.append(machine.alloc(int(rng.integers(1, 3 * MIB)), stack("f")))
    assert replay(parse(machine.data(700)), 0).used_bytes.tolist() == machine.used[-700:]


def test_less_than_nothing_in_use_is_a_contradiction() -> None:
    data = copy.deepcopy(healthy_training().data())
    data["device_traces"][0][2]["size"] += 10**12
    assert any("less than nothing" in row.rule for row in check(parse(data)))
