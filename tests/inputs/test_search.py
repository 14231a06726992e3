"""The search against pipelines of known cost: made-up ones in thousands of variants, and real ones that merely wait."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fettle.errors import UsageError
from fettle.inputs import Measured, Setting, measure_and_search
from fettle.inputs._messages import Faults
from fettle.inputs.race import MOST, PAIRS, ROUNDS, Race
from fettle.inputs.report import as_data, curve, rows
from fettle.inputs.result import RowRaises, cannot_help
from fettle.inputs.search import _search
from fettle.inputs.setting import AS_GIVEN, BATCH_INDEX, Facts, Room, Slice, ratio
from fettle.journal import Journal
from fettle.measure import Load
from fettle.procs.child import ChildError

HERE = Path(__file__).parent


def a_slice(rate: float, waiting: float = 0.5, fetch_s: float = 0.01, cpu: float = 1.0, **other: object) -> Slice:
    values = {
        "batches": 100, "rate": rate, "waiting": waiting,
        "fetch_p50_s": fetch_s, "fetch_p95_s": fetch_s, "fetch_p99_s": fetch_s, "fetch_busy": cpu, "cpu_share": 0.5,
        "fetch_mean_s": fetch_s, "fetch_system": 0.0, "fetch_pages": 0.0,
        "start_s": 0.1, "boundaries_s": [], "batch_bytes": 1000, "worker_bytes": 1000,
    }  # fmt: skip
    return Slice(**{**values, **other})  # type: ignore[arg-type]


class MadeUp(Race):
    """A pipeline that is a formula: what a worker needs for a batch, what handing it over costs, a step, cores."""

    def __init__(self, make_s=0.02, hand_s=0.0005, step_s=0.0, cores=4, cpu=1.0, noise=(1.0,), given=None, fails=(),
                 fresh=0.0, kept=None, glibc=True):  # fmt: skip
        super().__init__("made:up", 1.0, 1.0, "cpu", Room(cores, 1 << 40, 1 << 40), Journal(), self._tell)
        self.make_s, self.hand_s, self.step_s, self.cpu, self.fails = make_s, hand_s, step_s, cpu, fails
        self.given = given or Setting()
        self.fresh, self.kept, self.glibc = fresh, fresh if kept is None else kept, glibc
        self.noise = itertools.cycle(noise)
        self.fetches = [AS_GIVEN]
        self.asked: list[Setting] = []

    def _tell(self, doing: str, done: int, of: int) -> None:
        assert done <= of

    def open(self) -> Facts:
        given = self.given
        self.facts = Facts(given.num_workers, given.prefetch_factor, given.persistent_workers, False, 0, False,
                           bool(self.step_s), False, self.glibc, self.fetches)  # fmt: skip
        return self.facts

    def alone(self) -> float:
        return self.step_s

    def faults(self) -> Faults:
        return Faults()

    def true_rate(self, setting: Setting) -> float:
        make_s = self.make_s / (20 if setting.fetch == BATCH_INDEX else 1)
        if not setting.num_workers:
            return 1 / (make_s + self.step_s)
        if setting.keep_memory:
            make_s *= 1 - self.kept
        # Cores bound what computes; what waits needs none. More workers than cores get in each other's way a little.
        at_once = setting.num_workers if self.cpu < 0.5 else min(setting.num_workers, self.here.cores)
        crowded = 1 + 0.01 * max(0, setting.num_workers - self.here.cores) * (self.cpu > 0.5)
        return min(at_once / (make_s * crowded), 1 / (self.step_s + self.hand_s))

    def _slice(self, setting: Setting) -> Slice:
        self.asked.append(setting)
        if setting.num_workers in self.fails:
            raise ChildError("out of memory: it is made up", "memory")
        rate = self.true_rate(setting) * next(self.noise)
        waiting = 1 - self.step_s * rate if self.step_s else 1.0
        fresh = self.fresh if setting.num_workers and not setting.keep_memory else 0.0
        return a_slice(rate, max(0.0, min(1.0, waiting)), self.make_s, self.cpu,
                       fetch_system=fresh, fetch_pages=1e6 * fresh)  # fmt: skip

    def search(self):
        return _search(self, "cpu", True, 0.0)


@settings(max_examples=150, deadline=None)
@given(
    make_s=st.floats(1e-4, 0.2), hand_s=st.floats(1e-5, 5e-3), step_s=st.sampled_from([0.0, 0.001, 0.01, 0.1]),
    cores=st.integers(1, 32), cpu=st.sampled_from([0.1, 1.0]),
    noise=st.lists(st.floats(0.99, 1.01), min_size=3, max_size=11),
)  # fmt: skip
def test_what_is_found_is_near_the_best_there_is(make_s, hand_s, step_s, cores, cpu, noise) -> None:
    race = MadeUp(make_s, hand_s, step_s, cores, cpu, noise)
    found = race.search()
    most = 8 * cores if cpu < 0.5 else 2 * cores
    best = max(race.true_rate(Setting(number, persistent_workers=True)) for number in range(most + 1))
    assert race.true_rate(found.best.setting) >= 0.93 * best  # 3% and what 1% of noise hides, twice
    assert race.true_rate(found.best.setting) >= 0.97 * race.true_rate(Setting())
    enough = min(
        number for number in range(most + 1)
        if race.true_rate(Setting(number, persistent_workers=True)) >= 0.995 * best
    )  # fmt: skip
    assert found.best.setting.num_workers <= 1.25 * enough + 1  # one step of the climb: noise hides a percent or two


def test_noise_of_one_sign_does_not_double_the_workers() -> None:
    found = MadeUp(0.072265625, 0.004383936922481471, 0.001, 13, 0.1, [0.9921875, 1.0, 1.0]).search()
    assert found.best.setting.num_workers <= 1.25 * 14 + 1


@settings(max_examples=60, deadline=None)
@given(
    make_s=st.floats(5e-3, 0.2), cores=st.integers(2, 32), noise=st.lists(st.floats(0.97, 1.03), min_size=5, max_size=9)
)
def test_the_search_takes_a_fraction_of_a_sweep(make_s, cores, noise) -> None:
    race = MadeUp(make_s, cores=cores, noise=noise)
    race.search()
    settings = 1 + 2 * cores * 6  # workers up to twice the cores, three depths of queue, workers that stay or end
    assert len(race.asked) <= 0.25 * 6 * settings + 6
    assert len(set(race.asked)) <= 0.25 * settings + 1


def test_workers_are_said_not_to_help_where_a_batch_is_nothing_beside_the_step() -> None:
    race = MadeUp(make_s=0.0005, step_s=0.1)
    found = race.search()
    assert found.verdict.startswith("Workers cannot help: making a batch takes 0.5% of a step")
    assert "at most 1.01x" in found.verdict
    assert set(race.asked) == {Setting()}  # the costs alone say so
    assert found.best.setting == Setting()


def test_workers_are_said_not_to_help_where_handing_over_is_the_cost() -> None:
    race = MadeUp(make_s=0.0002, hand_s=0.001)
    found = race.search()
    assert "making a batch" in found.verdict
    assert "getting it from a worker 1 ms" in found.verdict
    assert max(setting.num_workers for setting in race.asked) == 1


def test_one_busy_core_says_so() -> None:
    plain = Measured(Setting(), {0: a_slice(10.0, cpu_share=0.99)})
    assert "one core" in cannot_help(plain, 0.0, 1)
    assert cannot_help(plain, 0.0, 2) == ""


def test_slices_that_others_disturbed_are_no_evidence_where_two_rounds_are_quiet() -> None:
    calm = Measured(Setting(), {number: a_slice(10.0, waiting=0.2) for number in range(4)})
    disturbed = {number: a_slice(1.0, waiting=0.9, quiet=False) for number in (0, 1)}
    mostly = Measured(Setting(1), {**disturbed, 2: a_slice(10.0, waiting=0.2), 3: a_slice(10.0, waiting=0.2)})
    assert (mostly.rate, mostly.waiting, ratio(mostly, calm)) == (10.0, 0.2, 1.0)
    never = Measured(Setting(2), disturbed)
    assert (never.rate, ratio(never, calm)) == (1.0, 0.1)


def test_a_neighbour_that_stays_ends_a_comparison_that_began_on_a_quiet_machine() -> None:
    class Disturbed(MadeUp):
        def _slice(self, setting):
            return msgspec.structs.replace(super()._slice(setting), quiet=len(self.asked) <= 4)

    race = Disturbed()
    race.open()
    assert race.pairs(Setting(1), Setting()) == pytest.approx(1.0)
    assert len(race.asked) == 2 * MOST


def test_what_others_had_is_of_each_slice_and_the_verdict_begins_with_it(monkeypatch) -> None:
    class Busy(MadeUp):
        _slice = Race._slice

        def _process(self, setting):
            taken = MadeUp._slice(self, setting)
            return SimpleNamespace(call=lambda *asked: taken, resident_bytes=lambda: 0, pause=lambda: None)

    race = Busy()
    race._around = SimpleNamespace(watched=lambda take: (take(), Load(others=0.5)))  # type: ignore[assignment]
    found = race.search()
    assert found.verdict.startswith("On a busy machine (others took 50% of the cores): ")
    told = as_data(found)
    assert (told["is_quiet"], told["load"]["others"]) == (False, 0.5)
    assert not any(taken["quiet"] for item in told["settings"] for taken in item["slices"].values())
    assert MadeUp().search().load.is_quiet


def test_more_workers_than_cores_only_where_loading_waits() -> None:
    busy, waits = MadeUp(cores=2, cpu=1.0), MadeUp(cores=2, cpu=0.05, step_s=0.002)
    assert busy.search().best.setting.num_workers == 2
    assert waits.search().best.setting.num_workers > 4


def test_batch_fetching_may_beat_workers() -> None:
    race = MadeUp(cores=4)
    race.fetches = [AS_GIVEN, BATCH_INDEX]
    found = race.search()
    assert found.best.setting.fetch == BATCH_INDEX
    assert "batch_size=None" in found.code
    assert "BatchSampler" in found.code


def test_deeper_queues_are_tried_where_batches_take_unlike_times() -> None:
    class Uneven(MadeUp):
        deeper = 0.1

        def true_rate(self, setting):
            return super().true_rate(setting) * (1 + self.deeper * math.log2(setting.prefetch_factor))

        idle = 0.5

        def _slice(self, setting):
            made = super()._slice(setting)
            mean_s = (1 - self.idle) * setting.num_workers / made.rate
            return msgspec.structs.replace(made, fetch_p99_s=0.1, fetch_mean_s=mean_s)

    race = Uneven()
    assert race.search().best.setting.prefetch_factor == 8
    assert {setting.prefetch_factor for setting in race.asked} == {2, 4, 8}
    race = Uneven()
    race.deeper = 0.0
    race.search()
    assert {setting.prefetch_factor for setting in race.asked} == {2, 4}  # where 4 brings nothing, 8 does not
    race = Uneven()
    race.idle = 0.02
    assert "workers make batches 98% of the time" in " ".join(race.search().notes)
    assert {setting.prefetch_factor for setting in race.asked} == {2}  # no worker ever waits for room


def test_a_batch_of_several_parts_is_copied_whole() -> None:
    move = Setting(non_blocking=True).code.splitlines()[-1].replace("cuda", "cpu")
    names: dict[str, Any] = {"torch": torch, "batch": [torch.ones(2), {"names": ["a", "b"], "x": torch.zeros(2)}]}
    exec(move, names)
    first, second = names["batch"]
    assert first.tolist() == [1, 1]
    assert second["names"] == ["a", "b"]


def test_workers_keep_memory_where_fetching_it_anew_takes_their_time() -> None:
    found = MadeUp(make_s=0.03, cores=2, fresh=0.5).search()
    assert found.best.setting == Setting(2, persistent_workers=True, keep_memory=True)
    assert found.gain == pytest.approx(4)
    beyond_the_first = [item.setting for item in found.settings if item.setting.num_workers > 1]
    assert all(setting.keep_memory for setting in beyond_the_first)
    code = found.best.setting.code
    assert "worker_init_fn=keep_freed_memory)" in code
    compile(code.replace("...,", "").replace("dataset", "[]"), "code", "exec")
    given = MadeUp(make_s=0.03, cores=2, fresh=0.5, given=Setting(2)).search()
    assert given.best.setting == Setting(2, persistent_workers=True, keep_memory=True)
    assert given.gain == pytest.approx(2)
    # Nothing of it where it does not bring what it could, is no matter, or where the C library knows no such thing.
    for other in ({"fresh": 0.5, "kept": 0.0}, {"fresh": 0.04}, {"fresh": 0.5, "glibc": False}):
        race = MadeUp(make_s=0.03, cores=2, **other)
        assert not race.search().best.setting.keep_memory
        assert any(setting.keep_memory for setting in race.asked) == ("kept" in other)


def test_pages_that_a_batch_lies_in_are_not_fetched_in_vain() -> None:
    seen = a_slice(1.0, fetch_system=0.4, fetch_pages=1000.0, batch_bytes=1000 * 4096)
    assert seen.fetch_fresh == 0
    assert a_slice(1.0, fetch_system=0.4, fetch_pages=4000.0, batch_bytes=1000 * 4096).fetch_fresh == pytest.approx(0.3)


def test_a_setting_that_dies_after_it_was_the_best_is_not_taken() -> None:
    class Dies(MadeUp):
        def _slice(self, setting):
            if setting.num_workers == 4 and self.asked.count(setting) == 3:
                raise ChildError("a worker exited unexpectedly with code 3", "crash")
            return super()._slice(setting)

    found = Dies(cores=4).search()
    assert found.best.setting.num_workers == 5  # a hundredth slower than the four, and alive
    assert [item.failure for item in found.settings if item.failure] == ["a worker exited unexpectedly with code 3"]
    (died,) = [row for row in rows(found) if row["note"].startswith("failed")]
    assert died["batches/s"] == "-"  # not nought
    assert "'level': 0.0" not in str(curve(found))


def test_running_out_of_memory_is_one_failed_trial_and_nothing_larger_is_tried() -> None:
    race = MadeUp(cores=8, fails=(8,))
    found = race.search()
    failed = [item for item in found.settings if item.failure]
    assert [item.failure for item in failed if not item.left_out] == ["out of memory: it is made up"]
    assert found.best.able
    assert found.best.setting.num_workers == 7
    assert found.gain > 1
    assert race.refused(Setting(9)) == "left out: 8 workers already ran out of memory"


def test_a_given_setting_that_fails_is_told_and_another_found() -> None:
    found = MadeUp(cores=4, fails=(3,), given=Setting(3)).search()
    assert "As given it fails: out of memory" in " ".join(found.notes)
    assert found.best.setting.num_workers == 2  # three have failed: four are not tried
    assert found.before is found.plain


def test_a_factory_that_fails_in_a_later_process_is_one_failed_setting(monkeypatch) -> None:
    class Fails(MadeUp):
        def _slice(self, setting):
            if setting.num_workers == self.given.num_workers:
                raise UsageError("loader() raised OSError: the port is in use")
            return super()._slice(setting)

    found = Fails(cores=4, given=Setting(2)).search()
    assert "As given it fails: loader() raised OSError" in " ".join(found.notes)
    assert found.best.able
    with pytest.raises(UsageError, match="the port is in use"):  # in the first
        Fails(cores=4).search()

    def fails(module):
        raise UsageError("loader() raised OSError: the port is in use")

    monkeypatch.setattr("fettle.inputs.race.Child", fails)
    race = Race("made:up", 1.0, 1.0, "cpu", Room(1, 1 << 40, 1 << 40), Journal(), lambda *_: None)
    assert "ended early: loader() raised OSError" in str(race.faults().notes)


class Raising(MadeUp):
    """Settings with workers come as far as a row that raises, after so many slices."""

    after, also_plain = 0, False

    def _slice(self, setting: Setting) -> Slice:
        if setting.num_workers >= 3 or (
            self.after and (setting.num_workers or self.also_plain) and len(self.asked) > self.after
        ):
            raise ChildError("item 777 raised RuntimeError: cannot be read", "item")
        return super()._slice(setting)


def test_a_row_that_raises_comes_before_the_setting() -> None:
    found = Raising(cores=8, make_s=0.04, step_s=0.008).search()
    assert found.verdict.startswith("A run over this data set ends with an error: item 777 raised RuntimeError: cannot")
    assert " settings met it." in found.verdict
    for Raising.after, Raising.also_plain in itertools.product(range(2, 24), (False, True)):
        late = Raising(cores=8, make_s=0.04, step_s=0.008).search()
        assert "item 777 raised" in late.verdict
        assert late.best.able or Raising.also_plain
        assert rows(late)
    assert MadeUp(cores=4, fails=(3,)).search().raises == ""  # out of memory is no fault of a row


def test_fewer_workers_than_given_where_they_do_the_same() -> None:
    found = MadeUp(make_s=0.02, step_s=0.015, cores=16, given=Setting(16)).search()
    assert found.best.setting.num_workers == 2
    assert "as fast and smaller" in found.verdict


def test_two_settings_compare_by_the_rounds_that_both_ran() -> None:
    fast = Measured(Setting(2), {0: a_slice(99), 1: a_slice(101), 2: a_slice(1)})
    slow = Measured(Setting(1), {0: a_slice(60), 1: a_slice(60)})
    assert ratio(fast, slow) == pytest.approx(100 / 60)


def test_the_beginning_of_an_epoch_counts() -> None:
    ends = Measured(Setting(2), {0: a_slice(100, start_s=0.5)}, epoch_batches=50)
    stays = Measured(Setting(2, persistent_workers=True), {0: a_slice(100, start_s=0.5)}, epoch_batches=50)
    assert ends.rate == pytest.approx(50 / (0.5 + 0.49))
    assert stays.rate == pytest.approx(100)
    met = Measured(Setting(2), {0: a_slice(100, start_s=0.5, boundaries_s=[0.26])}, epoch_batches=50)
    assert met.rate == pytest.approx(50 / 0.75)


def test_without_a_step_no_bound_is_claimed() -> None:
    found = MadeUp(step_s=0.0).search()
    assert math.isinf(found.bound)
    with_step = MadeUp(make_s=0.03, step_s=0.07).search()
    assert with_step.bound == pytest.approx(1 / 0.7)


def test_ctrl_c_keeps_what_is_known() -> None:
    class Interrupted(MadeUp):
        def _slice(self, setting):
            if len(self.asked) == 4:
                raise KeyboardInterrupt
            return super()._slice(setting)

    found = Interrupted(cores=8).search()
    assert found.interrupted
    assert sum(len(item.slices) for item in found.settings) == 4
    assert found.best.able
    measured = [item for item in found.settings if item.slices and item.able]
    fastest = max(item.rate for item in measured)
    assert found.best.setting.size == min(one.setting.size for one in measured if one.rate >= 0.97 * fastest)


def test_rounds_are_bounded() -> None:
    race = MadeUp(noise=[1.0, 0.98, 1.02, 0.99, 1.01, 0.97, 1.03])
    found = race.search()
    assert max(len(item.slices) for item in found.settings if item.setting.num_workers > 4) <= ROUNDS + 3 * PAIRS


@pytest.mark.usefixtures("forks")
def test_a_row_that_raises_at_once_is_counted_and_is_no_bad_usage() -> None:
    with pytest.raises(RowRaises) as caught:
        measure_and_search(f"{HERE / 'loaders.py'}:bad_item", slice_s=0.1)
    assert str(caught.value).startswith("A run over this data set ends with an error: item 137 raised ValueError")
    assert "1 of 256 rows that were read raises (item 137)" in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(
    ("factory", "words"),
    [("number", "returned an int"), ("raising", "raised KeyError"), ("empty", "gives no batch"),
     ("leaving", "leaving raised SystemExit: 3"),
     ("nothing", "has no factory named 'nothing'")],
)  # fmt: skip
def test_what_is_wrong_with_a_target_is_one_line(factory: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        measure_and_search(f"{HERE / 'loaders.py'}:{factory}", slice_s=0.1)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
