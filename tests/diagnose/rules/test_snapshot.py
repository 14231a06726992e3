"""What a snapshot alone says: each cause planted in a small allocator whose every byte is known, and a healthy loop."""

import pytest

from fettle.diagnose import Finding
from fettle.diagnose.rules.snapshot import snapshot_findings
from fettle.memory import analyse, parse
from tests.memory.memory_machine import MIB, Machine, healthy_training, stack


def leaking() -> Machine:
    machine = Machine()
    for _ in range(10):
        machine.alloc(2 * MIB, stack("square:12", "forward:20", "_call_impl:30", "step:40"))
        machine.step()
    return machine


def in_pieces() -> Machine:
    """Four of five blocks of each segment are free, the fifth keeps the segment."""
    machine = Machine()
    blocks = [machine.alloc(4 * MIB, stack("f:1")) for _ in range(100)]
    for number, address in enumerate(blocks):
        if number % 5:
            machine.free(address)
    return machine


def emptying() -> Machine:
    machine = Machine()
    for _ in range(8):
        for address in [machine.alloc(32 * MIB, stack("f:1")) for _ in range(4)]:
            machine.free(address)
        machine.give_back([{"name": "empty_cache", "filename": "??", "line": 0}, *stack("step:40")])
        machine.step()
    return machine


def spiking(times: int = 1) -> Machine:
    machine = Machine()
    machine.alloc(30 * MIB, stack("build:1"))
    for number in range(max(20, times)):
        machine.free(machine.alloc(MIB, stack("small:2")))
        if number < times:
            machine.free(machine.alloc(100 * MIB, stack("huge:3")))
    return machine


def holding() -> Machine:
    machine = Machine()
    machine.alloc(100 * MIB, stack("build:1"))
    for _ in range(20):
        machine.free(machine.alloc(MIB, stack("small:2")))
    return machine


PLANTED = {
    "leak": (leaking(), "model.py:12 in square"),
    "fragmentation": (in_pieces(), ""),
    "churn": (emptying(), "model.py:40 in step"),
    "spike": (spiking(), "model.py:3 in huge"),
    "peak-holder": (holding(), "model.py:1 in build"),
}


def findings(machine: Machine, calls: int = 0) -> dict[str, Finding]:
    return {finding.rule: finding for finding in snapshot_findings(analyse(parse(machine.data())), calls)}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_rule_names_its_cause_the_place_and_the_answer(rule: str) -> None:
    machine, place = PLANTED[rule]
    found = findings(machine)[rule]
    assert found.where[:1] == ((place,) if place else ())
    assert found.bound_bytes > 0 or rule == "churn"
    assert found.evidence
    assert found.advice
    assert found.formula
    assert found.before != found.after


@pytest.mark.parametrize("rule", PLANTED)
def test_of_a_planted_cause_no_other_rule_speaks(rule: str) -> None:
    faults = {name for name, found in findings(PLANTED[rule][0]).items() if not found.opportunity}
    assert faults == {rule} - {"peak-holder"}  # who holds the peak is no fault


def test_nothing_is_wrong_with_a_healthy_loop() -> None:
    assert all(finding.opportunity for finding in findings(healthy_training(12)).values())
    assert findings(healthy_training(12), calls=12) == {}


def test_a_spike_of_every_call_is_how_the_call_works() -> None:
    assert not findings(spiking(times=1), calls=8)["spike"].opportunity
    assert findings(spiking(times=8), calls=8)["spike"].opportunity
    assert findings(spiking(times=200), calls=200)["spike"].opportunity


def test_a_cache_emptied_once_is_no_churn() -> None:
    machine = Machine()
    machine.free(machine.alloc(32 * MIB, stack("f:1")))
    machine.give_back([{"name": "empty_cache", "filename": "??", "line": 0}, *stack("load:1")])
    for _ in range(20):
        machine.alloc(32 * MIB, stack("f:1"))
    assert "churn" not in findings(machine)


def test_a_setting_that_is_on_is_not_advised() -> None:
    data = in_pieces().data()
    data["allocator_settings"] = {**data.get("allocator_settings", {}), "expandable_segments": True}
    found = {finding.rule: finding for finding in snapshot_findings(analyse(parse(data)))}
    assert "expandable_segments" not in found["fragmentation"].advice + found["fragmentation"].after


def test_who_holds_the_peak_is_not_said_again_where_a_cause_is_known() -> None:
    assert set(findings(spiking())) == {"spike"}
    assert set(findings(leaking())) == {"leak"}
