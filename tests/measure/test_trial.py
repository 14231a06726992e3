"""What fetching memory from the system costs, as slices show it."""

from types import SimpleNamespace

import pytest

from fettle.measure import Accuracy, Slice, fetching
from fettle.measure._rules import Candidate, Rules
from fettle.measure._runners import Runner, Started
from fettle.measure.messages import Prepared
from fettle.measure.race import _trial
from fettle.recipe import Recipe


def slices(*turns: tuple[float | None, float]) -> list[Slice]:
    return [Slice("1:0", number, ms, quiet=True, pages=pages) for number, (pages, ms) in enumerate(turns, 1)]


def test_slices_that_fetch_memory_are_told_from_those_that_keep_it():
    assert fetching(slices((0, 26.0), (6500, 35.0), (12, 26.2), (6400, 36.0), (2000, 29.0))) == (
        "26.1 ms a call where the memory that it frees is kept, 35.5 ms where it goes back to the system and 6500 "
        "pages of it are fetched anew: which of the two is chance"
    )


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [(None, 26.0), (None, 35.0), (None, 26.0), (None, 35.0)],  # of an earlier version
        [(0, 26.0), (0, 35.0), (0, 26.0), (0, 35.0)],  # slower for another reason
        [(30, 26.0), (30, 35.0), (0, 26.0), (0, 35.0)],
        [(6500, 35.0), (6500, 36.0), (6500, 35.0)],  # always, so nothing is chance
        [(6500, 35.0), (0, 26.0), (0, 26.0)],  # once
        [(6500, 26.5), (6500, 26.4), (0, 26.0), (0, 26.2)],  # pages are cheap here
    ],
)
def test_nothing_is_said_where_chance_makes_no_difference(turns):
    assert fetching(slices(*turns)) == ""


def test_the_time_is_of_slices_that_tell_one_also_where_processes_share_no_round() -> None:
    def runner(process: str, *times: float | None) -> Runner:
        slices = [Slice(process, number, 80.0, one, quiet=False, waits=0.9) for number, one in enumerate(times, 1)]
        answer = Prepared(load_s=0.0, optimize_s=0.0, first_call_s=0.0, cache="", accuracy=Accuracy(), peak_bytes=None,
                          device="cpu", gpu="", call_ns=1, samples=1, notes=(), learned={})  # fmt: skip
        worker = SimpleNamespace(fingerprint="")
        return Runner(Candidate(Recipe(), ""), worker, answer, "", 0.0, process, slices=slices, samples_ns=[1])  # type: ignore[arg-type]

    started = Started([runner("a", None, 2.0), runner("b", 2.2, None)])
    found = _trial(started, started, SimpleNamespace(rules=Rules(), race=1))  # type: ignore[arg-type]
    assert found.time_ms == pytest.approx(2.1, abs=0.11)
