"""A study of a training loop from end to end, and what goes wrong in one."""

import contextlib
import functools
import json
import os
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import fettle
from fettle.errors import UsageError
from fettle.procs.rendezvous import free_ports
from fettle.report import load_result, save
from tests.conftest import quick_studies
from tests.forking import forked, run_script

TINY = Path(__file__).parent / "tiny_loop.py"
FEW = {
    "precision": ["fp32"], "optimizer": ["as-given", "fused"], "compile": ["off"], "checkpoint": ["none"],
    "accumulate": ["off"], "zero_grad": ["none"], "threads": ["as-given"], "allocator": ["default"],
    "channels_last": ["off"], "matmul": ["highest"], "convolution": ["kernel"],
}  # fmt: skip
BUDGET_S = 1800
"""No machine uses it up: a study of so few recipes ends because it has tried them."""


@pytest.fixture(autouse=True)
def quick():
    with quick_studies(), forked():  # which every optimizer imports
        yield


def tuned(tmp_path, factory="workload", **options):
    return fettle.tune(f"{TINY}:{factory}", mode="training", techniques=FEW, output=tmp_path, **options)


def test_a_study_of_a_loop(tmp_path):
    result = tuned(tmp_path, budget_s=BUDGET_S)
    assert result.facts.mode == "training"
    assert result.facts.optimizer == "AdamW"
    assert len(result.reference.curves) == 5
    assert result.reference.spread > 0
    base = result.baseline
    assert base.accuracy.error == pytest.approx(0, abs=0.05)
    assert len(base.accuracy.losses) == 8
    assert set(base.phases_ms) == {"data", "forward", "backward", "optimizer", "communication", "idle"}
    assert base.samples == 16
    assert {"baseline", "optimizer=fused"} <= {str(trial.recipe) for trial in result.trials}
    for trial in result.trials:
        assert trial.status == "measured"
        assert trial.accuracy.error <= 1
    save(result, tmp_path)
    again = load_result(tmp_path / "result.json")
    assert again.reference.curves == result.reference.curves
    text = (tmp_path / "report.html").read_text()
    assert "Losses, baseline and tuned" in text
    assert "A step, by phase" in text
    assert "The memory plan" not in text  # there was one rank
    code, said, errors = run_script(tmp_path / "optimized.py", os.environ)
    assert code == 0, errors
    assert said.count(": loss ") == 8
    assert "samples/s at 16 a step" in said

    kept = _kept(tmp_path)
    resumed = tuned(tmp_path, budget_s=BUDGET_S)
    assert [trial.recipe for trial in resumed.trials] == [trial.recipe for trial in result.trials]
    assert _kept(tmp_path) == kept  # only the final race may be held again, where its first could not tell


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("explodes", "the training as given is (nan|inf)"),
        ("raises", r"first training step raised ValueError: no such label at tiny_loop\.py"),
        ("vector", r"a tensor of shape \(16, 4\): return the mean loss"),
        ("ignores_seed", "other seeds train exactly alike"),
    ],
)
def test_a_loop_that_cannot_be_judged_gets_one_line(tmp_path, factory, says):
    with pytest.raises(UsageError, match=says) as caught:
        tuned(tmp_path, factory, budget_s=BUDGET_S)
    assert "\n" not in str(caught.value)


def test_modes_are_not_mixed_up(tmp_path):
    with pytest.raises(UsageError, match="unknown mode"):
        fettle.tune(str(TINY), mode="both", output=tmp_path)
    with pytest.raises(UsageError, match="inference only"):
        fettle.tune(str(TINY), mode="training", techniques={"mode": ["eval"]}, output=tmp_path)


RANKS = {**FEW, "parallel": ["single", "ddp"], "auto_wrap": ["block"], "static_graph": ["off"],
         "ddp_compress": ["none"], "ddp_buckets": ["view"]}  # fmt: skip


@pytest.mark.slow
def test_a_killed_study_goes_on_and_measures_nothing_twice(tmp_path):
    options = [word for name, levels in RANKS.items() for word in ("--technique", f"{name}={','.join(levels)}")]
    command = [sys.executable, "-c", "from fettle.cli import main; main()", "tune", str(TINY), "--mode", "training",
               "--nproc", "2", "--budget", "4m", "-o", str(tmp_path), *options]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 150
        while len(kept := _kept(tmp_path)) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.3)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()  # SIGKILL: nothing of its own runs any more
        process.wait()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
    finally:
        process.kill()
    kept = _kept(tmp_path)
    assert len(kept) >= 2
    result = fettle.tune(str(TINY), mode="training", nproc=2, techniques=RANKS, output=tmp_path, budget_s=120)
    after = _kept(tmp_path)
    assert after[: len(kept)] == kept
    recipes = [json.dumps(trial["recipe"], sort_keys=True) for trial in after]
    assert len(set(recipes)) == len(recipes)
    assert any(trial.recipe.levels.get("parallel") == "ddp" and trial.ok for trial in result.trials)
    assert [row.strategy for row in result.plan][:3] == ["single", "ddp", "zero1"]
    save(result, tmp_path)
    assert "The memory plan, one rank" in (tmp_path / "report.html").read_text()
    assert list(load_result(tmp_path / "result.json").plan) == list(result.plan)
    with pytest.raises(UsageError, match="holds trials on 2 ranks: choose another `study`"):
        fettle.tune(str(TINY), mode="training", nproc=4, techniques=RANKS, output=tmp_path, budget_s=20)


@contextlib.contextmanager
def two_nodes(folder, monkeypatch, budget="3m"):
    """The commands of two nodes, both on this machine, as people would start them: the study's, and the one that joins
    it. Both have ended afterwards."""
    monkeypatch.setenv("FETTLE_KEY", "known to both")
    fettle_ = [sys.executable, "-c", "from fettle.cli import main; main()"]
    address = f"127.0.0.1:{free_ports('127.0.0.1', 1)[0]}"
    options = [word for name, levels in RANKS.items() for word in ("--technique", f"{name}={','.join(levels)}")]
    tune = [*fettle_, "tune", str(TINY), "--mode", "training", "--nodes", "2", "--listen", address,
            "--budget", budget, "--json", "-o", str(folder), *options]  # fmt: skip
    start = functools.partial(subprocess.Popen, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    with start([*fettle_, "join", address], cwd=folder.parent) as other, start(tune) as study:
        try:
            yield study, other
        finally:
            other.kill()
            study.kill()


@pytest.mark.slow
def test_a_study_over_two_nodes(tmp_path, monkeypatch):
    folder = tmp_path / "out"
    with two_nodes(folder, monkeypatch) as (study, other):
        problem = study.communicate()[1]
        said = other.communicate(timeout=60)[1]
    assert study.returncode in (0, 1), problem
    assert "node 2 of 2" in said
    assert "the study has ended" in said
    result = load_result(folder / "result.json")
    assert result.facts.nodes == 2
    assert any(trial.recipe.levels.get("parallel") == "ddp" and trial.ok for trial in result.trials)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["study", "node"])
def test_a_study_over_nodes_that_was_cut_short_goes_on(tmp_path, monkeypatch, killed):
    folder = tmp_path / "out"
    with two_nodes(folder, monkeypatch) as (study, other):
        deadline = time.monotonic() + 150
        while not _kept(folder) and study.poll() is None and time.monotonic() < deadline:
            time.sleep(0.3)
        (study if killed == "study" else other).kill()  # SIGKILL: nothing of its own runs any more
        problem, said = study.communicate(timeout=150)[1], other.communicate(timeout=60)[1]
    assert ("the study has ended" in said) if killed == "study" else ("node 2 has left" in problem)
    kept = _kept(folder)
    assert kept
    with two_nodes(folder, monkeypatch) as (study, other):
        problem = study.communicate()[1]
        other.communicate(timeout=60)
    assert study.returncode in (0, 1), problem
    after = _kept(folder)
    assert after[: len(kept)] == kept
    assert len(after) > len(kept)


def _kept(folder):
    path = folder / "study.db"
    if not path.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as base:
        try:
            rows = base.execute("select value_json from trial_user_attributes where key = 'fettle' order by trial_id")
            return [json.loads(json.loads(text)) for (text,) in rows]
        except sqlite3.OperationalError:  # not made yet
            return []


def test_the_plan_leaves_out_what_cannot_fit(tmp_path):
    """Before anything is launched: a strategy that needs more than a device has is no trial."""
    from fettle.parallel.plan import Plan, Prediction
    from fettle.parallel.study import rules_out

    def row(strategy, peak, states):
        return Prediction(strategy, 2, peak, states={"all": states})

    rows = (row("ddp", 1200, 800), row("zero1", 1200, 950), row("zero3", 600, 300))
    made = Plan("some", 2, 2, "cpu", 1000, 0.1, 1, "AdamW", rows)
    assert "a rank's peak" in rules_out(made, {"parallel": "ddp"})
    assert not rules_out(made, {"parallel": "ddp", "precision": "autocast-bf16"})  # may need less: the states fit
    assert "optimizer state" in rules_out(made, {"parallel": "zero1", "precision": "autocast-bf16"})
    assert not rules_out(made, {"parallel": "zero3"})
    assert not rules_out(replace(made, device_memory_bytes=None), {"parallel": "ddp"})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"nproc": 0}, "`nproc=0`: give the number of ranks"),
        ({"nproc": 2, "mode": "inference"}, "is for training, and a workload for inference is needed"),
        ({"min_throughput": -1.0}, "min throughput must be above 0"),
        ({"nproc": 2, "device_memory_bytes": 0}, "device memory must be above 0"),
    ],
)
def test_bad_numbers_get_one_line(tmp_path, options, says):
    with pytest.raises(UsageError, match=says):
        fettle.tune(str(TINY), output=tmp_path, **{"mode": "training", **options})
