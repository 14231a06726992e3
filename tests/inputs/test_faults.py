"""Workers that die, hang or run out of memory, rows that raise, killed searches: told, survived, no orphans."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fettle.errors import UsageError
from fettle.inputs import Setting, measure_and_search, race, search
from fettle.inputs._messages import Faults, TakeSlice
from fettle.inputs.race import Race
from fettle.inputs.setting import Room, Slice, room
from fettle.journal import Journal, locked
from tests.forking import Begun

pytestmark = pytest.mark.usefixtures("forks")
HERE = Path(__file__).parent
LOADERS = HERE / "loaders.py"
MAIN = "from fettle.measure import _watch; _watch.WAIT_S = 0.0; from fettle.cli import main; main()"
"""The command line where two tests run at a time: the machine is never quiet."""


@pytest.fixture
def run() -> Iterator[object]:
    """One slice of a setting of a target; its failure."""
    made = []

    def slice_of(factory: str, workers: int, timeout_s: float = 60.0) -> str:
        here = Race(f"{LOADERS}:{factory}", 0.1, timeout_s, "cpu", room(), Journal(), lambda doing, done, of: None)
        made.append(here)
        item = here.run(Setting(workers), 0)
        assert bool(item.failure) != item.able
        return item.failure

    yield slice_of
    for item in made:
        item.close()


def by_then(condition: Callable[[], object]) -> bool:
    """Whether it holds within two minutes."""
    deadline = time.monotonic() + 120
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(held)


def begun(kept: Path) -> tuple[Begun, list[int]]:
    """A search that has kept what it measured so far, and its processes."""
    words = ["data", f"{LOADERS}:waiting", "--slice", "0.1s", "--keep", str(kept), "--json", "--no-lints"]
    process = Begun(kept.parent, f"from tests.forking import forked_here\nwith forked_here():\n    {MAIN}", *words)
    assert by_then(lambda: process.has_ended() or (kept.exists() and kept.read_bytes().count(b"\n") >= 9))
    return process, [child.pid for child in psutil.Process(process.pid).children(recursive=True)]


def gone(pids: list[int]) -> bool:
    """Whether these processes end within a minute."""
    for _ in range(600):
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("workers", [0, 2])
def test_an_item_that_raises_is_named_by_its_index(run, workers: int) -> None:
    assert run("bad_item", workers) == "item 137 raised ValueError: cannot be read"


def test_of_a_stream_the_rows_are_named(run) -> None:
    assert run("bad_stream", 0) == "one of the rows 128 to 143 of the stream raised ValueError: cannot be read"


def test_a_data_set_may_read_from_a_loader_with_workers(run) -> None:
    assert not run("nested", 0)


def test_a_step_may_take_out_of_its_batch_what_it_needs() -> None:
    here = Race(f"{LOADERS}:taken_apart", 0.1, 60.0, "cpu", room(), Journal(), lambda doing, done, of: None)
    try:
        assert here.run(Setting(), 0).able
        assert here.alone() > 0
    finally:
        here.close()


def test_a_worker_that_hangs_is_one_failed_run_and_leaves_no_orphan(run, tmp_path: Path, monkeypatch) -> None:
    mark = tmp_path / "pid"
    monkeypatch.setenv("MARK", str(mark))

    class Timed(race.Child):
        """Its time is over as soon as it hangs, however long it took to get there."""

        def _next(self, deadline, timeout_s, do):
            if do == "slice":
                assert by_then(lambda: mark.exists() and mark.read_text())
                deadline = time.monotonic() + 0.2
            return super()._next(deadline, timeout_s, do)

    monkeypatch.setattr(race, "Child", Timed)
    assert "timed out after 300 s in slice: a worker may hang" in run("hangs", 1, timeout_s=300.0)
    assert gone([int(mark.read_text())])


def test_looking_for_faults_may_take_longer_than_a_slice(monkeypatch) -> None:
    asked = []

    class Quick:
        def __init__(self, module: str) -> None: ...

        def __enter__(self) -> "Quick":
            return self

        def __exit__(self, *error: object) -> None: ...

        def call(self, request: object, answer: type, timeout_s: float) -> Faults:
            asked.append(timeout_s)
            return Faults()

    monkeypatch.setattr(race, "Child", Quick)
    for timeout_s in (5.0, 500.0):
        Race("x:y", 0.1, timeout_s, "cpu", room(), Journal(), lambda doing, done, of: None).faults()
    assert asked == [120.0, 500.0]


def test_a_worker_that_dies_is_one_failed_run(run) -> None:
    assert run("dies", 1) == "a worker exited unexpectedly with code 3"


def test_out_of_memory_is_told_as_such(run) -> None:
    assert run("out_of_memory", 1).startswith("out of memory in the batch of items 0 to 31")
    assert run("is_killed", 1) == "out of memory, or killed from outside: a worker was killed by signal SIGKILL"


def test_a_real_dev_shm_that_is_full() -> None:
    """In a mount namespace of its own, with 4 MiB for batches of 8 MiB."""
    script = (
        "from fettle.inputs.race import Race; from fettle.inputs.setting import Room; "
        "from fettle.journal import Journal; from fettle.inputs import Setting; "
        f"c = Race('{LOADERS}:larger_than_shm', 0.1, 60.0, 'cpu', Room(2, 1 << 40, 1 << 40), Journal(), "
        "lambda *a: None); print(c.run(Setting(1), 0).failure); print(c.refused(Setting(2))); c.close()"
    )
    inside = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside, "sh", sys.executable, "-c", script],
        capture_output=True, text=True, check=False, timeout=120,
    ) if sys.platform == "linux" else None  # fmt: skip
    if done is None or "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no mount namespaces for this user")
    assert done.stdout.startswith("/dev/shm is full: "), done.stdout + done.stderr
    assert "left out: 1 workers already ran out of memory" in done.stdout


def test_what_would_not_fit_is_never_started() -> None:
    here = Race("x:y", 0.1, 1.0, "cpu", Room(4, 1 << 40, 1 << 20), Journal(), lambda doing, done, of: None)
    here.journal.put("0 num_workers=0", _slice(batch_bytes=1 << 20))
    assert here.run(Setting(), 0).able
    item = here.run(Setting(4), 0)
    assert item.left_out
    assert "batches in flight" in item.failure


def test_a_source_that_is_used_up_after_one_epoch_is_told() -> None:
    with pytest.raises(UsageError, match="used up"):
        measure_and_search(f"{LOADERS}:once", slice_s=0.1)


def test_a_search_that_is_killed_goes_on_and_leaves_no_process(tmp_path: Path, monkeypatch) -> None:
    kept = tmp_path / "kept"
    process, family = begun(kept)
    process.send(signal.SIGKILL)
    process.wait()
    assert len(family) >= 4  # what they are forked from, stopped ones, and their loader workers
    assert gone(family)
    known = {json.loads(line)["key"] for line in kept.read_text().splitlines()[1:]}
    assert len(known) >= 8

    asked = []
    call = race.Child.call

    def counted(self, request, answer, timeout_s):
        asked.append(request)
        return call(self, request, answer, timeout_s)

    put = Journal.put
    measured = []
    monkeypatch.setattr(race.Child, "call", counted)

    def noted(self, key, *said, **more):
        measured.append(key)
        return put(self, key, *said, **more)

    monkeypatch.setattr(Journal, "put", noted)
    found = measure_and_search(f"{LOADERS}:waiting", slice_s=0.1, keep=kept, lints=False)
    assert found.reused == len(known)
    assert not known & set(measured)  # nothing is measured twice
    assert "facts" not in asked
    assert not kept.exists()

    assert found.batch_p50_s > 0.03  # timed in the process that makes it: it waits for 32 ms
    crewed = [item for item in found.settings if item.able and item.setting.num_workers]
    assert crewed
    for item in crewed:
        assert item.last.fetch_p50_s > 0.03  # and in each worker
        assert item.last.worker_bytes > 0
    if found.best.setting.num_workers:
        assert f"num_workers={found.best.setting.num_workers}" in found.code


@pytest.mark.slow
def test_a_pipeline_that_waits_gets_workers() -> None:
    """On a machine that has the time; what is decided from which numbers is in `test_search`, with made-up ones."""
    found = measure_and_search(f"{LOADERS}:waiting", slice_s=0.2, lints=False)
    assert found.waiting > 0.4  # 32 ms of loading beside 20 ms of work
    assert found.bound > 1.6
    assert found.best.setting.num_workers >= 2
    assert found.gain > 1.3


def test_ctrl_c_shows_what_is_known_and_keeps_it(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    process, family = begun(kept)
    process.send(signal.SIGINT)
    assert process.wait() == 130, process.err.read_text()
    told = json.loads(process.out.read_text())
    assert told["interrupted"]
    assert sum(len(item["slices"]) for item in told["settings"]) >= 2
    assert kept.exists()
    assert gone(family)


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="needs POSIX")
@pytest.mark.parametrize(
    ("text", "words"), [("someone's notes\n", "holds no measurements"), ("x" * (65 << 20), "too large")]
)
def test_a_file_that_is_none_of_ours_is_left_as_it_is(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.txt"
    path.write_text(text)
    for _ in range(2):  # nor is it held
        with pytest.raises(UsageError, match=words):
            Journal(path, "fettle data")
    assert path.read_text() == text


def test_a_search_on_another_machine_measures_anew(monkeypatch) -> None:
    made_for = []

    def journal(keep: object, writer: str, what: dict) -> None:
        made_for.append(what)
        raise UsageError("no further")

    monkeypatch.setattr(search, "Journal", journal)
    for name in ("one", "other"):
        monkeypatch.setattr(search, "this_machine", lambda name=name: SimpleNamespace(id=name))
        with pytest.raises(UsageError, match="no further"):
            measure_and_search(f"{LOADERS}:quick")
    assert made_for[0] != made_for[1]


def test_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    first = Journal(path, "fettle data", {"target": "a"})
    first.put("one", {"x": 1})
    with pytest.raises(UsageError, match="another fettle data"):
        Journal(path, "fettle data", {"target": "a"})
    first.close()
    with path.open("ab") as file:
        file.write(b'{"key":"two","ans')  # the process ended here
    again = Journal(path, "fettle data", {"target": "a"})
    assert again.answer("one", dict) == {"x": 1}
    assert "two" not in again.lines
    again.put("two", {"x": 2})
    again.close()
    third = Journal(path, "fettle data", {"target": "a"})
    assert third.answer("two", dict) == {"x": 2}
    third.close()
    changed = Journal(path, "fettle data", {"target": "b"})  # of another pipeline: measured anew
    assert not changed.lines
    changed.close(delete=True)
    assert not path.exists()
    Journal(tmp_path / "a new folder/kept").close()
    assert (tmp_path / "a new folder/kept").exists()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot be kept there"):
        Journal(link)


def test_what_a_full_disk_cut_short_costs_no_other_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "kept", os.write
    journal = Journal(path, "fettle data")
    journal.put("one", 1)

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        journal.put("two", 2)
    monkeypatch.undo()
    journal.put("three", 3)
    journal.close()
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([*lines[:2], lines[2][:9], lines[2]]) + b"\n{")  # and as earlier versions left it
    for name, value in (("one", 1), ("three", 3)):
        again = Journal(path, "fettle data")
        assert again.answer(name, int) == value
        again.close()


def test_a_lock_is_one_processs_until_it_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = locked(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        locked(tmp_path / "lock")
    os.close(held)
    os.close(locked(tmp_path / "lock"))

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", none)
    os.close(locked(tmp_path / "lock"))


def test_a_batch_that_was_stopped_on_its_way_is_not_timed() -> None:
    from fettle.inputs._fetch import Board, summary

    board = Board(2)
    board.note(0, time.perf_counter(), (0.01, 0.005, 0.001, 7.0))
    before = time.perf_counter()
    board.pause()
    between = time.perf_counter()
    board.note(0, between, (0.5, 0.5, 0.0, 0.0))  # a slice has ended, and the signal is yet to come
    board.go_on()
    board.note(1, before, (9.0, 0.01, 0.0, 0.0))  # began before the pause, ended after it
    board.note(1, between, (8.0, 0.01, 0.0, 0.0))  # began when the slice had ended, before it was stopped
    board.note(1, time.perf_counter(), (0.03, 0.03, 0.003, 5.0))
    assert sorted(board.read()) == [(0.01, 0.005, 0.001, 7.0), (0.03, 0.03, 0.003, 5.0)]
    told = summary(board)
    assert told["fetch_busy"] == pytest.approx(0.035 / 0.04)
    assert told["fetch_system"] == pytest.approx(0.1)
    assert told["fetch_mean_s"] == pytest.approx(0.02)
    assert told["fetch_pages"] == 6
    board.clear()
    assert board.read() == []


def test_workers_that_keep_memory_fetch_less() -> None:
    """A real worker each: pages that the kernel gives it for a batch, with and without."""
    here = Race(f"{LOADERS}:wasteful", 0.1, 60.0, "cpu", room(), Journal(), lambda doing, done, of: None)
    try:
        gives, keeps = (here.run(Setting(1, keep_memory=keep), 0).last.fetch_pages for keep in (False, True))
    finally:
        here.close()
    assert gives > 10
    assert keeps < gives / 4


def test_nothing_is_made_between_slices() -> None:
    """What workers make while a slice is summed up would be had for nothing in the next, more so by deeper queues."""
    here = Race(f"{LOADERS}:waiting", 0.1, 60.0, "cpu", room(), Journal(), lambda doing, done, of: None)
    try:
        process = here._process(Setting(2))
        for _ in range(2):
            assert process.call(TakeSlice(0.05), Slice, 60.0).batches
            workers = [child for child in psutil.Process(process.pid).children() if child.name() == "pt_data_worker"]
            assert len(workers) == 2
            # The signal was sent; on a busy machine a process that runs on the other core may see it later.
            assert by_then(lambda all_=workers: {one.status() for one in all_} == {psutil.STATUS_STOPPED})
    finally:
        here.close()


def _slice(**other: object) -> Slice:
    from tests.inputs.test_search import a_slice

    return a_slice(10.0, **other)
