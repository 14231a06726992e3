"""What others took, from made-up readings of the machine: nothing here depends on what this machine does."""

import itertools
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fettle.files import plain
from fettle.measure import _watch
from fettle.measure._load import QUIET_OTHERS, Load, busy_load, mean_load
from fettle.measure._meters import spent
from fettle.measure._waits import Waits, busiest, held_up_ns, ran_ns, waited_ns, without_waits
from fettle.measure._watch import Patience, Reading, Surroundings, Watch, read_machine
from fettle.procs import limits

START = Reading(at_s=100.0, boot_s=500.0, busy_s=40.0, steal_s=0.0, pressure_s=1.0, throttled_s=0.0, cores=2)


def after(seconds: float, before: Reading = START, **more) -> Reading:
    """A reading so many seconds later, with these counters further on."""
    moved = {name: (getattr(before, name) or 0.0) + by for name, by in more.items()}
    return replace(before, at_s=before.at_s + seconds, boot_s=before.boot_s + seconds, **moved)


def load_of(*readings: Reading, own_s: float = 0.0, waits: float = math.nan) -> Load:
    given = iter(readings)
    watch = Watch(lambda: next(given))
    for _ in readings[1:]:
        watch.mark(own_s)
    return watch.load(waits)


def test_what_our_processes_had_is_not_the_others():
    assert load_of(START, after(1.0, busy_s=2.0), own_s=1.9).others == pytest.approx(0.05)
    assert load_of(START, after(1.0, busy_s=2.0), own_s=1.9).is_quiet
    assert load_of(START, after(1.0, busy_s=1.0), own_s=1.5).others == 0.0  # clocks of two kinds


def test_a_neighbour_on_one_of_two_cores_is_seen():
    load = load_of(START, after(1.0, busy_s=2.0), own_s=1.0)
    assert load.others == pytest.approx(0.5)
    assert not load.is_quiet
    assert "50% of the cores" in str(load)


def test_this_process_is_one_of_ours():
    load = load_of(START, after(1.0, busy_s=1.0, process_s=1.0))
    assert load.others == 0.0


@pytest.mark.parametrize("field", ["busy_s", "steal_s", "pressure_s", "throttled_s", "clock_mhz", "overheated"])
def test_a_source_that_is_missing_or_vanishes_decides_nothing(field):
    assert load_of(replace(START, **{field: None}), replace(after(1.0), **{field: None})).is_quiet
    assert load_of(START, replace(after(1.0), **{field: None})).is_quiet
    assert load_of(replace(START, **{field: None}), after(1.0)).is_quiet


@pytest.mark.parametrize("field", ["busy_s", "steal_s", "pressure_s", "throttled_s"])
def test_a_counter_that_runs_backwards_or_wraps_decides_nothing(field):
    load = load_of(replace(START, **{field: 2.0**32}), replace(after(1.0), **{field: 3.0}))
    assert load.is_quiet


def test_a_machine_that_slept_in_a_slice_is_seen():
    woken = replace(after(1.0), boot_s=START.boot_s + 3600)
    load = load_of(START, woken)
    assert load.slept
    assert not load.is_quiet
    assert "suspended" in str(load)


def test_cores_that_go_or_come_in_a_slice_disturb_it_and_leave_the_others_unknown():
    load = load_of(START, replace(after(1.0, busy_s=2.0), cores=1))
    assert math.isnan(load.others)
    assert not load.is_quiet
    assert "cores went or came" in str(load)
    gone = replace(after(0.1), cores=1)
    later = load_of(START, gone, after(0.1, gone))
    assert math.isnan(later.others)
    assert later.is_quiet


def test_a_wall_clock_that_steps_changes_nothing(monkeypatch):
    """An hour back, as where somebody sets it."""
    wall = itertools.count(1e9, -3600)
    clocks = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
    monkeypatch.setattr(_watch, "time", SimpleNamespace(**{**clocks, "time": lambda: next(wall)}))
    watch = Watch()
    watch.mark()
    assert not watch.load().slept
    assert not math.isnan(watch.load(waits=0.0).others)


STAT = """cpu  600 0 0 1400 0 0 0 30 0 0
cpu0 300 0 0 200 0 0 0 10 0 0
cpu1 0 0 0 500 0 0 0 0 0 0
cpu2 200 10 20 200 0 30 40 20 0 0
cpu3 0 0 0 500 0 0 0 0 0 0
intr 1 2 3
"""


@pytest.mark.parametrize(
    ("ours", "busy_s", "steal_s", "cores"),
    [({0, 1, 2, 3}, 6.0, 0.3, 4), ({1, 2}, 3.0, 0.2, 2), (set(), 6.0, 0.3, 4), ({4, 5}, 6.0, 0.3, 4)],
    ids=["all", "some", "not told", "numbered otherwise"],
)
def test_only_what_is_done_on_our_cores_counts(tmp_path, monkeypatch, ours, busy_s, steal_s, cores):
    """Under taskset or in a cpuset others' work on other cores disturbs nothing."""
    (tmp_path / "stat").write_text(STAT)
    monkeypatch.setattr(_watch, "_STAT", tmp_path / "stat")
    monkeypatch.setattr(_watch, "affinity", lambda: ours)
    read = read_machine()
    assert (read.busy_s, read.steal_s, read.cores) == (busy_s, steal_s, cores)


def test_no_time_between_two_readings_is_no_division():
    assert load_of(START, START).is_quiet


def test_a_quota_that_stops_us_and_a_hypervisor_that_takes_are_seen():
    stopped = load_of(START, after(1.0, throttled_s=0.3))
    assert stopped.is_quota
    assert not stopped.is_quiet
    assert not load_of(START, after(1.0)).is_quota
    assert not load_of(START, after(1.0, throttled_s=0.3, steal_s=2 * QUIET_OTHERS + 0.1)).is_quota
    assert not load_of(START, after(1.0, steal_s=2 * QUIET_OTHERS + 0.1)).is_quiet


def test_a_clock_that_falls_by_heat_is_seen():
    cool = (replace(START, clock_mhz=3000.0, overheated=4), replace(after(1.0), clock_mhz=3000.0, overheated=4))
    assert not load_of(*cool, replace(after(2.0), clock_mhz=2000.0, overheated=5)).is_quiet
    assert load_of(*cool, replace(after(2.0), clock_mhz=2900.0, overheated=5)).is_quiet


def test_a_low_clock_alone_is_none():
    """A core that rests has one, and so have cores that are all busy beside what one of them reaches alone."""
    cool = (replace(START, clock_mhz=5000.0, overheated=4), replace(after(1.0), clock_mhz=5000.0, overheated=4))
    assert load_of(*cool, replace(after(2.0), clock_mhz=3900.0, overheated=4)).is_quiet
    assert load_of(replace(START, clock_mhz=5000.0), replace(after(1.0), clock_mhz=800.0)).is_quiet


def test_clocks_and_heat_are_those_of_the_cores_that_we_may_use(tmp_path, monkeypatch):
    for core, khz, count in ((0, 5_000_000, 9), (2, 3_900_000, 1), (10, 4_000_000, 2)):
        for name, value in (("cpufreq/scaling_cur_freq", khz), ("thermal_throttle/core_throttle_count", count),
                            ("thermal_throttle/package_throttle_count", count)):  # fmt: skip
            path = tmp_path / f"cpu{core}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
    monkeypatch.setattr(_watch, "_CORES", tmp_path)
    monkeypatch.setattr(_watch.os, "sched_getaffinity", lambda _: {10, 2}, raising=False)
    _watch._core_files.cache_clear()
    read = read_machine()
    _watch._core_files.cache_clear()
    assert (read.clock_mhz, read.overheated) == (4000.0, 6.0)


def test_waiting_for_a_core_is_no_quiet_slice():
    assert not Load(waits=0.5).is_quiet
    assert Load(waits=0.01).is_quiet
    assert Load().is_quiet
    assert "waited 50%" in str(Load(waits=0.5))


def test_threads_that_wait_for_each_other_are_no_neighbour():
    """A runtime with more threads than cores: others had nothing that these could have waited for."""
    assert Load(waits=0.3, others=0.01).is_quiet
    assert not Load(waits=0.3, others=0.08).is_quiet
    assert Load(waits=0.3, others=1 / 256, cores=256).is_quiet
    assert not Load(waits=0.3, others=1 / 64, cores=64).is_quiet  # one busy process


def test_the_mean_of_loads_leaves_out_what_is_not_known():
    mean = mean_load([Load(waits=0.2), Load(waits=0.4, others=0.5), Load()])
    assert mean.waits == pytest.approx(0.3)
    assert mean.others == 0.5
    assert math.isnan(mean.steal)


def test_this_machine_can_be_read():
    first, second = read_machine(), read_machine()
    assert second.at_s >= first.at_s
    assert second.cores >= 1
    for one, other in ((first.busy_s, second.busy_s), (first.process_s, second.process_s)):
        assert one is None or other is None or other >= one


def test_sources_that_are_not_there_are_none(tmp_path, monkeypatch):
    nothing = tmp_path / "nothing"
    monkeypatch.setattr(_watch, "_STAT", nothing)
    monkeypatch.setattr(_watch, "_PRESSURE", nothing)
    monkeypatch.setattr(_watch, "_own_files", lambda name: [nothing])
    monkeypatch.setattr(_watch, "_core_files", lambda name: [nothing])
    read = read_machine()
    assert (read.busy_s, read.steal_s, read.pressure_s, read.throttled_s, read.clock_mhz) == (None,) * 5


@pytest.mark.parametrize(
    "text", ["", "cpu", "cpu a b c d e f g h\n", "cpu 1 2 3\n", "\0\0\n", "throttled_usec never\n"]
)
def test_sources_that_say_nonsense_are_none(tmp_path, monkeypatch, text):
    file = tmp_path / "file"
    file.write_text(text)
    monkeypatch.setattr(_watch, "_STAT", file)
    monkeypatch.setattr(_watch, "_PRESSURE", file)
    monkeypatch.setattr(_watch, "_own_files", lambda name: [file])
    read = read_machine()
    assert (read.busy_s, read.pressure_s, read.throttled_s) == (None, None, None)


@pytest.mark.parametrize("unified", ["", "unified"], ids=["version 2", "beside version 1"])
def test_pressure_is_our_cgroups_where_it_tells_and_else_the_machines(tmp_path, monkeypatch, unified):
    def pressure(path, microseconds):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={microseconds}\n")

    pressure(tmp_path / "machine", 7_000_000)
    (tmp_path / "cgroup").write_text("3:memory:/other\nnonsense\n0::/box/ours\n")
    monkeypatch.setattr(_watch, "_PRESSURE", tmp_path / "machine")
    monkeypatch.setattr(limits, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(limits, "_OWN", tmp_path / "cgroup")
    monkeypatch.setattr(_watch, "_own_files", _watch._own_files.__wrapped__)  # anew each time
    assert read_machine().pressure_s == 7.0
    pressure(tmp_path / "groups" / unified / "box" / "ours" / "cpu.pressure", 2_000_000)
    assert read_machine().pressure_s == 2.0


@pytest.mark.parametrize(("said", "seconds"), [
    ("usage_usec 9\nthrottled_usec 1500000\n", 1.5), ("nr_throttled 3\nthrottled_time 2500000000\n", 2.5),
    ("usage_usec 9\n", None),
])  # fmt: skip
def test_what_a_quota_stopped_is_told_in_either_version_of_cgroups(tmp_path, monkeypatch, said, seconds):
    (tmp_path / "cpu.stat").write_text(said)
    monkeypatch.setattr(_watch, "_own_files", lambda name: [tmp_path / name])
    assert read_machine().throttled_s == seconds


class Clock:
    """Time that passes when somebody sleeps; others have both cores until `busy_until`."""

    def __init__(self, busy_until: float) -> None:
        self.now, self.busy_until, self.busy_s = 100.0, busy_until, 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.busy_s += 2 * max(0.0, min(seconds, self.busy_until - self.now))
        self.now += seconds

    def read(self) -> Reading:
        return Reading(self.now, self.now, busy_s=self.busy_s, cores=2)


def test_waiting_ends_when_the_machine_is_quiet(monkeypatch):
    clock = Clock(110.0)
    monkeypatch.setattr(_watch, "time", clock)
    patience = Patience(left_s=60.0)
    assert patience.wait(Watch(clock.read), math.inf)
    assert 110.0 <= clock.now <= 112.0
    assert patience.may_wait()
    assert patience.left_s == pytest.approx(60 - patience.waited_s)


def test_waiting_has_a_bound_and_is_given_up_on_a_machine_that_is_never_quiet(monkeypatch):
    clock = Clock(math.inf)
    monkeypatch.setattr(_watch, "time", clock)
    patience = Patience(left_s=60.0)
    assert not patience.wait(Watch(clock.read), math.inf)
    assert clock.now == pytest.approx(125.0, abs=0.5)
    assert not patience.may_wait()


def surroundings(monkeypatch, busy_until: float, stopped_at: float = math.inf) -> tuple[Clock, Surroundings]:
    clock = Clock(busy_until)
    monkeypatch.setattr(_watch, "time", clock)
    monkeypatch.setattr(_watch, "read_machine", clock.read)
    monkeypatch.setattr(_watch, "WAIT_S", 60.0)
    monkeypatch.setattr(_watch, "_family", lambda also: (set(), 0.0))
    return clock, Surroundings(stopped=lambda: clock.now >= stopped_at)


def test_what_is_timed_otherwise_than_in_a_race_is_timed_again_once_others_are_gone(monkeypatch):
    clock, around = surroundings(monkeypatch, 110.0)
    when, load = around.watched(lambda: clock.sleep(1.0) or clock.now)
    assert 111.0 <= when <= 113.0
    assert load.is_quiet


def test_beside_a_neighbour_that_stays_it_is_timed_once_and_says_so(monkeypatch):
    clock, around = surroundings(monkeypatch, math.inf)
    for when in (101.0, 127.0):  # nobody waits a second time
        found, load = around.watched(lambda: clock.sleep(1.0) or clock.now)
        assert found == pytest.approx(when, abs=0.5)
        assert load.under == "On a busy machine (others took 100% of the cores): "


def test_whoever_wants_an_end_waits_for_nothing(monkeypatch):
    clock, around = surroundings(monkeypatch, math.inf, stopped_at=103.0)
    found, load = around.watched(lambda: clock.sleep(1.0) or clock.now)
    assert found == 101.0
    assert clock.now <= 103.5
    assert not load.is_quiet


def test_what_children_have_is_not_the_others(monkeypatch):
    readings = iter([START, after(1.0, busy_s=2.0), after(2.0, busy_s=4.0)])
    had = iter([50.0, 51.9, 3.0])  # one was killed, and what it had is not told any more
    monkeypatch.setattr(_watch, "read_machine", lambda: next(readings))
    monkeypatch.setattr(_watch, "_family", lambda also: (set(), next(had)))
    around = Surroundings()
    assert around.look().others == pytest.approx(0.05)
    assert around.look().others == pytest.approx(1.0)


def test_a_load_comes_back_from_json_and_several_are_told_by_those_that_disturbed():
    busy = Load(waits=0.5, others=0.5, slept=True)
    assert Load.from_json(plain(busy)).slept
    assert str(Load.from_json(plain(busy))) == str(busy)
    assert busy_load([Load(others=0.0), Load(others=0.4), Load(others=0.6)]).others == 0.5
    assert busy_load([Load(others=0.0), Load(others=0.04)]).others == 0.02
    assert busy_load([]).is_quiet


def test_waiting_ends_at_the_deadline(monkeypatch):
    clock = Clock(math.inf)
    monkeypatch.setattr(_watch, "time", clock)
    assert not Patience(left_s=60.0).wait(Watch(clock.read), 103.0)
    assert clock.now <= 103.5


def test_threads_that_wait_are_read_from_the_kernel(tmp_path):
    for thread, text in (("7", "1000 200 3\n"), ("8", "5000 300 1\n"), ("9", "nonsense")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(text)
    waits = Waits(tmp_path)
    assert waited_ns({}, waits.by_thread()) == []
    waits.refresh()
    assert sorted(waited_ns({7: (0, 50), 8: (0, 50)}, waits.by_thread())) == [150, 250]
    assert waited_ns({8: (0, 400)}, waits.by_thread()) == [0]  # a counter that ran backwards, and a new thread
    assert busiest({7: (900, 0)}, waits.by_thread()) == [8]
    assert ran_ns({7: (900, 0), 8: (10**9, 0)}, waits.by_thread(), [7, 8, 9]) == [100, 0]
    for name in ("7", "8", "9"):
        (tmp_path / name / "schedstat").unlink()
        (tmp_path / name).rmdir()
    waits.refresh()
    assert waited_ns({7: (0, 50)}, waits.by_thread()) == []
    assert not Waits(tmp_path / "none").by_thread()


def test_chunks_that_nothing_held_up_speak_for_themselves():
    chunks = [(10, 1000, 0), (10, 1010, 5), (10, 990, 0), (10, 4000, 3100)]
    assert without_waits(chunks) == 100.0


def test_waiting_is_taken_out_of_chunks_that_all_waited():
    assert without_waits([(1, 4000, 3000), (1, 3000, 2000), (1, 2500, 1400)]) == 1000.0


def test_what_waiting_holds_up_depends_on_whether_threads_wait_at_once():
    waited = [400, 500]
    assert held_up_ns(1000, waited) == held_up_ns(1000, waited, neighbours=1) == 900
    assert held_up_ns(1000, waited, at_once=True) == held_up_ns(1000, waited, at_once=True, neighbours=3) == 500
    assert held_up_ns(1000, waited, neighbours=2) == 700  # 60% of half of the time


def test_threads_of_a_pool_take_over_what_one_that_waits_would_have_done():
    assert held_up_ns(1900, [1200, 80], ran=[1000, 1100]) == 850
    assert held_up_ns(1900, [1200, 80], at_once=True, neighbours=3, ran=[1000, 1100]) == 850
    assert held_up_ns(1000, [10, 0], ran=[700, 600]) == 10  # they slept for the rest


@pytest.mark.parametrize(("text", "wanting"), [("0.5 0.4 0.3 3/120 77", 2), ("0 0 0 0/1 2", 0), ("?", 0), (None, 0)])
def test_neighbours_are_counted_without_whoever_asks(tmp_path, monkeypatch, text, wanting):
    monkeypatch.setattr(_watch, "_LOAD", tmp_path / "loadavg")
    if text is not None:
        (tmp_path / "loadavg").write_text(text)
    assert _watch.neighbours() == wanting


def test_where_hardly_anything_is_left_or_known_nothing_is_claimed():
    assert math.isnan(without_waits([(1, 4000, 3990), (1, 4000, 4400)]))
    assert math.isnan(without_waits([]))


def test_an_energy_counter_that_began_again_at_zero_says_nothing():
    assert spent(10.0, 16.0, 3) == 2.0
    assert spent(262_140.0, 5.0, 3) is None
    assert spent(None, 5.0, 3) is None
