"""Where the steps of a loop go. Times are only compared with themselves: parts add up, and what must be zero is."""

import contextlib
import gc
import gzip
import io
import json
import threading
import time
from collections import deque
from pathlib import Path

import pytest
import torch

import fettle
from fettle.errors import UsageError
from fettle.watching import StepReport, Steps, account, watch
from fettle.watching.slow import numbered, write_samples
from fettle.watching.watch import _utilisation


class Slow(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.04)
        return torch.ones(2)


def total(report: StepReport) -> float:
    return report.data_s + report.sync_s + report.gc_s + report.host_s


def test_a_loop_over_a_loader_needs_nothing_else() -> None:
    out = io.StringIO()
    with fettle.watch(to=out) as steps:
        for _ in torch.utils.data.DataLoader(Slow(), batch_size=2):
            pass
    report = steps.report
    assert report is not None
    assert report.steps == 4
    assert 0.32 <= report.data_s <= report.wall_s  # eight items of 40 ms
    assert report.data_s > 0.5 * report.wall_s  # nothing but waiting was planted
    assert total(report) == pytest.approx(report.wall_s)
    assert report.data_bound == pytest.approx(report.wall_s / max(report.wall_s - report.data_s, 1e-9))
    assert "4 steps" in out.getvalue()
    assert "data" in out.getvalue()


def test_work_is_not_waiting_for_data() -> None:
    with watch(to=None) as steps:
        for _ in torch.utils.data.DataLoader(torch.ones(4, 2)):
            time.sleep(0.1)
    assert steps.report is not None
    assert steps.report.host_s > 0.5 * steps.report.wall_s
    assert steps.report.steps == 4


def test_several_epochs_and_a_loop_inside_a_loop() -> None:
    with watch(to=None) as steps:
        for _ in range(3):
            for _ in torch.utils.data.DataLoader(torch.ones(4, 2)):
                pass
    assert steps.report is not None
    assert steps.report.steps == 12


def test_loaders_that_are_asked_in_turn_make_one_step() -> None:
    with watch(to=None) as steps:
        for _ in zip(*(torch.utils.data.DataLoader(torch.ones(4, 2)) for _ in range(3)), strict=True):
            pass
    assert steps.report is not None
    assert steps.report.steps == 4


def test_what_the_first_of_several_loaders_waits_at_first_counts() -> None:
    with watch(to=None) as steps:
        for _ in zip(torch.utils.data.DataLoader(Slow()), torch.utils.data.DataLoader(torch.ones(8, 2)), strict=True):
            pass
    assert steps.report is not None
    assert steps.report.data_s >= 8 * 0.04


@pytest.mark.parametrize("workers", [0, 1])
def test_what_ran_before_the_loop_is_forgotten_with_the_batch_that_was_tried(workers: int) -> None:
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), num_workers=workers, persistent_workers=workers > 0)
    with watch(to=None) as steps:
        next(iter(loader))
        steps._data += 10**15
        for _ in loader:
            pass
    assert steps.report is not None
    assert steps.report.steps == 4
    assert steps.report.data_s < 10**6


def test_a_loader_in_the_body_ends_no_step_of_a_loop_that_says_where_they_end() -> None:
    out = io.StringIO()
    for _ in fettle.step_timer(range(3), to=out):
        for _ in torch.utils.data.DataLoader(torch.ones(4, 2)):
            pass
    assert out.getvalue().startswith("3 steps")
    with watch(to=None) as steps:
        for number, _ in enumerate(torch.utils.data.DataLoader(Slow())):
            if number % 4 == 3:
                steps.step()
    report = steps.report
    assert report is not None
    assert report.steps == 2
    assert 8 * 0.04 <= report.data_s <= report.wall_s
    assert report.first_ms >= 4 * 40
    assert total(report) == pytest.approx(report.wall_s)


def test_a_long_run_still_knows_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more steps than are kept, the first kept one is not the first."""
    steps = Steps(_walls=deque(maxlen=60))
    monkeypatch.setattr(account, "_KEPT_STEPS", 60)
    now = 1
    for wall in (0, 900, *[5] * 98, 7):
        now += wall * 10**6
        steps._end(now)
    report = steps.summary()
    assert (report.steps, report.first_ms, report.median_ms) == (100, 900, 5)


def test_a_loader_that_was_left_is_followed_by_the_next() -> None:
    with watch(to=None) as steps:
        next(iter(torch.utils.data.DataLoader(torch.ones(4, 2))))
        for _ in range(2):
            for _ in torch.utils.data.DataLoader(torch.ones(4, 2)):
                pass
    assert steps.report is not None
    assert steps.report.steps == 8


def test_what_waits_outside_of_all_steps_is_of_none() -> None:
    steps = Steps(_on_gpu=True)
    steps._syncs = 5
    steps._begin_again(1)
    for _ in range(2):
        steps._syncs += 3
        steps.step()
    steps._syncs += 7
    assert steps.summary().syncs_per_step == 3


def test_workers_that_persist_make_no_more_steps() -> None:
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), num_workers=1, persistent_workers=True)
    with watch(to=None) as steps:
        for _ in range(3):
            for _ in loader:
                pass
    assert steps.report is not None
    assert steps.report.steps == 12


def test_any_iterable() -> None:
    def source():
        for number in range(5):
            time.sleep(0.005)
            yield number

    path_free = list(fettle.step_timer(source(), to=None))
    assert path_free == [0, 1, 2, 3, 4]


def test_a_serving_loop_says_where_a_step_ends(tmp_path: Path) -> None:
    with watch(to=None, json_to=tmp_path / "steps.json") as steps:
        for _ in range(6):
            steps.step()
    told = json.loads((tmp_path / "steps.json").read_text())
    assert told["steps"] == 6
    assert told["device_idle"] is None or torch.cuda.is_available()


def test_the_garbage_collector_is_told_apart() -> None:
    junk = [[] for _ in range(200_000)]
    with watch(to=None) as steps:
        for _ in range(3):
            gc.collect()
            steps.step()
    assert steps.report is not None
    assert steps.report.gc_s > 0
    assert total(steps.report) == pytest.approx(steps.report.wall_s)
    del junk


def unlucky(steps: Steps) -> None:
    """A step that goes on until it has been seen: the thread that looks may have to wait for a core."""
    until = time.monotonic() + 60
    while len(steps._sampler.of(steps._count)) < 3 and time.monotonic() < until:
        time.sleep(0.1)


def run(steps: Steps) -> None:
    for number in range(20):
        unlucky(steps) if number == 15 else time.sleep(0.01)
        steps.step()


def test_a_loader_may_iterate_by_means_of_its_own() -> None:
    class Own(torch.utils.data.DataLoader):
        def _get_iterator(self):
            return iter([1, 2])

    with watch(to=None):
        assert list(Own(Slow())) == [1, 2]


def test_a_slow_step_is_seen_while_it_happens(tmp_path: Path) -> None:
    with watch(to=None, slow_trace=tmp_path / "slow.json", slow_factor=5.0) as steps:
        run(steps)
    assert steps.report is not None
    slow = {step.number: step for step in steps.report.slow}
    assert slow[16].trace is not None
    assert slow[16].hottest is not None
    assert __file__ in slow[16].hottest
    trace = json.loads(Path(slow[16].trace).read_text())
    assert any("unlucky" in event["name"] for event in trace["traceEvents"])
    from fettle.trace import load

    assert load(slow[16].trace).events.height > 0


def test_a_loop_goes_on_where_a_slow_step_cannot_be_written(tmp_path: Path) -> None:
    with watch(to=None, slow_trace=tmp_path / "folder" / "slow.json", slow_factor=5.0) as steps:
        (tmp_path / "folder").write_text("a file by now")
        run(steps)
    assert steps.report is not None
    slow = {step.number: step for step in steps.report.slow}
    assert slow[16].trace is None
    assert __file__ in str(slow[16].hottest)


def test_a_report_that_cannot_be_written_does_not_hide_the_programs_own_error(tmp_path: Path) -> None:
    def run(error: Exception | None) -> None:
        with watch(to=None, json_to=tmp_path / "folder" / "report.json"):
            (tmp_path / "folder").write_text("a file by now")
            if error:
                raise error

    with pytest.warns(UserWarning, match="cannot write"), pytest.raises(KeyError):
        run(KeyError("the program's own"))
    (tmp_path / "folder").unlink()
    with pytest.raises(UsageError, match="cannot write"):
        run(None)


def test_the_summary_goes_where_the_standard_error_is_by_then() -> None:
    for _ in range(2):  # as two tests of pytest's, each with files of its own
        with contextlib.redirect_stderr(io.StringIO()) as out, watch() as steps:
            steps.step()
        assert "1 step" in out.getvalue()
        out.close()


def test_a_closed_file_does_not_hide_the_programs_own_error(tmp_path: Path) -> None:
    closed = io.StringIO()
    closed.close()
    with pytest.raises(KeyError), watch(to=closed):
        raise KeyError
    with pytest.raises(ValueError, match="closed"), watch(to=closed, json_to=tmp_path / "steps.json"):
        pass
    assert (tmp_path / "steps.json").exists()


def test_everything_is_put_back_also_after_an_exception() -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    before, callbacks, threads = _BaseDataLoaderIter.__next__, list(gc.callbacks), set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), watch(to=None):
        raise ZeroDivisionError
    assert _BaseDataLoaderIter.__next__ is before
    assert gc.callbacks == callbacks
    assert set(threading.enumerate()) <= threads
    with watch(to=None):  # and it may be used again
        pass


def test_sampled_stacks_become_nested_calls(tmp_path: Path) -> None:
    a, b, c = ("a", "f.py", 1), ("b", "f.py", 2), ("c", "f.py", 3)
    samples = [(0, (a, b)), (5_000_000, (a, b)), (10_000_000, (a, c))]
    write_samples(tmp_path / "x.json", samples, 7)
    events = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
    assert {(e["name"], e["ts"], e["dur"]) for e in events} == {
        ("f.py(1): a", 0.0, 15000.0),
        ("f.py(2): b", 0.0, 10000.0),
        ("f.py(3): c", 10000.0, 5000.0),
    }


def test_traces_of_slow_steps_that_are_named_so_are_compressed(tmp_path: Path) -> None:
    path = numbered(tmp_path / "slow.json.gz", 7)
    write_samples(path, [(0, (("a", "f.py", 1),))], 7)
    (event,) = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert (path.name, event["name"]) == ("slow-7.json.gz", "f.py(1): a")


def test_no_steps_says_what_to_do() -> None:
    with watch(to=None) as steps:
        pass
    assert "call step()" in str(steps.report) == repr(steps)


def test_bad_usage_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it is a folder"), watch(json_to=tmp_path):
        pass
    with pytest.raises(UsageError, match="above 1"), watch(slow_factor=1.0):
        pass
    with watch(to=None), pytest.raises(UsageError, match="one at a time"), watch():
        pass


def test_it_is_the_loops_own_gpu_that_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a current GPU of its own, and the thread that asks begins with the first."""
    asked: list[int | None] = []
    told = threading.Event()

    def utilization(device: int | None = None) -> int:
        asked.append(device)
        told.set()
        return 40

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    with _utilisation(True) as shares:
        assert told.wait(60)
    assert set(asked) == {3}
    assert shares[0] == pytest.approx(0.4 * shares[1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_waiting_for_the_device_is_told_apart() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    with watch(to=None) as steps:
        for _ in range(10):
            y = x
            for _ in range(20):
                y = y @ x
            y.sum().item()
            steps.step()
    assert steps.report is not None
    assert steps.report.syncs_per_step == 1
    assert steps.report.sync_s > 0.5 * steps.report.wall_s
