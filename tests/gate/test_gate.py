"""The gate: its judgement of made-up numbers, revisions of a made repository, and one race of a planted difference of
twenty times."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import ClassVar

import pytest

from fettle.errors import UsageError
from fettle.gate import Settings, bisecting, bisection_markdown, gating, history, judge, markdown, racing
from fettle.gate.gating import Gate
from fettle.gate.judging import more_memory, percent, slowdown
from fettle.gate.revisions import at, repository_of
from fettle.gate.words import table
from fettle.machine import this_machine
from fettle.measure import Interval, Slice, Trial, contrast_interval, ratio_interval
from fettle.recipe import Recipe
from fettle.workload import Target, find_target

MODEL = "import torch\nfrom work import wait\n\ndef workload():\n    return wait, [torch.ones(2, 2)]\n"
WORK = "import time\n\ndef wait(x):\n    time.sleep({})\n    return x\n"
Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    """A repository in the current folder: its first commit waits 1 ms, its second does not differ, its third waits
    20 ms, and its fourth has a helper more."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=n@example.org", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    run("init", "-q", "-b", "main")
    (tmp_path / "README").write_text("nothing\n")
    run("add", "."), run("commit", "-qm", "before the model")
    (tmp_path / "model.py").write_text(MODEL)
    for number, wait in enumerate((0.001, 0.001, 0.02, 0.02), start=1):
        (tmp_path / "work.py").write_text(WORK.format(wait) + f"# {number}\n")
        run("add", "."), run("commit", "-qm", f"commit {number}"), run("tag", f"v{number}")
    return run


# -- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "verdict", "needs"),
    [
        (Interval(1.10, 1.08, 1.12), "worse", 0),
        (Interval(1.031, 1.002, 1.05), "worse", 0),
        (Interval(1.02, 1.01, 1.029), "within", 0),
        (Interval(0.90, 0.80, 1.02), "within", 0),
        (Interval(1.00, 0.96, 1.04), "cannot tell", 7),
        (Interval(1.06, 0.98, 1.15), "cannot tell", 7),
        (Interval(1.0299, 0.99, 1.07), "cannot tell", 0),
        (None, "cannot tell", 0),
        (Interval(1.05, 0.0, math.inf), "cannot tell", 0),
    ],
)
def test_a_change_is_judged_by_its_interval_and_its_estimate(change, verdict, needs) -> None:
    found = judge("time", change, 0.03, 4)
    assert (found.verdict, found.needs) == (verdict, needs)
    assert bool(found.settled_by) == (verdict == "cannot tell")
    if needs:
        assert f"about {needs} processes a side instead of 4" in found.settled_by


def test_a_speed_up_as_a_slowdown_and_in_words() -> None:
    assert percent(slowdown(Interval(0.8, 0.5, 1.25))) == "+25.0% [-20.0, +100.0]"
    assert percent(slowdown(Interval(1.0, 0.0, math.inf))) == "interval too wide"
    assert (slowdown(None), percent(None)) == (None, "not measured")


def _logs(rng: random.Random, mean: float, count: int) -> list[dict[int, float]]:
    processes = [rng.gauss(mean, 0.007) for _ in range(count)]
    return [{n: process + rng.gauss(0, 0.002) for n in range(1, 5)} for process in processes]


def test_no_more_commits_are_called_slow_or_fast_by_chance_than_the_error_rate_says() -> None:
    """A commit exactly between GOOD and BAD is neither: every answer is an error."""
    rng, answers = random.Random(1), 0
    for _ in range(400):
        groups = [_logs(rng, 0.0, 4), _logs(rng, 0.1, 4), _logs(rng, 0.05, 4)]
        found = contrast_interval(groups, (-0.5, -0.5, 1), 0.05)
        answers += found.low > 0 or found.high < 0
    assert answers <= 32  # 5% of 400, and two standard deviations


def test_memory_is_judged_by_processes() -> None:
    old = Trial(Recipe(), "measured", peaks_bytes=(1000, 1010, 990, 1005))
    new = Trial(Recipe(), "measured", peaks_bytes=(1100, 1110, 1090, 1105))
    change = more_memory(old, new, 0.05)
    assert change is not None
    assert change.low < 1.1 < change.high
    assert change.high - change.low < 0.05
    assert more_memory(old, Trial(Recipe(), "measured", peaks_bytes=(1,)), 0.05) is None
    most = [replace(one, peak_bytes=1110) for one in (old, new)]  # says nothing of the change
    shown = table(Gate("m", "old", "new", this_machine(), most, [judge("memory", change, 0.03, 4)], [], 60.0))
    assert shown.rows[0][1:3] == ("1001 B", "1.08 KiB")


def test_two_processes_a_side_need_few_more_where_little_is_known_of_their_spread() -> None:
    old, new = (Trial(Recipe(), "measured", peaks_bytes=peaks) for peaks in ((1000, 2000), (1010, 1980)))
    found = judge("memory", more_memory(old, new, 0.05), 1.0, 2)
    assert found.settled_by == "about 6 processes a side instead of 2 should settle it"
    shown = table(Gate("m", "old", "new", this_machine(), [old, new], [found], [], 60.0))
    assert "interval too wide" in [str(cell) for cell in shown.rows[0]]


# -- revisions --------------------------------------------------------------------------------------------------------


def test_a_revision_has_files_of_its_own_and_leaves_nothing(git: Git, tmp_path: Path) -> None:
    repository = repository_of(tmp_path / "model.py")
    commit, weights = repository.resolve("v1"), tmp_path / "weights" / "w.pt"
    weights.parent.mkdir()
    weights.write_text("weights")
    with repository.checkout(commit, tmp_path / "out", [weights]) as place:
        target = at(find_target("model.py:workload"), repository, place)
        assert target.reference == f"{place}/model.py:workload"
        assert target.search_path[0] == target.folder == str(place)
        assert "0.001" in (place / "work.py").read_text()
        assert (place / "weights" / "w.pt").read_text() == "weights"
        assert len(git("worktree", "list").splitlines()) == 2
    assert (len(git("worktree", "list").splitlines()), (tmp_path / "out").exists()) == (1, False)
    assert weights.read_text() == "weights"
    with pytest.raises(KeyboardInterrupt), repository.checkout(commit, tmp_path / "out"):
        raise KeyboardInterrupt
    assert (len(git("worktree", "list").splitlines()), (tmp_path / "out").exists()) == (1, False)


def test_a_link_that_leads_out_of_the_repository_is_lent(git: Git, tmp_path: Path, tmp_path_factory) -> None:
    data = tmp_path_factory.mktemp("data")
    (tmp_path / "weights").symlink_to(data)
    settings = Settings(output=tmp_path / "out", links=(Path("weights"),))
    ground = racing.ground_for("model.py", settings, lambda event: None)
    repository = racing.repository_for(ground)
    with racing.revision(ground, repository, repository.resolve("v1")) as side:
        assert (Path(side.target.checkout) / "weights").readlink() == data
    with pytest.raises(UsageError, match=r"\.\. does not lie in"):
        racing.repository_for(racing.ground_for("model.py", replace(settings, links=(Path(".."),)), lambda event: None))


def test_an_environment_has_all_lists_that_count_where_one_differs(git: Git, tmp_path: Path, monkeypatch) -> None:
    for name in ("requirements.txt", "constraints.txt", "docs/requirements.txt", "examples/requirements.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("# then\n")
    git("add", "."), git("commit", "-qm", "lists"), git("tag", "lists")
    (tmp_path / "docs" / "requirements.txt").write_text("# now\n")
    built = []

    def build(place, locks, folder, say):
        assert (place / "docs" / "requirements.txt").read_text() == "# then\n"
        built.append(locks)

    monkeypatch.setattr(racing.environments, "build", build)
    ground = racing.ground_for("model.py", Settings(output=tmp_path / "out"), lambda event: None)
    repository = racing.repository_for(ground)
    with racing.revision(ground, repository, repository.resolve("lists")):
        assert built == [["constraints.txt", "docs/requirements.txt", "requirements.txt"]]


def test_submodules_come_from_the_clone_that_is_here_or_are_named(git: Git, tmp_path: Path) -> None:
    """Each at the commit that the revision names, one inside another too; no address is asked."""
    names = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "protocol.file.allow=always"]
    inner, outer = tmp_path / "sources" / "inner", tmp_path / "sources" / "outer"
    for folder, text in ((inner, "deep"), (outer, "old")):
        git("init", "-q", str(folder))
        (folder / "file").write_text(text)
        git("-C", str(folder), "add", "."), git("-C", str(folder), "commit", "-qm", text)
    git("-C", str(outer), *names, "submodule", "--quiet", "add", str(inner), "in ner")
    git("-C", str(outer), "commit", "-qm", "inner")
    git(*names, "submodule", "--quiet", "add", str(outer), "lib"), git("commit", "-qm", "with submodules")
    git(*names, "submodule", "--quiet", "update", "--init", "--recursive")
    repository, commit = repository_of(tmp_path / "model.py"), git("rev-parse", "HEAD")
    (tmp_path / "lib" / "file").write_text("new")
    git("-C", str(tmp_path / "lib"), "commit", "-qam", "new"), git("add", "lib"), git("commit", "-qm", "moved")
    shutil.rmtree(tmp_path / "sources")
    with repository.checkout(commit, tmp_path / "out") as place:
        assert repository.add_submodules(commit, place) == []
        assert (place / "lib" / "file").read_text() == "old"
        assert (place / "lib" / "in ner" / "file").read_text() == "deep"
    assert (len(git("worktree", "list").splitlines()), (tmp_path / "out").exists()) == (1, False)
    shutil.rmtree(tmp_path / "lib" / "in ner")
    (tmp_path / "lib" / "in ner").mkdir()
    with repository.checkout(commit, tmp_path / "out") as place:
        assert repository.add_submodules(commit, place) == ["lib/in ner"]
    assert (tmp_path / "lib" / "file").read_text() == "new"


def test_a_killed_gates_worktree_is_removed_by_the_next(git: Git, tmp_path: Path) -> None:
    repository, folder = repository_of(tmp_path), tmp_path / "out"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    git("worktree", "add", "-q", "--detach", str(folder / f"{gone.pid}-abc"), "v1")
    with repository.checkout(repository.resolve("v2"), folder) as place:
        assert [one.name for one in folder.iterdir()] == [place.name]
    assert len(git("worktree", "list").splitlines()) == 1


def test_what_lies_between_two_commits_and_what_the_working_tree_is(git: Git, tmp_path: Path) -> None:
    repository = repository_of(tmp_path)
    between = repository.between(repository.resolve("v1"), repository.resolve("v4"))
    assert [repository.name(commit).partition(" ")[2] for commit in between] == ["commit 2", "commit 3", "commit 4"]
    with pytest.raises(UsageError, match="not an ancestor"):
        repository.between(repository.resolve("v4"), repository.resolve("v1"))
    assert "changes" not in repository.working_tree()
    (tmp_path / "constraints.txt").write_text("torch==2.9\n")
    git("add", ".")
    assert "with changes" in repository.working_tree()
    assert repository.changed_locks(repository.resolve("v1")) == ["constraints.txt"]


def test_lock_files_of_any_letters_and_under_their_earlier_names_are_seen(git: Git, tmp_path: Path) -> None:
    for folder in ("modèle", "old"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "requirements.txt").write_text(f"# {folder}\n")
    git("add", "."), git("commit", "-qm", "lists"), git("mv", "old", "new")
    (tmp_path / "modèle" / "requirements.txt").write_text("# now\n")
    repository = repository_of(tmp_path)
    changed = repository.changed_locks("HEAD")
    assert sorted(changed) == [f"{name}/requirements.txt" for name in ("modèle", "new", "old")]
    with repository.checkout(repository.resolve("HEAD"), tmp_path / "out") as place:
        there = [name for name in changed if (place / name).exists()]
        assert sorted(repository.locks_beside(there, place)) == sorted(there) == [
            "modèle/requirements.txt", "old/requirements.txt"
        ]  # fmt: skip


def test_settings_of_git_hold_and_a_hooks_own_repository_does_not(git: Git, tmp_path: Path, monkeypatch) -> None:
    """A container's user trusts a mounted repository by such settings."""
    given = {"COUNT": "1", "KEY_0": "fettle.test", "VALUE_0": "set"}
    for name, value in given.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    repository = repository_of(tmp_path / "model.py")
    assert (repository.root, repository._git("config", "--get", "fettle.test")) == (tmp_path.resolve(), "set")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--against nowhere", "there is no revision 'nowhere'"),
        ("--against=--output=x", "is not a revision"),
        ("--against v1~1", "model.py is not there at"),
        ("--against-python absent/python", "there is no Python at absent/python"),
        ("--against v1 --recipe baseline", "--recipe"),
        ("--against v1 --link absent", "--link: there is no absent"),
        ("--against v1 --link /etc", "--link: /etc does not lie in"),
        ("--against v1 --fail-slower 0", "--fail-slower is a share"),
        ("--against v1 --fail-slower 3", "'3' is not a share, for example 20% or 0.2"),
        ("--against v1 --processes 1", "--processes of each side are 2 to 64"),
        ("--against v1 --json --markdown", "choose --json or --markdown"),
        ("--bisect v1", "write GOOD..BAD"),
        ("--bisect v1..v2 --against v1", "leave --against"),
        ("--bisect v2..v1", "is not an ancestor of"),
        ("--bisect v1..v4 --processes 12", "--processes is for --against"),
        ("--against-python python --same-environment", "are for another revision"),
        ("--against-python python --link work.py", "are for another revision"),
        ("--fail-slower 3%", "--fail-slower is for a gate"),
        ("--markdown", "--markdown is for a gate"),
    ],
)
def test_what_cannot_be_compared_is_one_line(git: Git, run_fettle, arguments: str, says: str) -> None:
    said = run_fettle("bench", "model.py", *arguments.split())
    assert (said.code, said.out) == (2, "")
    assert says in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert len(git("worktree", "list").splitlines()) == 1


def test_no_repository_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_fettle) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.setattr(
        "fettle.gate.racing.repository_of",
        lambda place: repository_of(Path("/")),  # a temporary folder may lie in somebody's repository
    )
    said = run_fettle("bench", "model.py", "--against", "HEAD")
    assert said.code == 2
    assert "is in no git repository" in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_modules_of_the_working_tree_do_not_stand_in_for_another_revision(
    git: Git, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("work")  # as an editable install's import hook would find it
    repository = repository_of(tmp_path)
    try:
        with repository.checkout(repository.resolve("v1"), tmp_path / "out") as place:
            target = at(find_target("model.py:workload"), repository, place)
            monkeypatch.setattr(sys, "path", list(sys.path))
            with pytest.raises(UsageError, match="work was imported from the working tree"):
                target.make()
    finally:
        sys.modules.pop("work", None)
        os.chdir(tmp_path)


# -- races ------------------------------------------------------------------------------------------------------------


def test_the_looks_at_a_gate_share_its_error_rate(tmp_path: Path) -> None:
    def rules(**settings):
        return racing.Ground(Target("model.py:workload", "", ()), Settings(**settings), print, tmp_path).gate_rules()

    once, more = rules(processes=6), rules()
    assert (once.confidence, once.replicates, once.further) == (0.95, 6, ())
    assert (more.confidence, more.replicates, more.further) == (pytest.approx(1 - 0.05 / 3), 4, (8, 16))
    assert more.is_enough is not None
    old = Trial(Recipe(), "measured", processes=4)
    said = [
        more.is_enough([old, replace(old, speedup=Interval(1, 1 / high, high))]) for high in (1.02, 1.04)
    ]  # fmt: skip
    assert said == [True, False]


@pytest.mark.parametrize(("change", "verdict"), [(0.0, "within"), (0.1, "worse")])
def test_whole_gates_on_made_up_processes(monkeypatch: pytest.MonkeyPatch, change: float, verdict: str) -> None:
    """A few of those of `bench/gate_simulation.py`, which tells the error rates from thousands."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from gate_simulation import Simulated

    said = [Simulated(seed, change, Settings()).run()[0] for seed in range(6)]
    assert said.count(verdict) >= 5
    assert set(said) <= {verdict, "cannot tell"}


def test_code_that_waits_twenty_times_as_long_fails(git: Git, tmp_path: Path, run_fettle) -> None:
    said = run_fettle("bench", "model.py", "--against", "v1", "--rounds", "3", "--processes", "2", "--markdown")
    assert said.code == 1, said
    assert said.out.startswith("❌ **")
    assert "| time | 1." in said.out
    assert len(git("worktree", "list").splitlines()) == 1
    (entry,) = history.read(tmp_path / "fettle-gate")
    assert entry.verdict == "worse"
    assert entry.time is not None
    assert entry.time.low > 5
    assert "commit 1" in (tmp_path / "fettle-gate" / "gate.html").read_text()


@pytest.mark.slow
def test_a_bisection_finds_the_commit_and_does_not_ask_twice(git: Git, tmp_path: Path, run_fettle) -> None:
    arguments = ("bench", "model.py", "--bisect", "v1..v4", "--rounds", "3", "--json")
    said = run_fettle(*arguments)
    found = json.loads(said.out)
    assert (said.code, found["found"], found["suspects"][0].partition(" ")[2]) == (0, True, "commit 3"), said
    assert "at most 0.05" in found["error_rate"]
    kept = history.read(tmp_path / "fettle-gate")
    assert json.loads(run_fettle(*arguments).out)["suspects"] == found["suspects"]
    assert history.read(tmp_path / "fettle-gate") == kept
    assert len(git("worktree", "list").splitlines()) == 1


@pytest.mark.slow
def test_an_interrupted_gate_leaves_no_worktree_and_no_process(git: Git, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fettle", "bench", "model.py", "--against", "v1", "--processes", "12"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "starting" in line:
                break
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 130
    assert len(git("worktree", "list").splitlines()) == 1
    assert not list((tmp_path / "fettle-gate").glob("worktrees/*"))


class _MadeUp(racing.Ground):
    """Races whose truth is known: milliseconds by the first line of a commit's message."""

    times: ClassVar = {"commit 1": 1.0, "commit 2": 1.0, "commit 3": 1.1, "commit 4": 1.1}

    def look(self, side: racing.Side) -> None:
        self.name = "model"

    def race(self, sides, rules) -> list[Trial]:
        trials, rng = [], random.Random(len(sides))
        for number, side in enumerate(sides):
            mean = math.log(self.times[side.label.partition(" ")[2]])
            slices = [
                Slice(f"{number}-{process}", turn, math.exp(value + rng.gauss(0, 0.002)))
                for process, value in enumerate(rng.gauss(mean, 0.005) for _ in range(rules.replicates))
                for turn in range(1, 5)
            ]
            ratio = ratio_interval([math.log(self.times["commit 1"]) - mean + d for d in (-0.01, 0, 0.01)], 0.05)
            trials.append(Trial(Recipe(), "measured", time_ms=math.exp(mean), slices=slices, speedup=ratio,
                                processes=rules.replicates))  # fmt: skip
        return trials


@pytest.mark.parametrize(
    ("times", "suspects", "says"),
    [
        ({}, ["commit 3"], "commit 3 made it slower"),
        ({"commit 2": 1.1}, ["commit 2"], "commit 2 made it slower"),
        ({"commit 3": 1.0}, ["commit 4"], "commit 4 made it slower"),
        ({"commit 3": 1.0, "commit 4": 1.0}, [], "there is nothing to find"),
        ({"commit 2": 1.05, "commit 3": 1.05}, ["commit 2", "commit 3", "commit 4"], "is near neither"),
    ],
)
def test_a_bisection_on_made_up_times(git: Git, monkeypatch: pytest.MonkeyPatch, times, suspects, says) -> None:
    monkeypatch.setattr(racing, "Ground", _MadeUp)
    monkeypatch.setattr(_MadeUp, "times", _MadeUp.times | times)
    monkeypatch.setattr(history, "page", lambda entries: "")
    found = bisecting.bisect("model.py", "v1", "v4", Settings())
    assert [name.partition(" ")[2] for name in found.suspects] == suspects
    assert says in found.sentence


def test_a_bisection_claims_nothing_of_an_interval_that_is_too_wide_to_be_shown(git: Git, monkeypatch) -> None:
    class Wide(_MadeUp):
        def race(self, sides, rules) -> list[Trial]:
            return [replace(trial, speedup=Interval(1.0, 0.01, 100.0)) for trial in super().race(sides, rules)]

    monkeypatch.setattr(racing, "Ground", Wide)
    monkeypatch.setattr(history, "page", lambda entries: "")
    found = bisecting.bisect("model.py", "v1", "v4", Settings())
    assert "| interval too wide | cannot tell |" in bisection_markdown(found)


def test_a_bisection_leaves_out_a_commit_whose_environment_cannot_be_built(git: Git, monkeypatch) -> None:
    def build(place, locks, folder, say):
        raise UsageError("the revision's environment cannot be built")

    out = git("rev-parse", "v2")
    monkeypatch.setattr(racing.environments, "build", build)
    monkeypatch.setattr(racing.environments, "can_build", lambda locks: True)
    monkeypatch.setattr(racing.Repository, "changed_locks", lambda self, commit: ["model.py"] if commit == out else [])
    monkeypatch.setattr(racing, "Ground", _MadeUp)
    monkeypatch.setattr(history, "page", lambda entries: "")
    found = bisecting.bisect("model.py", "v1", "v4", Settings())
    assert [name.partition(" ")[2] for name in found.suspects] == ["commit 2", "commit 3"]
    assert "cannot be built" in found.steps[1].verdict


def test_a_bisection_up_to_what_does_not_run_is_one_line(git: Git, monkeypatch) -> None:
    class Broken(_MadeUp):
        def race(self, sides, rules) -> list[Trial]:
            return [*super().race(sides[:1], rules), Trial(Recipe(), "failed", reason="no module named x")]

    monkeypatch.setattr(racing, "Ground", Broken)
    with pytest.raises(UsageError, match=r"commit 4: no module named x"):
        bisecting.bisect("model.py", "v1", "v4", Settings())


def test_a_bisection_takes_no_answers_of_one_that_asked_less_strictly(git: Git, monkeypatch, tmp_path: Path) -> None:
    raced: list[int] = []

    class Counted(_MadeUp):
        def race(self, sides, rules) -> list[Trial]:
            raced.append(len(sides))
            return super().race(sides, rules)

    monkeypatch.setattr(racing, "Ground", Counted)
    monkeypatch.setattr(history, "page", lambda entries: "")
    for settings, anew in (
        (Settings(confidence=0.8), True), (Settings(confidence=0.8), False), (Settings(confidence=0.99), True),
        (Settings(confidence=0.8, under_load=True), True), (Settings(confidence=0.99), False),
    ):  # fmt: skip
        raced.clear()
        assert bisecting.bisect("model.py", "v1", "v4", settings).found
        assert bool(raced) == anew


def test_a_page_and_a_comment_escape_what_they_show(tmp_path: Path) -> None:
    trials = [Trial(Recipe(), "measured", time_ms=1.0, processes=4) for _ in range(2)]
    judged = [judge("time", Interval(1.0, 0.95, 1.05), 0.03, 4)]
    label = "abc <script>alert(1)</script> `@all` | x"
    found = Gate("m", label, "working tree", this_machine(), trials, judged, ["a *note*"], 60.0)
    text = markdown(found)
    assert "❓" in text
    assert "`@all`" not in text
    assert "`abc <script>alert(1)</script> '@all' / x`" in text
    assert "about 9 processes a side" in text
    assert "(about 2.2 minutes)" in text
    step = bisecting.Step("c", "c", None, "left out: <b>`@all` | x")
    text = bisection_markdown(bisecting.Bisection("a", "b", 2, None, [step], ["c"], "It is c.", "5%", ["a *note*"]))
    assert r"| left out: \<b\>\`@&#8203;all\` \| x |" in text
    assert r"Note: a \*note\*." in text
    entry = history.entry_of(found, "model.py", "abc")
    shown = history.page([entry])
    assert "<script>alert(1)" not in shown
    assert "cannot tell" in shown
    history.path_of(tmp_path).write_text('{"when": "cut')
    assert history.read(tmp_path) == []


def test_an_entry_after_a_line_that_was_cut_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "page", lambda entries: "")
    history.path_of(tmp_path).write_text('{"when": "cut')
    entry = history.Entry(history.now(), "model.py", "machine", "v1", "v2", "within", 1.0, 1.0)
    for _ in range(2):
        history.keep(tmp_path, entry)
    assert history.read(tmp_path) == [entry, entry]
    assert history.path_of(tmp_path).read_text().count("\n") == 3


def test_of_a_long_history_the_end_is_read_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = history.Entry(history.now(), "model.py", "machine", "v1", "v2", "within", 1.0, 1.0)
    lines = [json.dumps(asdict(replace(entry, new=f"commit-{number:02}"))) + "\n" for number in range(40)]
    history.path_of(tmp_path).write_text("".join(lines))
    monkeypatch.setattr(history, "MOST_BYTES", len("".join(lines[-12:])) + 9)
    monkeypatch.setattr(history, "_SHOWN", 5)
    kept = history.read(tmp_path)
    assert [one.new for one in kept] == [f"commit-{number}" for number in range(28, 40)]
    shown = history.page(kept)
    assert "commit-35" in shown
    assert "commit-34" not in shown
    assert "7 more rows" in shown


@pytest.mark.slow
def test_another_environment_is_raced_for_real(git: Git, tmp_path: Path, run_fettle) -> None:
    """One that sees the packages of this one, by another path; there the model waits twenty times as long."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "other"], check=True)
    (site,) = (tmp_path / "other").glob("lib/python*/site-packages")
    here = [path for path in sys.path if path and Path(path).is_dir()]
    (site / "here.pth").write_text("\n".join(here) + "\n")
    waits = 'import sys, time\n\ndef wait(x):\n    time.sleep(0.02 if "other" in sys.prefix else 0.001)\n    return x\n'
    (tmp_path / "work.py").write_text(waits)
    python = tmp_path / "other" / "bin" / "python"
    said = run_fettle("bench", "model.py", "--against-python", str(python), "--json")
    found = json.loads(said.out)
    assert said.code == 0, said.err  # the other is the old side: this one is faster
    assert found["verdict"] == "within"
    assert found["judged"][0]["change"]["high"] < 0.2
    assert found["old"] == f"environment {python}"


def test_a_target_that_is_newer_than_the_revision_is_lent_to_it(git: Git, tmp_path: Path) -> None:
    (tmp_path / "newer.py").write_text(MODEL)
    settings = Settings(output=tmp_path / "out")
    with pytest.raises(UsageError, match=r"not there at .*lend it today's, `link=newer\.py`"):
        gating.gate("newer.py", "v1", settings=settings)
    ground = racing.ground_for("newer.py", replace(settings, links=(Path("newer.py"),)), lambda event: None)
    repository = racing.repository_for(ground)
    with racing.revision(ground, repository, repository.resolve("v1")) as side:
        lent = Path(side.target.reference.rpartition(":")[0])
        assert lent.name == "newer.py"
        assert lent.resolve() == tmp_path / "newer.py"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.py").write_text(MODEL)
    settings = replace(settings, links=(Path("models"),))
    ground = racing.ground_for("models/net.py", settings, lambda event: None)
    with racing.revision(ground, repository, repository.resolve("v1")) as side:
        assert Path(side.target.reference.rpartition(":")[0]).resolve() == tmp_path / "models" / "net.py"
    git("add", "."), git("commit", "-qm", "models")
    (tmp_path / "models" / "other.py").write_text(MODEL)
    ground = racing.ground_for("models/other.py", settings, lambda event: None)
    head, says = repository.resolve("HEAD"), r"link=models/other\.py"
    with pytest.raises(UsageError, match=says), racing.revision(ground, repository, head):
        pass  # the folder is there, and is not replaced


def test_the_gate_needs_something_to_compare_with() -> None:
    with pytest.raises(UsageError, match="needs `against`"):
        gating.gate("model.py")


def test_freed_memory_is_kept_on_both_sides_unless_the_user_has_set_the_allocator(tmp_path, monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for name in racing._KEEPS_MEMORY:
        monkeypatch.delenv(name, raising=False)
    ground = racing.Ground(Target("work.py:workload"), Settings(), lambda event: None, tmp_path)
    assert ground.environment.items() >= racing._KEEPS_MEMORY.items()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not ground.environment.keys() & racing._KEEPS_MEMORY.keys()


def test_torch_can_compile_for_a_gate_in_a_folder_with_a_space_in_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ground = racing.Ground(Target("work.py:workload"), Settings(), lambda event: None, tmp_path / "my gate")
    assert " " not in ground.environment["TORCHINDUCTOR_CACHE_DIR"]
