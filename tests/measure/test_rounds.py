"""What a race does where others have the machine: made-up slices on a made-up machine, no process and no clock."""

import importlib
import math
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec import structs

from fettle.generate.speed import Generation
from fettle.measure import _rounds, _watch
from fettle.measure._candidates import Start
from fettle.measure._clock import is_steady
from fettle.measure._priority import HIGHEST
from fettle.measure._process import WorkerError
from fettle.measure._rounds import Rounds
from fettle.measure._rules import Candidate, Rules
from fettle.measure._runners import Runner, Started
from fettle.measure._trial import Accuracy, Slice
from fettle.measure._watch import Patience, Reading, Watch
from fettle.measure.messages import Prepared, RowsMeasured, SliceTaken
from fettle.recipe import Recipe

PREPARED = Prepared(
    load_s=0.1, optimize_s=0.1, first_call_s=0.1, cache="", accuracy=Accuracy(), peak_bytes=None, device="cpu", gpu="",
    call_ns=10**7, samples=1, notes=[], learned={},
)  # fmt: skip


class Machine:
    """Two cores, of which others have one while `busy` says so; calls take 10 ms, and 40 beside a neighbour."""

    def __init__(self, busy) -> None:
        self.busy, self.now, self.others_s, self.own_s = busy, 0.0, 0.0, 0.0
        self.first, self.cores, self.asleep_s = False, 2, 0.0
        self.quota, self.throttled_s, self.ended = 0.0, 0.0, 0
        """What share of a slice a quota takes."""
        self.happens = lambda: None
        """What happens to the machine in the middle of the fifth slice."""
        self.asked: list[tuple[bool, bool]] = []
        """Whether each slice went before the others' work, and whether its threads were held apart."""

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.others_s += seconds * self.busy(self.now)
        self.now += seconds

    def read(self) -> Reading:
        busy_s, awake_s = self.others_s + self.own_s, self.now + self.asleep_s
        return Reading(self.now, awake_s, busy_s=busy_s, cores=self.cores, throttled_s=self.throttled_s)

    def suspend(self) -> None:
        self.asleep_s += 3600

    def unplug(self) -> None:
        self.cores = 1

    def prefer(self, group, niceness):
        self.first = niceness == HIGHEST


class Worker:
    pid = 1
    gpus = ()

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def ask(self, request, answer, timeout_s):
        seconds, apart = request.seconds, request.apart
        machine = self.machine
        machine.asked.append((machine.first, apart))
        if len(machine.asked) == 5:
            machine.happens()
        busy = 0.0 if machine.first else machine.busy(machine.now)
        machine.own_s += 2 * seconds * (1 - busy / 2)
        machine.throttled_s += seconds * machine.quota
        machine.sleep(seconds)
        ms = 40 if busy else 10
        return SliceTaken(
            samples_ns=[ms * 1_000_000],
            unhindered_ns=self.told(apart, busy),
            waits=0.8 * busy + 2 * machine.quota,
            cpu_s=2 * seconds * (1 - busy / 2),
            energy_j=None,
            gpus=self.gpus,
        )

    def told(self, apart: bool, busy: float) -> float:
        return 11e6 if apart or not busy else math.nan

    def pause(self) -> None: ...

    def close(self) -> None:
        self.machine.ended += 1


def run(monkeypatch, busy, *, patience_s=0.0, may_go_first=False, under_load=False, rounds=6, happens=None, quota=0.0):
    machine = Machine(busy)
    machine.quota = quota
    if happens is not None:
        machine.happens = lambda: happens(machine)
    clock = SimpleNamespace(monotonic=machine.monotonic, sleep=machine.sleep)
    monkeypatch.setattr(_rounds, "time", clock)
    monkeypatch.setattr(_watch, "time", clock)
    monkeypatch.setattr(_rounds, "prefer", machine.prefer)
    answer = SimpleNamespace(samples=1, call_ns=10_000_000, calls=1, gpu="")
    running = [
        Started([Runner(Candidate(Recipe(levels), ""), Worker(machine), answer, "", 0.0, process=str(levels))])
        for levels in ({}, {"precision": "bf16"})
    ]
    rules = Rules(max_rounds=rounds, may_go_first=may_go_first, under_load=under_load, indifference=0.0)
    race = Rounds(rules, random.Random(0), lambda progress: None, Patience(patience_s), Watch(machine.read))
    race.run(running, running[0])
    return machine, [one for started in running for runner in started.runners for one in runner.slices]


def test_on_a_quiet_machine_each_slice_is_taken_once(monkeypatch):
    machine, slices = run(monkeypatch, lambda now: 0.0, patience_s=60.0, may_go_first=True)
    assert all(one.quiet for one in slices)
    assert {(one.process, one.round) for one in slices}
    assert len(slices) == len({(s.process, s.round) for s in slices})
    assert set(machine.asked) == {(False, False)}


def test_a_process_that_fails_in_a_slice_is_ended_and_holds_no_memory(monkeypatch):
    def fails(machine):
        raise WorkerError("out of memory: CUDA out of memory", "memory")

    machine, slices = run(monkeypatch, lambda now: 0.0, happens=fails)
    assert machine.ended == 1
    assert len({one.round for one in slices}) > 2


def test_a_quota_is_not_waited_for(monkeypatch):
    machine, slices = run(monkeypatch, lambda now: 0.0, patience_s=60.0, quota=0.3)
    assert len(machine.asked) == len(slices) == len({(one.process, one.round) for one in slices})
    assert machine.now == pytest.approx(len(slices) * Rules.slice_s)
    assert all(one.by_quota and not one.quiet for one in slices)
    _, slices = run(monkeypatch, lambda now: 0.5, quota=0.3)
    assert not any(one.by_quota for one in slices)


def test_a_slice_may_take_as_long_as_a_call_on_each_of_its_batches(monkeypatch):
    """Batches that differ in shape are one sample together: a hundred of five seconds take longer than twenty calls."""

    def ask(self, request, answer, timeout_s):
        raise WorkerError(f"{timeout_s:.0f}")

    monkeypatch.setattr(Worker, "ask", ask)
    answer = SimpleNamespace(call_ns=5_000_000_000, calls=100, gpu="")
    started = Started([Runner(Candidate(Recipe(), ""), Worker(Machine(lambda now: 0.0)), answer, "", 0.0)])
    Rounds(Rules(), random.Random(0), lambda progress: None).run([started], started)
    assert float(started.failure) > 500


def test_a_disturbed_slice_is_kept_and_made_again_when_the_machine_is_quiet(monkeypatch):
    """A neighbour that begins in the middle and goes after ten seconds."""
    machine, slices = run(monkeypatch, lambda now: 1.0 if 0.3 < now < 10 else 0.0, patience_s=60.0)
    disturbed = [one for one in slices if not one.quiet]
    assert disturbed
    assert {(one.process, one.round) for one in disturbed} <= {(one.process, one.round) for one in slices if one.quiet}
    assert 10 < machine.now < 14


@pytest.mark.parametrize("happens", [Machine.suspend, Machine.unplug])
def test_what_happens_to_the_machine_in_a_slice_is_no_evidence(monkeypatch, happens):
    _, slices = run(monkeypatch, lambda now: 0.0, patience_s=60.0, happens=happens)
    (disturbed,) = [one for one in slices if not one.quiet]
    assert disturbed.best_ms is None
    assert {(one.process, one.round) for one in slices if one.quiet} >= {(disturbed.process, disturbed.round)}
    assert len(slices) == 13


def test_each_gpu_that_a_slice_used_is_looked_at(monkeypatch):
    looked_at = []
    monkeypatch.setattr(Worker, "gpus", ("GPU-1", "GPU-2"))
    monkeypatch.setattr(_watch, "with_gpu", lambda load, gpu, own, over_s: looked_at.append(gpu) or load)
    run(monkeypatch, lambda now: 0.0, rounds=1)
    assert looked_at == ["GPU-1", "GPU-2"] * 2


@pytest.mark.parametrize("until_s", [10.0, math.inf])
def test_what_others_have_of_a_gpu_is_waited_for_and_never_taken_out(monkeypatch, until_s):
    def beside(load, gpu, own, over_s):
        return replace(load, gpu=0.6 if _watch.time.monotonic() < until_s else 0.0)

    monkeypatch.setattr(Worker, "gpus", ("GPU-1",))
    monkeypatch.setattr(_watch, "with_gpu", beside)
    machine, slices = run(monkeypatch, lambda now: 0.0, patience_s=20.0, may_go_first=True)
    assert all(one.best_ms is None for one in slices if not one.quiet)
    assert len({(one.process, one.round) for one in slices if one.quiet}) == (12 if until_s == 10 else 0)
    assert machine.now < (12 if until_s == 10 else 30)


def test_a_comparison_is_quiet_where_both_sides_were():
    """The baseline was disturbed from the third round on; the recipe's slices were made again in quiet."""

    def started(levels, quiet, busy):
        slices = [Slice(str(levels), turn, 10.0, 10.0, True, 0.0) for turn in quiet]
        slices += [Slice(str(levels), turn, 40.0, 12.0, False, 0.8) for turn in busy]
        candidate, worker = Candidate(Recipe(levels), ""), SimpleNamespace(fingerprint="")
        return Started([Runner(candidate, worker, PREPARED, "", 0.0, slices=slices, samples_ns=[10**7])])

    def trial(one, beside):
        start = Start(None, "", None, Rules(), None, {}, 1, None)
        return importlib.import_module("fettle.measure.race")._trial(one, beside, start)

    given = started({}, (1, 2), range(3, 9))
    recipe = started({"precision": "bf16"}, range(1, 9), range(3, 9))
    assert not trial(given, given).is_quiet
    assert not trial(recipe, given).is_quiet
    assert trial(recipe, given).time_ms == pytest.approx(10.0)
    assert trial(recipe, started({}, range(1, 9), ())).is_quiet
    assert trial(recipe, replace(given, runners=[replace(given.first, slices=[])])).is_quiet  # it died at once


def test_a_machine_that_is_never_quiet_ends_the_wait_and_holds_threads_apart(monkeypatch):
    machine, slices = run(monkeypatch, lambda now: 1.0, patience_s=60.0)
    assert not any(one.quiet for one in slices)
    assert machine.now < 35
    assert machine.asked[0] == (False, False)
    assert set(machine.asked[1:]) == {(False, True)}
    assert [one.best_ms for one in slices][1:] == [11.0] * (len(slices) - 1)


def test_the_first_slice_that_a_neighbour_disturbs_is_compared_with_none_held_apart(monkeypatch):
    """What it says of the time alone is made up as it is for slices whose threads share a core."""
    monkeypatch.setattr(Worker, "told", lambda self, apart, busy: 11e6)
    machine, slices = run(monkeypatch, lambda now: 1.0)
    assert machine.asked[0] == (False, False)
    assert set(machine.asked[1:]) == {(False, True)}
    assert [one.best_ms for one in slices].count(None) == 1


def test_where_the_system_allows_it_slices_go_before_the_others_work(monkeypatch):
    machine, slices = run(monkeypatch, lambda now: 1.0, may_go_first=True)
    assert machine.asked[0] == (False, False)
    assert set(machine.asked[1:]) == {(True, False)}
    assert all(one.ms == 10 for one in slices[1:] if one.round > 1)
    assert not machine.first


def test_threads_of_a_slice_that_take_turns_on_one_core_tell_no_time(monkeypatch):
    """Each waited half of the time, though others could not have the core: for the other one."""
    ask = Worker.ask
    monkeypatch.setattr(Worker, "ask", lambda self, *given: structs.replace(ask(self, *given), waits=1.0))
    monkeypatch.setattr(Worker, "told", lambda self, apart, busy: 11e6)
    _, slices = run(monkeypatch, lambda now: 1.0, may_go_first=True)
    assert {one.best_ms for one in slices} == {None}


def test_without_waiting_a_call_takes_no_longer_than_with_it(monkeypatch):
    monkeypatch.setattr(Worker, "told", lambda self, apart, busy: 4e9)
    _, slices = run(monkeypatch, lambda now: 1.0)
    assert {one.best_ms for one in slices[1:]} == {40.0}


def test_under_load_nothing_waits_and_time_elapsed_is_what_counts(monkeypatch):
    machine, slices = run(monkeypatch, lambda now: 1.0, patience_s=60.0, may_go_first=True, under_load=True)
    assert set(machine.asked) == {(False, False)}
    assert {one.ms for one in slices} == {40.0}


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_a_neighbour_that_comes_in_the_last_rounds_leaves_the_quiet_ones(monkeypatch, patience_s):
    _, slices = run(monkeypatch, lambda now: 1.0 if now > 0.7 else 0.0, patience_s=patience_s)
    assert sum(one.quiet for one in slices) >= 6
    assert any(not one.quiet for one in slices)


@pytest.mark.parametrize(
    ("ms", "steady"),
    [([90, 50, 40, 40, 40, 40, 41, 40, 40], True), ([90, 80, 70, 60, 50, 40, 30, 20, 10], False), ([40, 40], False)],
)
def test_calls_are_steady_where_the_last_third_is_no_faster(ms, steady) -> None:
    assert is_steady([int(one * 1e6) for one in ms]) is steady


class Writer:
    """A worker whose texts of several rows are told, or which ends of them."""

    def __init__(self, ends: bool) -> None:
        self.ends, self.asked = ends, []

    def ask(self, request, kind, timeout_s):
        self.asked.append(request.rows)
        if self.ends:
            raise WorkerError("out of memory")
        return RowsMeasured(tokens_per_s={str(rows): 10.0 * rows for rows in request.rows})

    def pause(self) -> None: ...


@pytest.mark.parametrize(
    ("left_s", "ends", "found"), [(100.0, False, {"1": 10.0, "4": 40.0}), (100.0, True, {}), (10.0, False, {})]
)
def test_rows_are_told_where_there_is_time_and_fail_nothing(left_s, ends, found) -> None:
    writer, answer = Writer(ends), SimpleNamespace(generation=Generation(rows=2))
    runner = Runner(Candidate(Recipe(), "", {}), writer, answer, "", 0.0, turns_s=[4.0])
    rules = Rules(rows=(1, 2, 4), deadline=time.monotonic() + left_s, grace_s=0.0)
    start = Start(None, "", None, rules, None, {}, 1, None)
    assert start.row_rates(Started([runner])) == found
    assert writer.asked == ([(1, 4)] if left_s > 20 else [])
    assert start.row_rates(Started([replace(runner, candidate=replace(runner.candidate, once=True))])) == {}
