"""Several workers at one study: who measures what, and what becomes of the work of one that vanishes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import optuna
import psutil
import pytest
import torch

from fettle import study as room
from fettle.measure import Slice, Trial
from fettle.recipe import Recipe
from fettle.studies.sharing import one_at_a_time
from fettle.study import Study
from fettle.tuning import Options, Session
from fettle.workload import Target
from tests.conftest import Run

ONE, TWO, THREE = (Recipe.parse(text) for text in ("precision=bf16", "compile=default", "grad=inference_mode"))


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Study, Study]:
    """Two workers on machines alike; who is silent for a second has vanished."""
    monkeypatch.setattr(room, "HEARTBEAT_S", 1)
    monkeypatch.setattr(room, "GRACE_S", 1)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    return Study.open("net", url, "weights", "here"), Study.open("net", url, "weights", "here")


def _vanish(worker: Study, seen_by: Study) -> None:
    """What `kill -9` does to its heartbeat, and the time until all its claims are seen to be lost: they were made one
    after the other, and are lost so."""
    assert worker._ended is not None
    worker._ended.set()
    end = time.monotonic() + 60
    while seen_by.claimed():
        assert time.monotonic() < end, "its claims are still held"
        time.sleep(0.1)
        seen_by._bury()


def test_nobody_measures_what_another_is_about_to_and_no_two_claims_have_the_same_number(two):
    first, second = two
    mine, number = first.claim([ONE, TWO, THREE], 2)
    theirs, other = second.claim([ONE, TWO, THREE], 2)
    assert (mine, theirs) == ([ONE, TWO], [THREE])
    assert number != other
    assert second.claim([ONE, TWO, THREE], 2)[0] == []
    for worker, recipes in ((first, mine), (second, theirs)):
        for recipe in recipes:
            worker.add(Trial(recipe, "measured", time_ms=1.0))
    assert (
        {trial.recipe for trial in first.trials()} == {trial.recipe for trial in second.trials()} == {ONE, TWO, THREE}
    )
    assert sorted(first.workers().values()) == [1, 2]


def test_of_two_that_claim_at_once_one_has_it(two):
    first, second = two
    first._begin(ONE, room.Facts())
    second._begin(ONE, room.Facts())
    assert list(first._won([ONE])) == [ONE]
    assert list(second._won([ONE])) == []


def test_one_that_is_stopped_while_it_claims_has_lost_what_it_claimed(two, monkeypatch):
    first, second = two

    def stopped(number):
        second._study._storage.set_trial_state_values(number, optuna.trial.TrialState.FAIL)

    monkeypatch.setattr(first._study._storage, "record_heartbeat", stopped)
    assert first.claim([ONE], 1)[0] == []
    assert second.claim([ONE], 1)[0] == [ONE]


def test_races_of_two_that_share_a_storage_and_claim_nothing_have_numbers_of_their_own(tmp_path):
    """Two ladders, say: what has one number is taken for one race."""
    options = Options(storage=f"sqlite:///{tmp_path / 'study.db'}", output=tmp_path)
    one, other = (Session(Target("w.py:workload"), options, lambda event: None) for _ in range(2))
    before = one._race
    theirs = Trial(Recipe(), "measured", time_ms=1.0, race=other._race + 1, slices=(Slice("p", 1, 1.0, 1.0),))
    one.study = SimpleNamespace(trials=lambda: [theirs], notes=lambda start: [], note=lambda key: None)
    one.refresh()
    assert one._race == before != other._race


def test_what_is_given_back_is_anothers(two):
    first, second = two
    first.claim([ONE, TWO], 2)
    first.add(Trial(ONE, "failed", "it broke"))
    first.give_back()
    assert second.claim([ONE, TWO], 2)[0] == [TWO]  # ONE has failed, and is known


def test_the_claims_of_one_that_vanished_are_taken_over_one_by_one_and_its_late_answer_is_dropped(two):
    first, second = two
    first.claim([ONE, TWO], 2)
    _vanish(first, second)
    assert second.claim([ONE, TWO], 2)[0] == [ONE]
    second.add(Trial(ONE, "measured", time_ms=2.0))
    first.add(Trial(ONE, "measured", time_ms=1.0))  # it was only stopped, and goes on
    first.add(Trial(TWO, "measured", time_ms=1.0))
    assert [(trial.recipe, trial.time_ms) for trial in second.trials()] == [(ONE, 2.0)]
    assert second.claim([ONE, TWO], 2)[0] == [TWO]


def test_what_ends_each_of_its_workers_is_a_failed_trial(two, monkeypatch):
    monkeypatch.setattr(room, "DEATHS", 1)
    first, second = two
    first.claim([ONE], 1)
    _vanish(first, second)
    assert second.claim([ONE], 1)[0] == []
    assert [(trial.status, trial.reason) for trial in second.trials()] == [
        ("failed", "the worker that measured it vanished 1 times")
    ]


def test_other_machines_have_claims_and_figures_of_their_own(two):
    first, _ = two
    there = first.on("there")
    first.claim([ONE], 1)
    assert there.claim([ONE], 1)[0] == [ONE]
    there.add(Trial(ONE, "measured", time_ms=9.0))
    assert first.trials() == []


def test_what_ran_by_another_version_of_a_runtime_is_measured_anew(two):
    first, second = two
    fast = Recipe.parse("runtime=openvino")
    for worker, version, ms in ((first, "1", 3.0), (second, "2", 2.0)):
        worker.packages = {"openvino": version, "onnx": version}
        facts = room.Facts(packages=worker.packages)
        assert worker.claim([fast], 1, facts)[0] == [fast]
        worker.add(Trial(fast, "measured", time_ms=ms, versions={"openvino": version}), facts)
        assert worker.claim([fast], 1, facts)[0] == []
    first.add(Trial(ONE, "measured", time_ms=1.0))  # torch's own, and what earlier versions of fettle kept
    assert [trial.time_ms for trial in first.trials()] == [3.0, 1.0]
    assert [trial.time_ms for trial in second.trials()] == [2.0, 1.0]
    assert [trial.time_ms for trial in first.on("here").trials()] == [2.0, 1.0]  # who only reads sees the newest


def test_a_gpu_has_one_worker_however_it_is_spelled(tmp_path, monkeypatch):
    seen = list[str]()
    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(uuid=seen[gpu]))

    def wait(text):
        raise InterruptedError(text)

    session = SimpleNamespace(facts=SimpleNamespace(device="cuda"), report=wait)
    seen[:] = ["a"]  # CUDA_VISIBLE_DEVICES=0 or its UUID
    with one_at_a_time(session):
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}  # nobody else may take it
        seen[:] = ["b", "a"]  # unset
        with pytest.raises(InterruptedError, match="another worker measures on this device"), one_at_a_time(session):
            pass
        seen[:] = ["b"]
        with one_at_a_time(session):
            pass
    seen[:] = ["b", "a"]
    with one_at_a_time(session):
        pass


# -- processes ---------------------------------------------------------------------------------------------------------

WORK = """
import torch
from torch import nn

def workload():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return model.eval(), [torch.randn(4, 64) for _ in range(4)]
"""
WORDS = ["--technique=grad=grad,no_grad,inference_mode", "--technique=precision=fp32,bf16",
         "--technique=channels_last=off", "--technique=matmul=highest", "--technique=threads=as-given,1",
         "--technique=allocator=default", "--technique=attention=as-is", "--technique=quantize=none",
         "--technique=compile=off", "--technique=runtime=torch", "--rounds=3"]  # fmt: skip
CELLS, STUDY = 12, "night"
WORKER = """
from fettle import cli, study
from fettle.studies import running

study.HEARTBEAT_S, study.GRACE_S = 1, 10
running.TOGETHER = 3  # so that each worker has a few of them
cli.main()
"""


@pytest.fixture
def workers(tmp_path: Path) -> Iterator["Workers"]:
    found = Workers(tmp_path)
    yield found
    found.end()


class Workers:
    """Processes that run the same command on one storage."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.all = folder, list[subprocess.Popen[bytes]]()
        (folder / "work.py").write_text(WORK)

    def start(self, storage: str, count: int, *, apart: bool, study: str = "") -> None:
        """`apart`: each as if it were on a machine of its own, where no other holds the device. With a `study` that
        was begun for workers they are told its name and nothing else."""
        for _ in range(count):
            own = self.folder / f"worker-{len(self.all)}"
            own.mkdir()
            env = {**os.environ, **({"TMPDIR": f"{own}"} if apart else {})}
            words = ["worker", f"--study={study}"] if study else ["study", "work.py", *WORDS]
            words += [f"--storage={storage}", f"--output={own / 'out'}", "--json"]
            with (own / "said").open("wb") as said, (own / "err").open("wb") as err:
                self.all.append(subprocess.Popen([sys.executable, "-c", WORKER, *words], cwd=self.folder, env=env,
                                                 stdout=said, stderr=err))  # fmt: skip

    def said(self, number: int) -> dict[str, object]:
        """What one said in the end."""
        code = self.all[number].wait(600)
        assert code == 0, (self.folder / f"worker-{number}" / "err").read_text()
        return json.loads((self.folder / f"worker-{number}" / "said").read_text())

    def end(self) -> None:
        for process in self.all:
            process.kill()
            process.wait()


def _all_trials(storage: str) -> list[optuna.trial.FrozenTrial]:
    try:
        (name,) = [name for name in optuna.get_all_study_names(storage) if name != STUDY]
        return optuna.load_study(study_name=name, storage=storage).trials
    except Exception:  # not made yet, or the server is away
        return []


def _owner_at_work(storage: str, workers: Workers, but: int = -1) -> int:
    """The first worker that is in the middle of a race of a few, by its place; not `but`."""
    pids = {process.pid: place for place, process in enumerate(workers.all)}
    end = time.monotonic() + 300
    while time.monotonic() < end:
        held = Counter(trial.user_attrs["fettle:worker"] for trial in _all_trials(storage)
                       if trial.state == optuna.trial.TrialState.RUNNING)  # fmt: skip
        for owner, count in held.items():
            place = pids[int(owner.split(":")[-2])]
            if count > 1 and place != but:
                return place
        time.sleep(0.05)
    raise AssertionError("nobody measures")


def _measured(storage: str) -> Counter[str]:
    return Counter(trial.user_attrs["recipe"] for trial in _all_trials(storage) if "fettle" in trial.user_attrs)


def _begin(storage: str, workers: Workers, run_fettle: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin the study for workers, with a target as others find it."""
    monkeypatch.chdir(workers.folder)
    words = ["study", "work.py", *WORDS, f"--storage={storage}", f"--study={STUDY}", "--enqueue", "--json"]
    said = run_fettle(*words, "-o", "begun")
    assert said.code == 0, said.err
    assert json.loads(said.out)["combinations"] == {"work": CELLS}


@pytest.mark.slow
def test_a_worker_that_is_told_to_end_gives_back_what_it_claimed_and_one_with_another_model_is_refused(
    tmp_path: Path, workers: Workers, run_fettle: Run, monkeypatch: pytest.MonkeyPatch
):
    storage = f"sqlite:///{tmp_path / 'shared.db'}"
    _begin(storage, workers, run_fettle, monkeypatch)
    again = run_fettle("study", "work.py", *WORDS[:-1], "--rounds=5", f"--storage={storage}", f"--study={STUDY}",
                       "--enqueue")  # fmt: skip
    assert (again.code, "begun with another --rounds" in again.err) == (2, True), again.err
    workers.start(storage, 1, apart=False, study=STUDY)
    _owner_at_work(storage, workers)
    for process in psutil.Process(workers.all[0].pid).children(recursive=True):
        process.terminate()  # all of them, as Slurm does
    time.sleep(0.3)
    workers.all[0].terminate()
    assert workers.all[0].wait(120) == 130
    trials = _all_trials(storage)
    assert len(_measured(storage)) < CELLS
    assert all(trial.state.is_finished() for trial in trials)
    assert [trial for trial in trials if trial.user_attrs.get("fettle:given back")]
    assert not [trial for trial in trials if trial.user_attrs.get("status") == "failed"]
    (tmp_path / "work.py").write_text(WORK.replace("256", "128"))
    said = run_fettle("worker", f"--storage={storage}", f"--study={STUDY}", "-o", "other")
    assert (said.code, said.out) == (2, "")
    assert "is of another workload (its weights, inputs or code differ)" in said.err.replace("\n", " ")


@pytest.mark.slow
def test_of_three_workers_one_is_killed_and_the_others_measure_what_it_had_claimed(
    tmp_path: Path, workers: Workers, run_fettle: Run
):
    storage = f"sqlite:///{tmp_path / 'shared.db'}"
    workers.start(storage, 3, apart=False)
    killed = _owner_at_work(storage, workers)
    workers.all[killed].send_signal(signal.SIGKILL)
    lost = [trial.user_attrs["recipe"] for trial in _all_trials(storage) if not trial.state.is_finished()]
    said = [workers.said(place) for place in range(3) if place != killed]
    measured = _measured(storage)
    assert len(measured) == CELLS
    assert set(measured.values()) == {1}
    assert lost
    assert set(lost) <= set(measured)
    for data in said:
        assert len(data["experiments"]) == CELLS
        assert all(row["ms_per_sample"] > 0 for row in data["experiments"])
        assert any("measured by" in note and "workers" in note for note in data["notes"])
    assert all(trial.state.is_finished() for trial in _all_trials(storage))
    drawn = json.loads(
        run_fettle("study", f"--storage={storage}", "--study=work", "--json", "-o", tmp_path / "drawn").out
    )
    names = ("grad", "precision", "threads", "machine", "host")
    figures = [{tuple(row[name] for name in names): row["ms_per_sample"] for row in data["experiments"]}
               for data in (drawn, said[0])]  # fmt: skip
    assert figures[0] == pytest.approx(figures[1], rel=1e-9)  # the page from the storage alone says the same


@pytest.mark.slow
def test_a_machine_of_another_kind_measures_all_of_it_and_is_a_level_of_a_factor(
    tmp_path: Path, workers: Workers, run_fettle: Run
):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core there is no other kind of machine to be had")
    words = ["study", tmp_path / "work.py", *WORDS[1:], "--technique=grad=grad,inference_mode"]
    words = [*words, f"--storage={tmp_path / 'shared.db'}", "--json"]
    first = json.loads(run_fettle(*words, "-o", tmp_path / "all").out)
    core = min(os.sched_getaffinity(0))
    one_core = f"import os; os.sched_setaffinity(0, {{{core}}}); from fettle.cli import main; main()"
    said = subprocess.run([sys.executable, "-c", one_core, *map(str, words), "-o", f"{tmp_path / 'one'}"], check=True,
                          stdout=subprocess.PIPE)  # fmt: skip
    data = json.loads(said.stdout)
    assert "machine" not in first["factors"]
    here, there = data["factors"]["machine"]
    assert (here[-2:], there != here) == ("x1", True)
    rows = {machine: [row for row in data["experiments"] if row["machine"] == machine] for machine in (here, there)}
    assert len(rows[here]) == len(rows[there]) == len(first["experiments"]) > 1
    times = [sorted(row["ms_per_sample"] for row in some) for some in (rows[there], first["experiments"])]
    assert times[0] == pytest.approx(times[1], rel=1e-9)


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Server"]:
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin")) if Path("/usr/lib/postgresql").is_dir() else []
    if not programs:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install -e '.[postgresql]'")
    found = Server(programs[-1])
    yield found
    found.end()


class Server:
    """A PostgreSQL of our own on loopback."""

    def __init__(self, programs: Path) -> None:
        self.programs, self.folder = programs, Path(tempfile.mkdtemp(prefix="fettle-postgres-"))
        self.user = {"user": "postgres", "group": "postgres"} if os.getuid() == 0 else {}  # it refuses to run as root
        if self.user:
            shutil.chown(self.folder, "postgres", "postgres")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.options = f"-p {port} -k {self.folder} -c listen_addresses=127.0.0.1 -c fsync=off"
        self._run("initdb", "-D", f"{self.folder / 'data'}", "-U", "fettle", "-A", "trust")
        self.start()
        self.url = f"postgresql://fettle@127.0.0.1:{port}/postgres"

    def start(self) -> None:
        self._run("pg_ctl", "-D", f"{self.folder / 'data'}", "-l", f"{self.folder / 'log'}", "-o", self.options,
                  "-w", "start")  # fmt: skip

    def stop(self) -> None:
        self._run("pg_ctl", "-D", f"{self.folder / 'data'}", "-m", "immediate", "-w", "stop")

    def end(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def _run(self, program: str, *words: str) -> None:
        subprocess.run([self.programs / program, *words], check=True, cwd=self.folder, stdout=subprocess.DEVNULL,
                       **self.user)  # fmt: skip


@pytest.mark.slow
def test_on_a_server_that_restarts_one_worker_is_killed_and_one_stopped_for_a_while(
    workers: Workers, server: Server, run_fettle: Run, monkeypatch: pytest.MonkeyPatch
):
    _begin(server.url, workers, run_fettle, monkeypatch)
    workers.start(server.url, 4, apart=True, study=STUDY)
    stopped = _owner_at_work(server.url, workers)
    workers.all[stopped].send_signal(signal.SIGSTOP)
    killed = _owner_at_work(server.url, workers, but=stopped)
    workers.all[killed].send_signal(signal.SIGKILL)
    server.stop()
    server.start()
    others = [place for place in range(4) if place not in (stopped, killed)]
    for place in others:
        workers.said(place)
    before = _measured(server.url)
    workers.all[stopped].send_signal(signal.SIGCONT)
    said = [workers.said(place) for place in (*others, stopped)]
    assert len(before) == CELLS
    assert set(before.values()) == {1}
    assert _measured(server.url) == before
    assert [len(data["experiments"]) for data in said] == [CELLS] * 3
    figures = [{(row["grad"], row["precision"], row["threads"]): row["ms_per_sample"]
                for row in data["experiments"]} for data in said]  # fmt: skip
    assert all(one == pytest.approx(figures[0], rel=1e-9) for one in figures)


@pytest.mark.slow
def test_a_worker_that_is_stopped_within_a_transaction_does_not_hold_up_the_others_for_good(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(room, "GRACE_S", 1)
    first, second = (Study.open("net", server.url, "weights", "here") for _ in range(2))
    backend = first._study._storage._backend
    with backend.engine.connect() as stopped:
        stopped.exec_driver_sql("SELECT * FROM studies FOR UPDATE")  # as making a trial does
        assert second.claim([ONE], 1)[0] == [ONE]  # waits until the server ends that transaction
        stopped.invalidate()
    assert first.claim([TWO], 1)[0] == [TWO]
