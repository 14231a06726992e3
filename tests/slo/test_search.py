"""The search: that it goes on after a kill, keeps failures, and says why."""

import asyncio
import csv
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.cli.serve.slo import _Work
from fettle.errors import UsageError
from fettle.load.torchserve import COLUMNS
from fettle.measure import Load, Surroundings
from fettle.package.host import host_id
from fettle.package.manifest import open_package, read_settings
from fettle.package.settings import CostCurve
from fettle.recipe import Recipe
from fettle.report import slo_page
from fettle.slo import proof
from fettle.slo import search as room
from fettle.slo.calibrate import Calibration
from fettle.slo.kept import Tested as OneTest
from fettle.slo.kept import open_journal, package_key
from fettle.slo.outcome import as_data, explain, front, torchserve_rows
from fettle.slo.overheads import Overheads
from fettle.slo.points import Branch, Failure, Measured, Point, SearchResult, Setting, Variant
from fettle.slo.proof import serve_settings
from fettle.slo.ranking import between, rank, worker_splits
from fettle.slo.search import search
from fettle.slo.server_process import ServerFailure, ServerProcess, ServerStats, StageTimes
from fettle.slo.simulate import Costs, capacity
from fettle.slo.stopping import Stopped
from fettle.slo.variants import _digest, distinct, package_all, study_recipes
from fettle.workload import find_target
from tests.forking import forked
from tests.processes import alive, left_behind

LIMIT = 2.0
QUICK = {"most_rows": 4, "cores": 1, "seconds": 0.5, "confirm": 1}


@pytest.fixture(scope="module")
def package(store):
    return open_package(store / "net-1")


@pytest.fixture(scope="module")
def done(package, tmp_path_factory):
    """One real search, and where it kept what it measured."""
    keep = tmp_path_factory.mktemp("search") / "measured.jsonl"
    with forked(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fettle.slo.overheads.RUN_S", 0.3)  # how certain the figures are is looked at by nobody
        return asyncio.run(search(package, LIMIT, keep=keep, rate=1.0, prices={"": 0.36}, **QUICK)), keep


def test_from_end_to_end(done):
    found, keep = done
    assert found.points[0].tests
    assert found.why
    assert found.tests >= 1
    assert found.tests_kept == 0
    (measured,) = found.branches.values()
    assert measured.overheads is not None
    assert measured.overheads.request_s + measured.overheads.batch_s > 0
    assert found.points[0].memory_bytes > 1 << 20
    inside = found.points[0].tests[0].inside
    assert inside.calls > 0
    assert inside.model_ms.p99 > 0
    assert found.points[0].tests[0].slower > 0
    data = as_data(found, name="net", target="net-1", machine="here", written="")
    json.dumps(data, allow_nan=False)
    assert _kept(keep, "calibration")
    assert "capacity" in slo_page(data)


def test_nothing_is_measured_twice(done, package, monkeypatch):
    found, keep = done

    def never(*args, **kwargs):
        raise AssertionError("measured again")

    monkeypatch.setattr(room, "calibrate", never)
    monkeypatch.setattr(ServerProcess, "start", never)
    again = asyncio.run(search(package, LIMIT, keep=keep, rate=1.0, **QUICK))
    assert again.tests_kept == again.tests == found.tests
    assert again.best.measured == found.best.measured
    assert not asyncio.run(search(package, LIMIT, keep=keep, rate=1e9, **QUICK)).met


def test_what_serving_adds_beside_a_neighbour_is_not_what_it_adds_alone(done, package, tmp_path):
    """A search that goes on says so, too."""
    keep = tmp_path / "measured.jsonl"
    keep.write_bytes(done[1].read_bytes())
    (key,) = _kept(keep, "overheads")
    with closing(open_journal(keep)) as journal:
        assert "others" in journal.answer(f"load, {key}", dict)
        journal.put(f"load, {key}", {"others": 0.5, "waits": None})
    found = asyncio.run(search(package, LIMIT, keep=keep, rate=1.0, **QUICK))
    assert 0.5 in [load.others for load in found.loads]


def test_what_was_measured_of_a_package_that_is_served_otherwise_is_not_kept(package):
    """A search sets the rows itself."""

    def served(**how):
        return package_key(replace(package, settings=msgspec.structs.replace(package.settings, **how)))

    assert package_key(package) == served(max_rows=2)
    ways = [{}, {"buckets": (1, 8)}, {"max_queue_rows": 7}, {"timeout_ms": 9.0}, {"max_worker_bytes": 1 << 30}]
    assert len({served(**how) for how in ways}) == len(ways)


def _kept(path, what):
    """The keys of what a search keeps."""
    journal = open_journal(path)
    journal.close()
    return [key for key in journal.lines if key.startswith(f"{what} ")]


def test_another_limit_shares_no_load_test(done, package):
    _, keep = done
    tests = _kept(keep, "test")
    assert tests
    assert all(f"{LIMIT:g}s" in key for key in tests)
    bad = keep.with_name("bad.jsonl")
    bad.write_text("{}")
    with pytest.raises(UsageError, match="holds no measurements of fettle serve slo"):
        open_journal(bad)


def test_ctrl_c_keeps_what_is_done(done, package, tmp_path, forks):
    stop = asyncio.Event()

    def on_progress(text):
        if "requests/s on" in text:
            stop.set()

    keep = tmp_path / "measured.jsonl"
    keep.write_bytes(done[1].read_bytes())  # other load tests, of the same calibration
    found = asyncio.run(
        search(package, LIMIT, keep=keep, on_progress=on_progress, stop=stop, **{**QUICK, "seconds": 30.0})
    )
    assert found.interrupted
    assert found.points  # simulated by then
    assert _kept(keep, "calibration")
    assert _kept(keep, "overheads")
    slo_page(as_data(found, name="net", target="net-1", machine="here", written=""))


@pytest.mark.slow
def test_a_killed_search_goes_on(store, tmp_path):
    command = [sys.executable, "-c", "from fettle.cli import main; main()", "serve", "slo", str(store / "net-1"),
               "--p99", "2s",
               "--cores", "1", "--max-rows", "2", "--duration", "0.5s", "--confirm", "1", "--no-write",
               "--output", str(tmp_path), "--device", "cpu"]  # fmt: skip
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    keep = tmp_path / "measured.jsonl"
    until = time.monotonic() + 120
    while time.monotonic() < until and not (keep.exists() and '{"key":"test ' in keep.read_text()):
        assert first.poll() is None
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    kept = _kept(keep, "test")
    before = keep.read_text()
    second = subprocess.run([*command, "--json", "--output", str(tmp_path / "c.csv")], capture_output=True, text=True)
    said = json.loads(second.stdout)
    assert second.returncode == (0 if said["met"] else 1), second.stderr
    assert said["tests_kept"] >= len(kept) >= 1
    assert keep.read_text().startswith(before[: before.rindex("\n")])
    rows = list(csv.DictReader((tmp_path / "c.csv").open()))
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == said["tests"]
    page = (tmp_path / "report.html").read_text()
    assert "http://" not in page.split("<script>")[0]
    assert json.loads((tmp_path / "result.json").read_text())["points"]


def test_a_limit_that_one_row_breaks(package, done, forks):
    found = asyncio.run(search(package, 1e-9, keep=None, **QUICK))
    assert not found.met
    assert "limit is missed" in found.why[0]
    assert as_data(found)["points"] == []


# -- with costs that are made up --------------------------------------------------------------------------------------


@pytest.fixture
def made_up(monkeypatch):
    """A world in which calibration, overheads and load tests are what they are set to: `costs` and `truth` by rows."""

    class World:
        costs: ClassVar[dict] = {}
        truth: ClassVar[dict] = {}
        broken = ()

    def calibrate(package, *, workers, **rest):
        if workers in World.broken:
            return Calibration({}, {1: "no memory"}, {})
        return Calibration({rows: (seconds,) for rows, seconds in World.costs.items()}, {}, {1: 1 << 20})

    async def overheads(self, setting):
        return Overheads(0.0, 0.0)

    async def prove(package, point, costs, found, seconds, journal, on_progress, stop, expected, *rest):
        real = Costs({rows: (value,) for rows, value in World.truth.items()}, 0, 0)
        point.measured = capacity(point.setting.batching(), real, found.limit_s)[0]

    monkeypatch.setitem(capacity.__kwdefaults__, "requests", 1500)  # as few as those of the load tests
    monkeypatch.setattr(room, "calibrate", calibrate)
    monkeypatch.setattr(room._Search, "_overheads", overheads)
    monkeypatch.setattr(room, "prove", prove)
    return World


def test_workers_that_fail_are_a_failure_and_the_search_goes_on(package, made_up, tmp_path):
    made_up.costs = made_up.truth = {1: 0.01, 2: 0.012, 4: 0.016}
    made_up.broken = (2,)
    found = asyncio.run(search(package, 0.1, most_rows=4, cores=4))
    assert found.met
    assert [failure.why for failure in found.failures] == ["no memory"]
    assert "2 workers" in found.failures[0].what
    made_up.broken = (1, 2, 3, 4)
    keep = tmp_path / "measured.jsonl"
    assert asyncio.run(search(package, 0.1, most_rows=4, cores=1, keep=keep)).failures
    made_up.broken = ()  # as when memory is free again
    assert asyncio.run(search(package, 0.1, most_rows=4, cores=1, keep=keep)).met
    made_up.broken = (1, 2, 3, 4)
    nothing = asyncio.run(search(package, 0.1, most_rows=4, cores=4))
    assert nothing.best is None
    assert nothing.why == ["nothing could be measured: see the failures"]
    page = slo_page(as_data(nothing, name="<b>net</b>", target="x", machine="here", written=""))
    assert "no memory" in page
    assert "<b>net" not in page


def test_others_are_tested_from_where_the_first_one_lets_expect_and_none_that_differs_in_delay(
    package, made_up, monkeypatch
):
    begun, rows = [], []

    async def prove(package, point, costs, found, seconds, journal, on_progress, stop, expected, *rest):
        begun.append(expected and expected / point.predicted)
        rows.append(point.setting.max_rows)
        point.measured = 0.97 * point.predicted

    monkeypatch.setattr(room, "prove", prove)
    made_up.costs = {rows: 0.0004 + 0.003 * rows for rows in range(1, 9)}
    asyncio.run(search(package, 0.1, most_rows=8, cores=1))
    assert begun[0] is None
    assert begun[1:] == [pytest.approx(0.97)] * 2
    assert rows == [4, 8, 2]  # 4 rows serve 1.6% less than 8, which is as good
    begun.clear()
    made_up.costs = {rows: 0.02 + 0.001 * rows for rows in range(1, 9)}
    asyncio.run(search(package, 0.1, most_rows=8, cores=1))
    assert len(begun) == 1  # fewer rows would serve little more than half


@pytest.mark.parametrize(
    ("truth", "expected", "to_beat", "rates", "measured"),
    [
        (105, None, 0, [100, 110, 104.9], 104.9),  # a tenth up, then between, until 5% are left
        (900, None, 0, [100, 110, 143, 228.8], 228.8),  # in longer and longer steps where all hold
        (70, None, 0, [100, 85, 59.5, 71.1], 59.5),
        (70, 80, 0, [80, 76.56, 65.07, 70.6], 65.07),
        (90, 80, 95, [95], 0),  # not below what another has shown, and that is not kept
        (90, 99, 95, [99, 95], 0),
        (97, 99, 95, [99, 95], 95),
        (110, 98, 95, [98, 102.4, 107, 111.8], 107),
    ],
)
def test_load_tests_end_where_they_know_enough(package, monkeypatch, truth, expected, to_beat, rates, measured):
    tested = []

    class Up:
        @staticmethod
        async def start(*args):
            return Up()

        async def close(self):
            pass

    async def one(served, package, point, costs, rate, *rest):
        tested.append(rate)
        return OneTest(rate, rate <= truth, {"void": False}, ServerStats())

    monkeypatch.setattr(proof, "ServerProcess", Up)
    monkeypatch.setattr(proof, "_test", one)
    found = found_with({1: 0.01})
    point = Point(Setting(1, 1, max_rows=1), predicted=100.0)
    costs = found.branches[Branch(1, 1)].costs
    asyncio.run(proof.prove(package, point, costs, found, 1.0, expected=expected, to_beat=to_beat))
    assert tested == pytest.approx(rates, rel=1e-3)
    assert point.measured == pytest.approx(measured, rel=1e-3)


def test_a_load_test_that_others_disturbed_is_made_again_once(package, monkeypatch):
    """What others have of the second they are said to have had."""
    monkeypatch.setattr("fettle.measure._watch.WAIT_S", 60.0)
    around, made, loads = Surroundings(), [], [Load(others=0.5), Load(others=0.4)]
    monkeypatch.setattr(around, "look", lambda: loads.pop(0))
    monkeypatch.setattr(around, "wait_for_quiet", lambda most_s: True)

    async def test(served, rate):
        made.append(rate)
        return OneTest(rate, False, {"void": ""}, ServerStats())

    async def server():
        return SimpleNamespace(close=server)

    found, point = found_with({1: 0.01}), Point(Setting(1, 1, max_rows=1), predicted=100.0)
    asyncio.run(proof.bracket(
        point, found, open_journal(None), 100.0, 100.0, near=False, key=str, start=server, test=test,
        on_test=lambda rate: None, around=around,
    ))  # fmt: skip
    assert made == [100.0, 100.0]
    assert point.tests[0].run["load"]["others"] == found.load.others == 0.4
    assert point.tests[0].run["is_quiet"] is False


def test_ctrl_c_ends_the_wait_for_a_quiet_machine(package, made_up, monkeypatch):
    stop = asyncio.Event()

    def calibrate(given, *, around, **rest):
        stop.set()
        assert around.stopped()
        raise Stopped

    monkeypatch.setattr(room, "calibrate", calibrate)
    assert asyncio.run(search(package, 0.1, most_rows=4, cores=1, stop=stop)).interrupted


def test_a_search_beside_a_neighbour_says_so_first(package, made_up, monkeypatch):
    made_up.costs = made_up.truth = {1: 0.01, 2: 0.012, 4: 0.016}
    plain = room.calibrate

    def disturbed(given, **rest):
        made = plain(given, **rest)
        made.loads = {1: {"others": 0.5, "waits": None}, 2: {"others": 0.0}}
        return made

    monkeypatch.setattr(room, "calibrate", disturbed)
    data = as_data(asyncio.run(search(package, 0.1, most_rows=4, cores=1)), name="net", target="x", machine="",
                   written="")  # fmt: skip
    assert (data["is_quiet"], data["load"]["others"], data["branches"][0]["load"]["others"]) == (False, 0.5, 0.5)
    assert "On a busy machine (others took 50% of the cores): " in slo_page(data)


def test_a_prediction_that_is_off_is_corrected(package, made_up):
    made_up.costs = {1: 0.01, 2: 0.012, 4: 0.016}
    made_up.truth = {rows: 1.6 * value for rows, value in made_up.costs.items()}
    found = asyncio.run(search(package, 0.1, most_rows=4, cores=1))
    assert any("costs corrected" in why for why in found.why)
    assert next(iter(found.branches.values())).scale > 1.3


def test_a_server_that_fails_is_a_failure(package, made_up, monkeypatch):
    made_up.costs = made_up.truth = {1: 0.01, 2: 0.012, 4: 0.016}

    async def prove(*args):
        raise ServerFailure("the server ended")

    monkeypatch.setattr(room, "prove", prove)
    found = asyncio.run(search(package, 0.1, most_rows=4, cores=1))
    assert not found.met
    assert {failure.why for failure in found.failures} == {"the server ended"}


def test_no_batch_is_tried_that_is_larger_than_was_asked_for_where_calls_have_the_sizes_of_buckets(package, made_up):
    made_up.costs = made_up.truth = {1: 0.01, 2: 0.012, 4: 0.016, 8: 0.02}
    served = msgspec.structs.replace(package.settings, buckets=(1, 2, 4, 8))
    found = asyncio.run(search(replace(package, settings=served), 0.1, most_rows=6, cores=1))
    assert {point.setting.max_rows for point in found.points} == {1, 2, 4}


def test_a_packages_own_queue_is_the_one_that_is_simulated(package, made_up):
    made_up.costs = made_up.truth = {1: 0.01, 2: 0.012, 4: 0.016}
    short = replace(package, settings=msgspec.structs.replace(package.settings, max_queue_rows=2))
    few, many = (asyncio.run(search(one, 0.1, most_rows=4, cores=1)).points for one in (short, package))
    assert max(point.predicted for point in few) < 0.9 * max(point.predicted for point in many)


def test_numbers_of_workers_between_the_best_and_its_neighbours(package, made_up):
    made_up.costs = made_up.truth = {1: 0.01, 2: 0.012, 4: 0.016}
    found = asyncio.run(search(package, 0.1, most_rows=4, cores=8))
    assert {branch.workers for branch in found.branches} == {1, 2, 4, 6, 8}  # more are better here: 6 is beside 8
    assert worker_splits(8) == [(1, 8), (2, 4), (4, 2), (8, 1), (1, 7)]
    assert worker_splits(6)[-2:] == [(6, 1), (1, 5)]
    assert worker_splits(1) == [(1, 1)]
    assert worker_splits(2, "cuda:0") == [(1, 1), (2, 1)]
    assert between(4, [1, 2, 4, 8]) == [3, 6]
    assert between(1, [1, 2]) == []


def test_a_recipe_far_behind_is_left_out_and_a_price_is_a_cost(package, made_up, monkeypatch):
    made_up.costs = made_up.truth = {1: 0.01, 2: 0.012, 4: 0.016}
    plain = room.calibrate

    def slower(given, **rest):
        made = plain(given, **rest)
        scale = 5 if given.manifest.version == "slow" else 1
        return Calibration({n: tuple(scale * v for v in s) for n, s in made.samples.items()}, {}, made.memory_bytes)

    monkeypatch.setattr(room, "calibrate", slower)
    slow = replace(package, manifest=msgspec.structs.replace(package.manifest, version="slow", recipe={"a": "b"}))
    found = asyncio.run(
        search([Variant("fast", package), Variant("slow", slow)], 0.1, most_rows=4, cores=2, prices={"cpu": 0.36})
    )
    assert {b.variant for b in found.branches if b.workers == 2} == {"fast"}
    assert any("slow" in failure.what and "answers as exactly" in failure.why for failure in found.failures)
    assert found.best.cost == pytest.approx(100 / found.best.measured)
    assert found.best.setting.variant == "fast"


# -- words and tables -------------------------------------------------------------------------------------------------


def found_with(costs, limit_s=0.1):
    branch = Branch(1, 1)
    measured = Measured(branch, Calibration({rows: (seconds,) for rows, seconds in costs.items()}))
    found = SearchResult(limit_s, branches={branch: measured})
    found.points = rank([measured], limit_s)
    return found


def test_it_says_why_more_rows_bring_nothing():
    linear = found_with({1: 0.004, 2: 0.008, 4: 0.016, 8: 0.032})
    assert any(text.startswith("2 to 4 rows:") and "the curve is linear" in text for text in explain(linear))
    steep = found_with({1: 0.01, 2: 0.011, 4: 0.012, 8: 0.013})
    assert any("a row costs 10 ms in 1 and 5.5 ms in 2" in text for text in explain(steep))
    assert all(point.now == point.predicted > 1 > point.predicted_p50_s for point in steep.points)
    full = found_with({1: 0.03, 2: 0.04, 4: 0.06, 8: 0.095})
    assert any(text.startswith("4 to 8 rows:") and "is late" in text for text in explain(full))
    queue = found_with({1: 0.099})
    assert "queueing breaks the limit" in explain(queue)[0]
    assert "over the limit without any queue" in explain(found_with({1: 0.2}))[0]


def test_of_settings_that_keep_one_rate_the_one_with_less_p99_there_is_best():
    found = found_with({1: 0.004, 2: 0.007})
    for point, p99 in zip(found.points, (95.0, 88.0), strict=False):
        for rate, held in ((100.0, True), (104.5, False)):
            point.tests.append(OneTest(rate, held, {"latency_ms": {"p99": p99 if held else 120.0}}, ServerStats()))
        point.measured = 100.0
    assert found.best is found.points[1]
    assert sorted(found.points, key=lambda point: point.order)[:2] == [found.points[1], found.points[0]]
    other = found.points[0].setting
    tie = f"{other} keeps the limit up to 100 requests/s as well, with a p99 of 95 instead of 88 ms there"
    assert tie in explain(found)
    found.points[0].measured = 104.5  # shown by other tests: more capacity goes before less p99
    assert found.best is found.points[0]


def test_it_says_that_a_setting_was_not_brought_to_its_limit():
    found = found_with({1: 0.01})
    best, said = found.points[0], "it may serve more than the most that was tried"
    best.tests.append(OneTest(100.0, True, {"latency_ms": {"p99": 20.0}}, ServerStats()))
    assert any(said in text for text in explain(found))
    best.tests.append(OneTest(110.0, False, {"latency_ms": {"p99": 200.0}}, ServerStats()))
    assert not any(said in text for text in explain(found))


def test_it_says_that_the_machine_was_slower_than_when_calibrated():
    found = found_with({1: 0.004, 2: 0.006})
    costs = found.branches[Branch(1, 1)].costs
    # A call of one row and three of two, 22 ms by the curve and a tenth more by simulation, took 29.04 ms.
    inside = ServerStats(calls=4, sizes={1: 1, 2: 3}, model_ms=StageTimes(mean=7.26))
    slower = proof._slower(inside, costs, 1.1)
    assert slower == pytest.approx(1.2)
    assert proof._slower(ServerStats(), costs, 1.0) is None
    found.points[0].tests.append(OneTest(100.0, True, {"latency_ms": {"p99": 20.0}}, inside, slower=slower))
    assert any("took 1.20x as long in load tests as when calibrated" in text for text in explain(found))
    found.points[0].tests[0].slower = 1.04
    assert not any("when calibrated" in text for text in explain(found))


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0.01, 1), st.integers(1, 9)), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_nobody_beats_the_front_and_somebody_on_it_beats_each_other(values):
    points = [
        Point(Setting(1, 1, max_rows=index + 1), rate, p99_s=p99, memory_bytes=memory << 20)
        for index, (rate, p99, memory) in enumerate(values)
    ]
    chosen = front(points)
    assert chosen

    def beats(a, b, slack):
        return (
            a.capacity >= b.capacity / slack and a.p99_s <= b.p99_s * slack and a.memory_bytes <= b.memory_bytes * slack
        )

    for point in points:
        assert point in chosen or any(beats(other, point, 1.03) for other in chosen if other is not point)
        if point in chosen:
            assert not any(beats(other, point, 0.97) for other in points if other is not point)


def test_a_setting_and_what_it_is_called():
    setting = Setting(2, 1, "cuda:0", "precision=bf16", max_rows=8, delay_s=0.001)
    assert str(setting) == "2 workers x 1 thread on cuda:0, precision=bf16, up to 8 rows, 1 ms delay"
    assert setting.batching().delay_ms == pytest.approx(1)


def test_code_of_its_own_needs_trust_before_anything_is_measured(store):
    digest = open_package(store / "echo").handler_digest
    with pytest.raises(UsageError, match=f"trust='{digest}'"):
        _Work.of([str(store / "echo")], [], None, "", 3, ["0" * 64])
    assert _Work.of([str(store / "echo")], [], None, "", 3, [digest]).packages


def test_what_is_found_can_be_served(package):
    costs = Costs({1: (0.01,), 4: (0.02,)})
    made = serve_settings(package.settings, Setting(2, 1, max_rows=4, delay_s=0.001), costs, 0.1)
    assert made.max_rows == 4
    assert made.cost_curve(host_id()).at(4) == 0.02
    assert made.cost_curve("elsewhere") is None  # a curve of another machine is not believed
    on_gpu = serve_settings(package.settings, Setting(1, 1, "cuda:0", max_rows=4), costs, 0.1)
    assert (made.devices, on_gpu.devices) == (("cpu",), ("cuda:0",))
    assert read_settings(package.folder, package.manifest) == package.settings


def test_torchserve_table_of_nothing_is_empty():
    assert torchserve_rows(found_with({1: 0.01}), "net") == []


# -- recipes ----------------------------------------------------------------------------------------------------------


def test_recipes_are_packaged_and_what_cannot_be_is_a_failure(tmp_path, forks):
    (tmp_path / "small.py").write_text(
        "import torch\n"
        "def workload():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 3)).eval(), [torch.rand(4, 4)]\n"
    )
    text = f"{tmp_path}/small.py"
    recipes = [Recipe({"precision": "bf16"}), Recipe({"quantize": "int8-dynamic"})]
    made, failures = package_all(
        text, find_target(text), recipes, tmp_path / "packages", max_rows=4, max_error=1e-9
    )  # fmt: skip
    assert made == []
    assert [failure.what for failure in failures] == ["the recipe precision=bf16", "the recipe quantize=int8-dynamic"]
    assert "above the limit of 1e-09" in failures[0].why
    assert "quantize" in failures[1].why
    assert len(distinct([*recipes, Recipe(), Recipe({"batch": "x2"})])) == 3
    again, _ = package_all(text, find_target(text), recipes[:1], tmp_path / "packages", max_rows=4, max_error=1.0)
    assert again[0].name == ""  # the only one
    assert again[0].package.manifest.recipe == {"precision": "bf16"}
    assert math.isfinite(again[0].error)


def test_what_packages_a_recipe_ends_with_the_search(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def workload():\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'begun').touch()\n"
        "    time.sleep(300)\n"
    )
    text = f"{tmp_path}/slow.py"
    target, recipes, folder = find_target(text), [Recipe()], tmp_path / "packages"
    searching = multiprocessing.get_context("fork").Process(
        target=package_all, args=(text, target, recipes, folder), kwargs={"max_rows": 4, "max_error": 1.0}
    )
    searching.start()
    until = time.monotonic() + 60
    while not (tmp_path / "begun").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert alive(text)
    searching.kill()
    searching.join()
    assert not left_behind(set(), text)


def test_a_package_is_made_anew_where_a_file_beside_its_target_was_edited(tmp_path):
    (tmp_path / "model.py").write_text("from parts import WIDTH\ndef workload(): ...\n")
    (tmp_path / "parts.py").write_text("WIDTH = 3\n")
    target = find_target(f"{tmp_path / 'model.py'}:workload")
    before = _digest(target, Recipe(), 8)
    (tmp_path / "parts.py").write_text("WIDTH = 4\n")
    assert _digest(target, Recipe(), 8) != before


def test_two_searches_in_one_folder_do_not_make_the_same_packages(run_fettle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text("def workload(): ...\n")
    made = []

    def package_all(*given, **how):
        made.append(given)
        return [], [Failure("the recipe baseline", "it cannot be exported")]

    monkeypatch.setattr("fettle.slo.variants.package_all", package_all)
    failed = run_fettle("serve", "slo", "small.py", "--p99", "1s", "--output", "found")
    assert (failed.code, "it cannot be exported" in failed.err, len(made)) == (2, True, 1)
    assert not (tmp_path / "found").exists()
    with closing(open_journal(tmp_path / "found" / "measured.jsonl")):
        refused = run_fettle("serve", "slo", "small.py", "--p99", "1s", "--output", "found")
    assert (refused.code, "another fettle serve slo is writing there" in refused.err, len(made)) == (2, True, 1)


def test_a_setting_that_cannot_be_written_costs_no_search(run_fettle, store, tmp_path, monkeypatch):
    found, asked = found_with({1: 0.01}), []
    found.points[0].measured = 50.0

    async def search(*given):
        asked.append(given)
        return found

    def write(*given):
        raise OSError(28, "No space left on device")

    def check_writable(*paths):
        for path in filter(None, paths):
            raise UsageError(f"cannot write {path}: Read-only file system")

    monkeypatch.setattr(_Work, "search", search)
    monkeypatch.setattr(_Work, "write", write)
    command = ("serve", "slo", store / "net-1", "--p99", "1s", "--output", tmp_path / "slo")
    said = run_fettle(*command)
    assert (said.code, "could not be written" in said.err, "requests a second" in said.out) == (2, True, True)
    assert json.loads((tmp_path / "slo" / "result.json").read_text())["written"] == ""
    monkeypatch.setattr("fettle.cli.serve._slo_packages.check_writable", check_writable)
    said = run_fettle(*command)
    assert (said.code, "Read-only" in said.err, "give --no-write" in said.err, len(asked)) == (2, True, True, 1)
    assert run_fettle(*command, "--no-write").code in (0, 1)
    assert len(asked) == 2


def test_recipes_of_a_study(tmp_path, forks):
    import torch

    from fettle.machine import this_machine
    from fettle.measure import Accuracy, Trial
    from fettle.measure._inference import with_check
    from fettle.study import Study
    from fettle.workload import fingerprint

    (tmp_path / "small.py").write_text(
        "import torch\n"
        "def workload():\n"
        "    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Linear(4, 3)).eval(), [torch.rand(4, 4)]\n"
    )
    target = find_target(f"{tmp_path}/small.py")
    torch.manual_seed(0)
    mark = fingerprint(with_check(target.load()))
    path = tmp_path / "study.db"
    study = Study.open("small", f"sqlite:///{path}", mark, this_machine().id)
    for levels, ms, status in (({}, 4.0, "measured"), ({"precision": "bf16"}, 2.0, "measured"),
                               ({"precision": "bf16", "threads": "2"}, 1.0, "measured"),
                               ({"precision": "fp16"}, 0.5, "rejected"),
                               ({"grad": "inference_mode"}, 3.0, "measured")):  # fmt: skip
        study.add(Trial(Recipe(levels), status, time_ms=ms, samples=4, accuracy=Accuracy(error=0.001)))
    found = study_recipes(target, str(path), "", 3)
    assert [dict(recipe.levels) for recipe in found] == [{}, {"precision": "bf16"}, {"grad": "inference_mode"}]
    assert len(study_recipes(target, str(path), "", 1)) == 2
    with pytest.raises(UsageError, match="no such study"):
        study_recipes(target, str(tmp_path / "none.db"), "", 3)


def test_a_server_that_does_not_start_is_not_waited_for_once_the_search_is_stopped(package):
    with pytest.raises(Stopped):
        asyncio.run(ServerProcess.start(package, package.settings, (), lambda: True))


def test_ctrl_c_ends_the_measurement_of_what_serving_adds(monkeypatch):
    """It takes thirty calls of the largest batch."""
    from fettle.load.run import Run
    from fettle.slo import overheads

    async def closed_loop(requests, clients, seconds, stop):
        return Run("closed", 0.0, 1.0, np.full(4, 0.1), clients, {200: 4}, interrupted=stop.is_set())

    async def stats():
        return ServerStats()

    async def measure():
        stop = asyncio.Event()
        stop.set()
        served, curve = SimpleNamespace(stats=stats), CostCurve((1,), (0.1,))
        await overheads.measure_overheads(served, [], curve, workers=1, max_rows=1, stop=stop)

    monkeypatch.setattr(overheads, "closed_loop", closed_loop)
    with pytest.raises(Stopped):
        asyncio.run(measure())


def test_overheads_are_what_the_two_loops_leave_beside_the_model(monkeypatch):
    """One client waits 5 ms, 2 of them for the model; two workers make calls of 4 rows in 4.5 ms, 3.9 of it the model.

    Such a call took 3.5 ms when nothing was served: eight requests that came meanwhile made it longer.
    """
    from fettle.load.run import Run
    from fettle.slo import overheads
    from fettle.slo.server_process import ServerStats, StageTimes

    class World:
        looks = iter((
            ServerStats(100, {1: 100}, {1: 100}, model_ms=StageTimes(2.1, 2.0, 2.2, 2.4)),
            ServerStats(100, {4: 100}, {4: 100}, model_ms=StageTimes(3.9, 3.8, 4.2, 4.4)),
        ))  # fmt: skip

        async def stats(self):
            return next(self.looks)

    async def closed_loop(requests, clients, seconds, stop):
        latency = np.full(400, 0.005 if clients == 1 else 0.02)
        return Run("closed", 0.0, 400 / (2 * 4 / 0.0045), latency, clients, {200: 400})

    monkeypatch.setattr(overheads, "closed_loop", closed_loop)
    curve = CostCurve((1, 4), (0.002, 0.0035))
    made = asyncio.run(overheads.measure_overheads(World(), [], curve, workers=2, max_rows=4))
    assert made.batch_s == pytest.approx(0.0006)
    assert made.request_s == pytest.approx(0.0024)
    assert made.held_s == pytest.approx(0.0004 / 8)  # of calls of 4 rows
