"""A study from end to end on a model of milliseconds, without compilers; killed, resumed, and its failures."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from types import SimpleNamespace

import msgspec
import optuna
import pytest

from fettle.errors import UsageError, extra
from fettle.machine import Machine
from fettle.measure import Rules, Trial
from fettle.recipe import Recipe
from fettle.search import Space
from fettle.studies import batches, designs, running
from fettle.studies.outcome import Done
from fettle.studies.running import Settings, study
from fettle.studies.sharing import one_at_a_time
from fettle.studies.workloads import Workload, _typed, open_workload
from fettle.techniques import Facts
from fettle.tuning._budget import Budget
from fettle.tuning._costs import Costs
from fettle.workload import Target
from tests.conftest import Run
from tests.search.recorded import Recorded
from tests.studies.made_up import switches, table

WORK = """
import torch
from torch import nn

def workload(batch=4):
    if batch > 8:
        raise ValueError("too large a batch")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return model.eval(), [torch.randn(batch, 64) for _ in range(4)]

def other():
    return nn.Sequential(nn.Linear(32, 16)).eval(), [torch.ones(2, 32)]
"""
TWO = ["--technique=grad=grad,inference_mode", "--technique=precision=fp32,bf16"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("studies") / "work.py"
    path.write_text(WORK)
    return path


@pytest.mark.slow
def test_a_study_killed_goes_on_and_what_cannot_be_built_is_a_failed_cell(work: Path, tmp_path: Path, run_fettle: Run):
    out = tmp_path / "out"
    words = ["study", f"{work}", *TWO, "--only", "--factor=batch=4,2,16", "--rounds=3", "-o", f"{out}"]
    first = subprocess.Popen([sys.executable, "-m", "fettle", *words], cwd=tmp_path, stderr=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    try:
        kept = _wait_for_trials(out, 3)
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    said = run_fettle(*words, "-o", out / "all.parquet", "--json")
    assert said.code == 0, said.err
    data = json.loads(said.out)
    again = {number: attrs for number, attrs in _trials(out).items() if number in kept}
    assert again == kept  # measured once
    rows = data["experiments"]
    assert [row["reason"] for row in rows if row["batch"] == "16"] == [
        reason for reason in [row["reason"] for row in rows if row["batch"] == "16"] if "too large a batch" in reason
    ]
    assert {(row["grad"], row["precision"], row["batch"]) for row in rows if row["batch"] != "16"} == {
        (grad, precision, batch)
        for grad in ("grad", "inference_mode") for precision in ("fp32", "bf16") for batch in ("4", "2")
    }  # fmt: skip
    assert all(row["ms_per_sample"] > 0 for row in rows if row["batch"] != "16")
    assert {one["response"] for one in data["analyses"]} == {"ms_per_sample", "peak_mib", "error"}
    time_of = next(one for one in data["analyses"] if one["response"] == "ms_per_sample")
    assert (time_of["experiments"], time_of["missing"]) == (8, 1)
    assert set(os.listdir(out)) >= {"study.html", "study.json", "study.csv", "study.db", "all.parquet"}
    assert list((out / "pictures").glob("scatter-0.png"))


def _trials(out: Path) -> dict[str, dict[str, str]]:
    found = {}
    storage = f"sqlite:///{out / 'study.db'}"
    for name in optuna.get_all_study_names(storage):
        for trial in optuna.load_study(study_name=name, storage=storage).trials:
            found[f"{name} {trial.number}"] = dict(trial.user_attrs)
    return found


def _wait_for_trials(out: Path, count: int, timeout_s: float = 300.0) -> dict[str, dict[str, str]]:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        try:
            found = _trials(out)
        except Exception:  # not yet made
            found = {}
        if len(found) >= count:
            return found
        time.sleep(0.2)
    raise AssertionError("no trials")


@pytest.mark.slow
def test_a_ladder_shows_every_step_of_two_targets(work: Path, tmp_path: Path, run_fettle: Run):
    said = run_fettle("study", work, f"{work}:other", "--design=ladder", "--order=precision,grad", *TWO, "--only",
                      "--rounds=3", "-o", tmp_path / "out", "--json")  # fmt: skip
    assert said.code == 0, said.err
    data = json.loads(said.out)
    assert set(data["steps"]) == {"work", "work-other"}
    for rungs in data["steps"].values():
        labels = [rung["label"] for rung in rungs]
        assert labels[0] == "as given"
        assert labels[1:] == ["precision=bf16", "grad=inference_mode"]
        assert all(rung["per_second"] > 0 and rung["peak_bytes"] is not None for rung in rungs)
    assert (tmp_path / "out" / "pictures" / "ladder-1.svg").is_file()


@pytest.mark.slow
def test_a_ladder_grows_the_batch_until_the_limit(work: Path, tmp_path: Path, run_fettle: Run):
    words = ["study", work, "--design=ladder", *TWO, "--only", "--rounds=3", "-o", tmp_path / "out", "--json"]
    said = run_fettle(*words, "--grow-batch=1GiB")
    assert said.code == 0, said.err
    (rungs,) = json.loads(said.out)["steps"].values()
    for rung in rungs:
        most = rung["grown"]
        assert most["rows"] == 4 * most["factor"] == 256
        assert most["why"] == "64 times the batch is the most that is tried"
        assert most["speedup"]["estimate"] > 0
    none = run_fettle(*words, "--grow-batch=1B")
    assert none.code == 0, none.err
    (rungs,) = json.loads(none.out)["steps"].values()
    assert {rung["grown"]["factor"] for rung in rungs if rung["peak_bytes"]} == {0}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name a target, path/to/file.py:factory, or a table with --from-csv"),
        (["w.py", "--from-csv", "t.csv"], "--from-csv reads what was measured"),
        (["w.py", "--response", "y"], "are for a table, --from-csv"),
        (["w.py", "--design", "all"], "unknown design 'all'"),
        (["w.py", "--factor", "batch=1"], "write NAME=VALUE,VALUE"),
        (["w.py", "--order", "precison"], "there is no technique 'precison'"),
        (["w.py", "--technique", "precision=bf17"], "bf17"),
        (["w.py", "--recipe", "nonsense"], "is not TECHNIQUE=LEVEL"),
        (["w.py", "--design=ladder", "--recipe=python=old"], "there is no environment 'old': name it, --python"),
        (["w.py", "--python", "/nowhere"], "there is no interpreter /nowhere"),
        (["w.py", "--rounds", "1"], "--rounds 1"),
        (["w.py", "--only"], "--only: name the techniques that are varied"),
        (["w.py", "--published", "t.csv"], "--published stands beside a ladder that is measured"),
        (["w.py", "--design", "ladder", "--published", "absent.csv"], "cannot read absent.csv"),
        (["w.py", "--grow-batch", "2GiB"], "--grow-batch is for a ladder: --design ladder"),
        (["w.py", "--design", "ladder", "--grow-batch", "much"], "'much' is not a size"),
        (["w.py", "--cells", "1"], "--cells 1"),
        (["w.py", "--cells", "9", "--design", "ladder"], "--cells 9: --design ladder goes step by step"),
        (["w.py", "--recipe", "grad=no_grad", "--design", "pairs"], "--recipe is for a ladder, an ablation or"),
        (["--from-csv", "t.csv", "--design", "pairs"], "--from-csv reads what was measured"),
        (["w.py", "--factor", "machine=1,2"], "rename the argument"),
        (["w.py", "--max-error", "nan"], "max error must be above 0"),
        (["w.py", "--trial-timeout", "0"], "the trial timeout must be 1 s or more"),
        (["w.py", "--budget", "soon"], "is not a duration"),
        (["absent.py"], "no such file: absent.py"),
        (["--from-csv", "absent.csv", "--response", "y"], "cannot read absent.csv"),
        (["w.py", "-o", "x.txt/y.parquet/z.csv", "-o", "a.csv"], "is named for that already"),
    ],
)
def test_bad_usage_is_one_line(words: list[str], says: str, tmp_path: Path, monkeypatch, run_fettle: Run):
    monkeypatch.chdir(tmp_path)
    Path("w.py").write_text(WORK)
    said = run_fettle("study", *words)
    assert said.code == 2
    assert says in said.err, said.err
    assert len(said.err.strip().splitlines()) == 1


def test_ctrl_c_while_the_workload_is_built_is_an_interrupt(work: Path, tmp_path: Path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "open_workload", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study([str(work)], Settings(output=tmp_path), lambda event: None)


class Interrupted(Recorded):
    """Each level halves the time. Ctrl-C comes in the race of one recipe; those before it in that race are kept."""

    def __init__(self, at: str) -> None:
        super().__init__(lambda recipe: 100.0 * 0.5 ** len(recipe.levels))
        self.at, self.budget = Recipe.parse(at), Budget(None, 0.0)
        self.costs = Costs(None, self.budget)

    def measure(self, recipes):
        for recipe in recipes:
            if self.costs.budget.seconds is None and recipe not in self.trials:
                if recipe == self.at:
                    raise KeyboardInterrupt
                self.trials[recipe] = self._run(recipe)
        return [self.trials[recipe] for recipe in recipes if recipe in self.trials]


@pytest.mark.parametrize(("design", "at", "shown"), [
    ("ladder", "a=on b=on c=on", ["as given", "a=on", "b=on"]),
    ("ablation", "a=on c=on", ["a=on b=on c=on", "without a"]),
])  # fmt: skip
def test_ctrl_c_keeps_the_steps_that_are_done(design: str, at: str, shown: list[str]):
    workload = Workload("net", {}, Interrupted(at), Space(switches("abc"), lambda recipe: ""))
    start = Recipe.parse("a=on b=on c=on") if design == "ablation" else None
    with pytest.raises(KeyboardInterrupt):
        running._measure(workload, Settings(design=design, start=start))
    assert [step.label for step in workload.steps] == shown


def test_ctrl_c_keeps_the_batches_that_have_grown(monkeypatch):
    def grown(session, recipe, limit_bytes):
        if "b" in recipe.levels:
            raise KeyboardInterrupt
        return recipe

    monkeypatch.setattr(running, "grown", grown)
    workload = Workload("net", {}, Interrupted(""), Space(switches("ab"), lambda recipe: ""))
    workload.session.at = None
    with pytest.raises(KeyboardInterrupt):
        running._measure(workload, Settings(design="ladder", grow_batch=1e9))
    assert list(workload.grown) == [Recipe(), Recipe.parse("a=on")]


def test_a_ladder_that_was_interrupted_before_its_first_step_is_written(tmp_path: Path, monkeypatch, run_fettle: Run):
    """Where statsmodels is not installed too: it needs no effects."""
    machine = Machine("id", "cpu", 2, 1, (), "linux", "3.13", {})
    done = Done("ladder", table({"a=on": 0.5}, switches("ab")), {}, machine, 1.0, interrupted=True)
    monkeypatch.setattr("fettle.studies.study", lambda *args, **options: done)
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    monkeypatch.delitem(sys.modules, "statsmodels.api", raising=False)
    said = run_fettle("study", "w.py", "--design=ladder", "-o", tmp_path / "out")
    assert said.code == 130, said.err
    assert (tmp_path / "out" / "study.json").is_file()


class Opened(SimpleNamespace):
    """A session of a workload whose facts are known."""

    def __init__(self, facts: Facts) -> None:
        noted = list[str]()
        super().__init__(facts=facts, notes=noted, remark=noted.append, report=lambda text: None,
                         open=lambda machine: None, environments={}, rules=Rules(),
                         plan=SimpleNamespace(rules_out=lambda recipe: ""),
                         costs=SimpleNamespace(of=lambda recipe: 1))  # fmt: skip


def opened(facts: Facts, **options) -> Workload:
    workload = Workload("net", {}, Opened(facts))
    open_workload(workload, Settings(only=True, **options), Machine("id", "cpu", 2, 1, (), "linux", "3.13", {}))
    return workload


def timed(budget_s: float | None) -> Interrupted:
    """A session with so much time, whose workload as given is known."""
    session = Interrupted("")
    session.budget = Budget(budget_s, time.monotonic())
    session.costs = Costs(SimpleNamespace(known={Recipe(): Trial(Recipe(), "measured", start_s=10.0, turn_s=1.0)}),
                          session.budget)  # fmt: skip
    session.standings, session.rules = session.costs.standings, Rules(replicates=2)
    return session


def test_a_search_leaves_an_ablation_half_of_the_time(monkeypatch):
    had = list[float]()
    monkeypatch.setattr(running, "auto", lambda space, session, guide: had.append(session.costs.budget.seconds))
    workload = Workload("net", {}, timed(60.0), Space(switches("ab"), lambda recipe: ""))
    running._measure(workload, Settings(design="ablation", budget_s=60.0))
    assert had == [pytest.approx(30.0, abs=5.0)]
    assert workload.session.costs.budget.seconds == 60.0


def test_workloads_share_a_budget():
    both = [Workload(name, {}, timed(60.0), Space(switches("ab"), lambda recipe: "")) for name in ("one", "other")]
    plan = running._plan(both, Settings(design="ladder", budget_s=60.0), time.monotonic())
    assert [part.seconds for part in plan.parts] == [pytest.approx(30.0, abs=5.0)] * 2
    running._leave(both[0].session, 1 / 2)
    assert both[0].session.costs.budget.seconds == pytest.approx(30.0, abs=5.0)
    free = [Workload("net", {}, timed(None), both[0].space)]
    whole = running._plan(free, Settings(design="ladder", rounds=5), time.monotonic())
    assert whole.seconds == 3 * 2 * (10.0 + 5 * 1.0)  # each step that is not known in two processes


def test_the_plan_of_a_ladder_counts_the_larger_batches_of_each_step():
    workload = Workload("net", {}, timed(None), Space(switches("ab"), lambda recipe: ""))
    steps = running._plan([workload], Settings(design="ladder", rounds=5), time.monotonic())
    grown = running._plan([workload], Settings(design="ladder", rounds=5, grow_batch=1e9), time.monotonic())
    (step,), (more,) = steps.parts, grown.parts
    tries = step.cells * batches.about_tries(1e9)
    assert more.cells == step.cells + tries
    each_s = step.seconds / (step.cells - step.known)
    assert more.seconds == pytest.approx(step.seconds + 2 * tries * each_s)  # each beside the workload as given
    recipe = Recipe.parse("batch=x2")
    workload.known[recipe] = Trial(recipe, "measured")
    (again,) = running._plan([workload], Settings(design="ladder", rounds=5, grow_batch=1e9), time.monotonic()).parts
    assert again.known == more.known + 1
    assert again.seconds == pytest.approx(more.seconds - 2 * each_s)


def test_of_a_budget_for_nothing_the_plan_has_the_workload_as_given():
    space = Space({"precision": ("fp32", "bf16"), "grad": ("grad", "inference_mode")}, lambda recipe: "")
    workload = Workload("net", {}, timed(1.0), space, designs.cells("factorial", space, Recipe()))
    plan = running._plan([workload], Settings(budget_s=1.0), time.monotonic())
    assert workload.cells == [Recipe()]
    assert plan.notes == ("net: 1 of 4 combinations fit into the budget",)


@pytest.mark.parametrize("design", ["factorial", "pairs"])
def test_what_is_measured_already_takes_nothing_of_a_budget_when_a_study_goes_on(design: str, monkeypatch):
    space = Space(switches("abcdef"), lambda recipe: "")
    workload = Workload("net", {}, timed(60.0), space, designs.cells(design, space, Recipe()))
    measured = workload.cells[1::2]
    workload.known.update({recipe: Trial(recipe, "measured", start_s=10.0, turn_s=1.0) for recipe in measured})
    monkeypatch.setattr(running, "_seconds", lambda workload, settings: [10.0] * len(workload.unknown()))
    running._plan([workload], Settings(design=design, budget_s=59.0), time.monotonic())
    assert {Recipe(), *measured} <= {*workload.cells}
    assert len(workload.unknown()) == 5


def test_a_ladder_in_a_storage_of_others_takes_its_turn_and_knows_what_they_measured(tmp_path: Path, monkeypatch):
    def wait(text):
        raise InterruptedError(text)

    monkeypatch.setattr(tempfile, "tempdir", f"{tmp_path}")
    read = list[str]()
    session = SimpleNamespace(facts=Facts(), report=wait, refresh=lambda: read.append("again"))
    session.costs = timed(60.0).costs
    with running._in_turn(session, Settings(design="ladder", storage="x.db")):
        assert read == ["again"]
        with pytest.raises(InterruptedError, match="another worker"), one_at_a_time(session):
            pass
    for alone in (Settings(design="ladder"), Settings(design="pairs", storage="x.db")):  # whose claims are enough
        with running._in_turn(session, alone), one_at_a_time(session):
            assert read == ["again"]


def test_a_budget_that_is_gone_is_said(monkeypatch):
    monkeypatch.setattr(running, "_seconds", lambda workload, settings: [1.0])
    session = Opened(Facts())
    session.standings, session.measure = SimpleNamespace(known={Recipe(): None}), list
    session.costs = SimpleNamespace(budget=Budget(5, time.monotonic() - 60))
    workload = Workload("net", {}, session, cells=[Recipe(), Recipe.parse("compile=default")])
    running._measure(workload, Settings(budget_s=5))
    assert session.notes == ["net: the budget was used up before 1 of 2 combinations could be measured"]


def test_a_target_on_which_nothing_can_vary_does_not_end_a_study_of_several():
    asked = {"channels_last": ["off", "on"]}
    assert opened(Facts(num_linear=2), techniques=asked).failure.startswith("there is nothing to vary")
    assert not opened(Facts(num_conv=2), techniques=asked).failure
    alone = opened(Facts(num_linear=2), arguments={"batch": ["1", "4"]})  # which varies outside of it
    assert (alone.failure, alone.cells) == ("", [Recipe()])


def test_a_workload_that_cannot_be_built_is_said_when_a_study_is_begun_for_workers(monkeypatch):
    said = list[str]()
    both = [Workload(name, {}, SimpleNamespace(note=said.append)) for name in ("net", "net batch=64")]
    both[0].cells, both[1].failure = [Recipe()], "the factory raised ValueError: too large a batch"
    monkeypatch.setattr(running, "workloads_of", lambda *given: both)
    for name in ("agree", "open_workload", "announce"):
        monkeypatch.setattr(running, name, lambda *given: None)
    assert running.enqueue(["net.py"], Settings(), print) == {"net": 1, "net batch=64": 0}
    assert said == ["net batch=64 has no combinations: the factory raised ValueError: too large a batch"]


@pytest.mark.parametrize("design", ["ladder", "ablation"])
def test_a_recipe_that_cannot_work_here_is_no_beginning(design: str):
    workload = opened(Facts(num_linear=2), design=design, start=Recipe.parse("batch=x2"))
    assert workload.failure == "the recipe batch=x2 cannot work here: batch=x2: the batch size may not change here"


def test_what_was_asked_for_and_cannot_be_had_here_is_said():
    wanted = {"channels_last": ["off", "on"], "grad": ["grad", "inference_mode"]}
    workload = opened(Facts(num_linear=2), techniques=wanted, order=["cudnn_benchmark", "grad"])
    assert [str(recipe) for recipe in workload.cells] == ["baseline", "grad=inference_mode"]
    asked, ordered = workload.session.notes
    assert asked.startswith("net: channels_last=on cannot be used here: ")
    assert ordered == "net: cudnn_benchmark has no level that could be varied here"


def test_what_every_recipe_must_have_stays_in_a_study_of_named_techniques():
    """Of a model in train mode that is eval mode: without it in the space no trial belonged to the study."""
    workload = opened(Facts(training=True, train_mode_differs=True), techniques={"grad": ["grad", "no_grad"]})
    assert {*map(str, workload.cells)} == {"baseline", "mode=eval", "grad=no_grad mode=eval"}
    trials = [Trial(recipe, "measured", time_ms=1.0) for recipe in workload.cells]
    assert workload.within(trials) == trials


def test_a_sensitivity_is_asked_around_a_recipe_of_techniques_that_are_not_named():
    start, wanted = Recipe.parse("grad=no_grad"), {"channels_last": ["off", "on"]}
    workload = opened(Facts(num_conv=2), techniques=wanted, design="sensitivity", start=start)
    assert [*map(str, workload.cells)] == ["baseline", "grad=no_grad", "channels_last=on grad=no_grad"]
    trials = [Trial(recipe, "measured", time_ms=1.0) for recipe in workload.cells]
    assert workload.within(trials) == trials


def test_an_order_names_a_technique_for_all_parts_of_a_pipeline_or_one():
    parts = {name: Facts(num_conv=2, part=name) for name in ("encoder", "decoder")}
    wanted = {"channels_last": ["off", "on"], "grad": ["grad", "inference_mode"]}
    order = ["channels_last[decoder]", "channels_last", "grad"]
    workload = opened(Facts(parts=parts), techniques=wanted, order=order, design="ladder")
    varied = [name for name, levels in workload.space.choices.items() if len(levels) > 1]
    assert varied == ["channels_last[decoder]", "channels_last[encoder]", "grad"]


def test_values_of_a_factor_are_what_python_reads():
    values = {text: _typed(text) for text in ("False", "true", "None", "4", "1e3", "bf16", "0.5")}
    assert values == {"False": False, "true": True, "None": None, "4": 4, "1e3": 1000.0, "bf16": "bf16", "0.5": 0.5}
    target = Target("w.py:workload", arguments=values)
    assert msgspec.json.decode(msgspec.json.encode(target), type=Target).arguments == values


@pytest.mark.usefixtures("forks")
def test_a_factory_without_that_argument_fails_in_one_line(work: Path, tmp_path: Path):
    with pytest.raises(UsageError, match="has no parameter 'size'"):
        study([str(work)], Settings(arguments={"size": ["1", "2"]}, output=tmp_path), lambda event: None)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"confidence": 95.0}, "`confidence` is a share"), ({"output": "out"}, "`output` takes Path, not 'out'")],
)
def test_settings_that_cannot_be_are_one_line(options: dict[str, object], says: str, work: Path):
    with pytest.raises(UsageError, match=says):
        study([str(work)], Settings(**options), lambda event: None)


@pytest.mark.slow
def test_what_cannot_run_in_another_environment_is_a_failed_cell(work: Path, tmp_path: Path, run_fettle: Run):
    bare = tmp_path / "bare"
    venv.create(bare, symlinks=True)
    words = ["study", work, TWO[0], "--technique=precision=fp32", "--only", "--design=sensitivity", "--rounds=3",
             "-o", tmp_path / "out", "--json"]  # fmt: skip
    said = run_fettle(*words, "--python", bare)
    assert said.code == 0, said.err
    data = json.loads(said.out)
    assert f"python=bare is {bare}/bin/python: torch is not installed there" in data["notes"]
    assert {(row["python"], row["grad"], row["reason"]) for row in data["experiments"]} == {
        ("this", "grad", ""),
        ("this", "inference_mode", ""),
        ("bare", "grad", f"{bare}/bin/python: torch is not installed there"),
    }
    (next(bare.glob("lib/python*/site-packages")) / "torch.py").touch()
    changed = run_fettle(*words, "--python", bare)
    assert changed.code == 2
    assert "is not what was measured under that name" in changed.err
    without = run_fettle(*words)  # trials of other environments do not count where they are not asked for
    assert [row["grad"] for row in json.loads(without.out)["experiments"]] == ["grad", "inference_mode"]


@pytest.mark.slow
def test_another_environment_is_raced_beside_ours(work: Path, tmp_path: Path, run_fettle: Run):
    """It has a library that ours has not, by which its model is another function of the same weights."""
    other = tmp_path / "other"
    venv.create(other, symlinks=True)
    packages = next(other.glob("lib/python*/site-packages"))
    (packages / "ours.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    (packages / "only_there.py").touch()
    script = tmp_path / "twenty.sh"
    script.write_text(f'#!/bin/sh\nexec {other}/bin/python "$@"\n')
    script.chmod(0o755)
    model = tmp_path / "model.py"
    model.write_text(
        WORK
        + """
import importlib.util

class Slow(nn.Sequential):
    def forward(self, x):
        for _ in range(20 if importlib.util.find_spec("only_there") else 1):
            y = super().forward(x)
        return y

def slow():
    torch.manual_seed(0)
    return Slow(nn.Linear(256, 256)).eval(), [torch.randn(64, 256) for _ in range(4)]
"""
    )
    said = run_fettle("study", f"{model}:slow", *TWO, "--only", "--rounds=6", "--python", script,
                      "-o", tmp_path / "out", "--json")  # fmt: skip
    assert said.code == 0, said.err
    data = json.loads(said.out)
    rows = data["experiments"]
    assert {(row["python"], row["grad"], row["precision"]) for row in rows} == {
        (python, grad, precision)
        for python in ("this", "twenty") for grad in ("grad", "inference_mode") for precision in ("fp32", "bf16")
    }  # fmt: skip
    assert all(row["ms_per_sample"] > 0 for row in rows)
    time_of = next(one for one in data["analyses"] if one["response"] == "ms_per_sample")
    assert time_of["dominant"][0] == "python"


@pytest.mark.usefixtures("forks")
def test_a_study_of_more_than_an_hour_asks_first(work: Path, tmp_path: Path, monkeypatch, run_fettle: Run):
    monkeypatch.setattr(designs, "LONG_S", 0.1)
    words = ["study", work, *TWO, "--only", "--rounds=3", "-o", tmp_path / "out"]
    said = run_fettle(*words)
    assert said.code == 2
    assert "factorial: 4 combinations, 1 of them measured already; the rest takes about" in said.err
    assert "add --yes to run it, --budget 30m" in said.err
    part = run_fettle(*words, "--cells=2", "--yes")
    assert part.code == 0
    assert "factorial: 2 combinations, 1 of them measured already; the rest takes about" in part.err
    assert len(json.loads((tmp_path / "out" / "study.json").read_text())["experiments"]) == 2


def test_without_statsmodels_one_line_says_so(tmp_path: Path, monkeypatch, run_fettle: Run):
    table = tmp_path / "t.csv"
    table.write_text("a,b,y\n" + "".join(f"{a},{b},{1 + a + b}\n" for a in (0, 1) for b in (0, 1)) * 3)
    for name in [name for name in sys.modules if name.partition(".")[0] == "statsmodels"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    said = run_fettle("study", "--from-csv", table, "--response", "y", "-o", tmp_path / "out")
    assert said.code == 2
    assert said.err.strip() == f"fettle: {extra('effects need statsmodels', 'study')}"
    (tmp_path / "w.py").write_text("def workload():\n    raise RuntimeError('built')\n")
    said = run_fettle("study", tmp_path / "w.py", "-o", tmp_path / "out")  # said before hours of measuring, not after
    assert said.err.strip() == f"fettle: {extra('effects need statsmodels', 'study')}"


def test_a_table_of_somebody_else_becomes_a_page(tmp_path: Path, run_fettle: Run):
    from tests.studies.test_reading import CUBE

    table = tmp_path / "cube.csv"
    table.write_text(CUBE)
    said = run_fettle("study", "--from-csv", table, "--response", "throughput (it/s)", "--group-by", "model",
                      "--parquet", tmp_path / "t.parquet", "-o", tmp_path / "out")  # fmt: skip
    assert said.code == 0, said.err
    assert "autocast-dtype=float16 is worth" in said.out
    assert "--parquet is now --output" in said.err
    assert (tmp_path / "out" / "study.html").is_file()
    assert (tmp_path / "t.parquet").is_file()


def test_a_table_is_not_written_over_by_what_is_read_of_it(tmp_path: Path, run_fettle: Run):
    table = tmp_path / "study.csv"
    table.write_text("a,y\n0,1\n1,2\n")
    for over in (table, tmp_path):
        said = run_fettle("study", "--from-csv", table, "--response", "y", "--output", over)
        assert (said.code, "would be written over: give another --output" in said.err) == (2, True)
    assert table.read_text() == "a,y\n0,1\n1,2\n"
