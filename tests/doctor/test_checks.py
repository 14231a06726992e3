"""Each planted fault is found, with the right words, by the right check, and by no other."""

import pytest

from fettle.doctor import CHECKS, Environment, examine
from tests.doctor.planted import CASES, CLEAN, Case


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_planted_fault_is_found(case: Case) -> None:
    assert not case.fault(examine(case.here))


@pytest.mark.parametrize("here", CLEAN.values(), ids=CLEAN)
def test_nothing_is_found_on_a_healthy_machine(here: Environment) -> None:
    assert examine(here) == []


def test_every_check_has_a_case() -> None:
    assert {case.check for case in CASES} == set(CHECKS)
    assert len(CASES) >= 80
