"""A study of a training loop from end to end, and what goes wrong in one."""

import subprocess
import sys
from pathlib import Path

import pytest

import fettle
from fettle.errors import UsageError
from fettle.report import load_result
from fettle.tuning import save

TINY = Path(__file__).parent / "tiny_loop.py"
FEW = {
    "precision": ["fp32", "autocast-bf16"], "optimizer": ["as-given", "fused"], "compile": ["off"],
    "checkpoint": ["none"], "accumulate": ["off", "x2"], "zero_grad": ["none"], "threads": ["as-given"],
    "allocator": ["default"], "channels_last": ["off"], "matmul": ["highest"],
}  # fmt: skip


def tuned(tmp_path, factory="workload", **options):
    return fettle.tune(f"{TINY}:{factory}", mode="training", techniques=FEW, output=tmp_path, **options)


def test_a_study_of_a_loop(tmp_path):
    result = tuned(tmp_path, budget_s=30)
    assert result.facts.mode == "training"
    assert result.facts.optimizer == "AdamW"
    assert len(result.reference.curves) == 5
    assert result.reference.spread > 0
    base = result.baseline
    assert base.accuracy.error == pytest.approx(0, abs=0.05)
    assert len(base.accuracy.losses) == 8
    assert set(base.phases_ms) == {"data", "forward", "backward", "optimizer"}
    assert base.samples == 16
    ran = [trial for trial in result.trials if trial.status == "measured"]
    assert len(ran) >= 3
    for trial in ran:
        assert trial.accuracy.error <= 1
    save(result, tmp_path)
    again = load_result(tmp_path / "result.json")
    assert again.reference.curves == result.reference.curves
    text = (tmp_path / "report.html").read_text()
    assert "Losses, baseline and tuned" in text
    assert "A step, by phase" in text
    done = subprocess.run([sys.executable, tmp_path / "optimized.py"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") == 8

    resumed = tuned(tmp_path, budget_s=30)  # what is known is not measured again
    assert len(resumed.trials) >= len(result.trials)
    assert list(resumed.baseline.round_ms) == list(base.round_ms)


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
        tuned(tmp_path, factory, budget_s=20)
    assert "\n" not in str(caught.value)


def test_modes_are_not_mixed_up(tmp_path):
    with pytest.raises(UsageError, match="unknown mode"):
        fettle.tune(str(TINY), mode="both", output=tmp_path)
    with pytest.raises(UsageError, match="inference only"):
        fettle.tune(str(TINY), mode="training", techniques={"mode": ["eval"]}, output=tmp_path)
