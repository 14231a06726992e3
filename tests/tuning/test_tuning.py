"""The main job from end to end on a model of milliseconds, without compilers so that it takes seconds.

A study here has few recipes and ends because it has tried them: its budget is one that no machine uses up.
"""

import importlib
import json
import os
import signal
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
import torch
from torch import nn

import fettle
from fettle import comparing
from fettle.recipe import Recipe
from fettle.recipe_file import load_recipe
from fettle.report import Result, save
from fettle.techniques import load, source
from tests.conftest import Run, quick_studies
from tests.forking import Begun, forked, run_script

WORK = """
import torch
from torch import nn

def workload():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(32, 10))
    return model, [torch.randn(4, 3, 24, 24) for _ in range(4)]

def other():
    model, batches = workload()
    return model, [2 * batch for batch in batches]
"""
pytestmark = pytest.mark.usefixtures("forks")
BUDGET_S = 1800
FEW = {
    "grad": ["grad"],
    "precision": ["fp32", "bf16"],
    "channels_last": ["off"],
    "matmul": ["highest"],
    "threads": ["as-given"],
    "allocator": ["default"],
    "attention": ["as-is"],
    "quantize": ["none"],
    "compile": ["off"],
    "runtime": ["torch"],
}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quick_studies():
        yield


@pytest.fixture
def work(tmp_path: Path) -> Path:
    path = tmp_path / "work.py"
    path.write_text(WORK)
    return path


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path, Path]:
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "work.py").write_text(WORK)
    with forked():
        result = fettle.tune(str(folder / "work.py"), techniques=FEW, budget_s=BUDGET_S, output=folder / "out")
    save(result, folder / "out")
    return result, folder / "work.py", folder / "out"


def test_a_workload_is_tuned_verified_and_written(tuned) -> None:
    result, _, out = tuned
    assert result.winner is not None
    assert result.recipe.levels.get("mode") == "eval"  # train mode gives other answers: a precondition
    assert result.winner.accuracy.error <= 0.02
    assert result.winner.accuracy.judged_batches >= 2
    assert result.reference.dtype == "float64"
    assert result.baseline is not None
    assert result.baseline.accuracy.error > 0.02  # dropout: shown, and unable to win
    assert {path.name for path in out.iterdir()} >= {
        "recipe.toml", "optimized.py", "report.html", "study.db", "result.json",
    }  # fmt: skip
    assert result.ladder[0].label == "as given"
    assert result.ladder[0].trial is result.baseline
    assert result.verdict != "faster" or result.baseline_again is not None  # beside the winner, in the final race
    assert result.ladder[-1].trial.recipe == result.recipe
    assert any(item.technique == "compile" for item in result.left_out)


def test_a_first_look_advised_and_what_it_brought_is_beside_its_bound(tuned) -> None:
    result, _, _ = tuned
    assert result.advice
    assert all(0 < item.bound <= 1 and item.levels and item.says for item in result.advice)


def test_the_recipe_round_trips_and_applies(tuned) -> None:
    result, _, out = tuned
    found = load_recipe(out / "recipe.toml")
    assert found.recipe == result.recipe
    assert found.evidence["accuracy"]["error"] <= 0.02
    namespace: dict = {}
    exec(WORK, namespace)
    model, batches = namespace["workload"]()
    wanted = model.eval()(batches[0]).detach()
    fast = fettle.apply(model, out / "recipe.toml", batches)
    assert torch.linalg.norm(fast(batches[0]).detach() - wanted) <= 0.02 * torch.linalg.norm(wanted)


def test_the_code_runs_as_it_stands_without_fettle(tuned, tmp_path: Path) -> None:
    _, _, out = tuned
    blocked = "import sys; sys.modules['fettle'] = None; import runpy; runpy.run_path(sys.argv[1], run_name='__main__')"
    (tmp_path / "blocked.py").write_text(blocked)
    code, said, errors = run_script(tmp_path / "blocked.py", os.environ, str(out / "optimized.py"))
    assert code == 0, errors
    assert "later calls: " in said
    assert "fettle" not in (out / "optimized.py").read_text().split("\n\n\n", 1)[1].replace("fettle_", "")


def test_optuna_reads_the_study(tuned) -> None:
    result, _, out = tuned
    study = optuna.load_study(study_name="work", storage=f"sqlite:///{out / 'study.db'}")
    assert len(study.trials) == len(result.trials)
    assert {trial.user_attrs["recipe"] for trial in study.trials} == {str(trial.recipe) for trial in result.trials}
    assert study.best_trials
    for trial in study.trials:  # a dashboard's timeline has bars, and its importances no techniques of training
        assert trial.duration is not None
        assert trial.duration.total_seconds() > 0
        assert "precision" in trial.params
        assert "optimizer" not in trial.params


def test_the_same_call_again_measures_nothing(tuned) -> None:
    result, work, out = tuned
    events = []
    again = fettle.tune(str(work), techniques=FEW, budget_s=BUDGET_S, output=out, on_progress=events.append)
    assert [event for event in events if event.trial is not None] == []
    assert [trial.recipe for trial in again.trials] == [trial.recipe for trial in result.trials]


def test_a_study_of_another_workload_under_the_same_name_is_refused(tuned) -> None:
    _, work, out = tuned
    with pytest.raises(fettle.UsageError, match="another workload"):
        fettle.tune(f"{work}:other", techniques=FEW, output=out, study="work")


def test_tighter_limits_judge_the_kept_trials_anew(tuned) -> None:
    _, work, out = tuned
    result = fettle.tune(str(work), techniques=FEW, budget_s=BUDGET_S, output=out, max_error=1e-4)
    assert result.winner is None or result.winner.accuracy.error <= 1e-4
    assert all(trial.status == "rejected" for trial in result.trials if "bf16" in str(trial.recipe))


def test_killed_at_any_moment_the_same_command_goes_on(work: Path, tmp_path: Path, run_fettle: Run) -> None:
    out = tmp_path / "out"
    options = [f"--technique={name}={','.join(levels)}" for name, levels in FEW.items()]
    program = (
        "from fettle.cli import main\nfrom tests.conftest import never_wait, quick_studies\n"
        "from tests.forking import forked_here\nnever_wait()\nwith forked_here(), quick_studies():\n    main()\n"
    )
    command = ["tune", str(work), "-o", str(out), *options, "--budget", f"{BUDGET_S}s"]
    first = Begun(tmp_path, program, *command)
    # until a trial beyond the baseline is done
    while not any(" ms " in line and "mode=eval" in line for line in first.err.read_text().splitlines()):
        assert not first.has_ended(), "the study ended before it could be killed"
        time.sleep(0.02)
    first.send(signal.SIGKILL)
    first.wait()
    before = _recipes(out)
    assert before
    second = run_fettle(*command)
    assert second.code == 0, second.err
    after = _recipes(out)
    assert len(after) == len(set(after)), "a finished trial was measured again"
    assert after[: len(before)] == before


def _recipes(out: Path) -> list[str]:
    study = optuna.load_study(study_name="work", storage=f"sqlite:///{out / 'study.db'}")
    return [trial.user_attrs["recipe"] for trial in study.trials]


@pytest.mark.slow
def test_layers_are_chosen_once_and_carried(work: Path, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    part = {**FEW, "precision": ["fp32"], "runtime": ["torch", "openvino-int8-part"]}
    result = fettle.tune(str(work), techniques=part, budget_s=BUDGET_S, output=tmp_path / "out", max_error=0.05)
    (trial,) = [trial for trial in result.trials if trial.learned][:1]
    layers = trial.learned["int8_layers"]
    assert trial.recipe.levels["runtime"] == "openvino-int8-part"
    assert trial.accuracy.error <= 0.05
    assert any(note.startswith(f"int8: {len(layers)} of 3 layers, with an error of") for note in trial.notes)
    assert result.facts.learned["int8_layers"] == layers
    assert result.facts.max_error >= 0.05
    code = source(trial.recipe, result.facts)
    assert f"'layers': {layers}," in code
    # as if it had won: what is handed out holds the choice, and comes to the same answers
    won = replace(result, winner=trial, code=code)
    save(won, tmp_path / "won")
    assert load_recipe(tmp_path / "won/recipe.toml").learned == {"int8_layers": layers}
    namespace: dict = {}
    exec(WORK, namespace)
    (model, batches), (other, _) = namespace["workload"](), namespace["workload"]()
    fast = fettle.apply(model, tmp_path / "won/recipe.toml", batches)
    torch.testing.assert_close(fast(batches[0]), load(code, "optimized")(other, batches[:2])(batches[0]))
    again = fettle.tune(str(work), techniques=part, budget_s=BUDGET_S, output=tmp_path / "out", max_error=0.05)
    assert again.facts.learned["int8_layers"] == layers


def test_live_objects_work_and_what_cannot_be_pickled_is_one_line(tmp_path: Path) -> None:
    class Local(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.layer(x)}

    model, batches = Local().eval(), [torch.randn(4, 8) for _ in range(2)]
    result = fettle.tune(model, batches, techniques=FEW, budget_s=BUDGET_S, output=tmp_path / "out", confidence=0.9)
    assert result.winner is not None
    assert result.confidence == 0.9  # what the report says of the intervals
    assert not list(tmp_path.rglob("*.pkl"))  # a copy of the weights, which nobody needs any more
    assert result.apply(model, batches)(batches[0])["y"].shape == (4, 8)
    import threading

    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(fettle.UsageError, match=r"write a factory instead, def workload\(\)"):
        fettle.tune(model, batches, output=tmp_path / "out2")


def test_texts_need_a_limit_on_the_metric(tmp_path: Path) -> None:
    workload = fettle.Workload(lambda x: ["a"], [torch.randn(4, 8)], metric=lambda run: 1.0)
    with pytest.raises(fettle.UsageError, match="nothing but the metric can judge it"):
        fettle.tune(workload, budget_s=BUDGET_S, output=tmp_path / "out")


def test_limits_that_nothing_meets_leave_the_nearest_misses(work: Path, tmp_path: Path) -> None:
    result = fettle.tune(str(work), techniques=FEW, budget_s=BUDGET_S, output=tmp_path / "out", max_latency_ms=1e-6)
    assert result.winner is None
    assert 1 <= len(result.nearest) <= 3


def test_a_budget_that_the_probe_used_up_still_measures_the_workload_as_given(work: Path, tmp_path: Path) -> None:
    result = fettle.tune(str(work), techniques=FEW, budget_s=0.1, output=tmp_path / "out")
    assert [trial.recipe for trial in result.trials] == [fettle.Recipe()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.py"], "no such file"),
        (["work.py:absent"], "no factory named 'absent'"),
        (["not a target"], "is not a target"),
        (["work.py", "--technique", "warp=on"], "unknown technique 'warp'"),
        (["work.py", "--technique", "precision=fp3"], "no level 'fp3'"),
        (["work.py", "--technique", "precision"], "write NAME=LEVEL"),
        (["work.py", "--goal", "beauty"], "unknown goal"),
        (["work.py", "--max-error", "-1"], "impossible limit"),
        (["work.py", "--min-agreement", "2"], "impossible limit"),
        (["work.py", "--max-latency", "soon"], "is not a duration"),
        (["work.py", "--max-metric-drop", "0.1"], "needs a metric"),
        (["work.py", "--storage", "sqlite:////nowhere/at/all.db"], "cannot open the storage"),
        (["work.py", "--design", "magic"], "unknown design"),
        (["work.py", "--output", "/proc/nothing"], "cannot write to the output folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    work: Path, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, run_fettle: Run
) -> None:
    monkeypatch.chdir(work.parent)
    said = run_fettle("tune", *arguments)
    lines = [line for line in said.err.splitlines() if "fettle:" in line]
    assert said.code == 2, said.err
    assert len(lines) == 1
    assert words in lines[0]
    assert "Traceback" not in said.err
    assert not (work.parent / "fettle-out" / "recipe.toml").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("levels = 3", "levels"),
        ("[levels]\nprecision = 'bf17'", "recipe.toml: precision has no level 'bf17'"),
        ("[levels]\nwarp = 'on'", "unknown technique"),
        ("[other]\nx = 1", "no [levels] table"),
        ("not toml at all [", "is not a recipe"),
        ("a = " + "[" * 5000, "is not a recipe"),
        ("a = " + "1" * 5000, "is not a recipe"),
        ("format = 99\nof_its_own = 1\n", "recipe format 99"),
        ("[levels]\n[surprise]\ny = 1", "surprise"),
    ],
)
def test_a_foreign_recipe_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(textwrap.dedent(text))
    with pytest.raises(fettle.UsageError) as caught:
        load_recipe(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_for_another_workload_is_refused(tuned, run_fettle: Run) -> None:
    _, work, out = tuned
    text = (out / "recipe.toml").read_text()
    assert "[evidence.limits]" in text
    limited = out.parent / "limited.toml"  # by a metric, which the other workload has not
    limited.write_text(text.replace("[evidence.limits]", "[evidence.limits]\nmax_metric_drop = 0.01"))
    for recipe in (out / "recipe.toml", limited):
        said = run_fettle("check", recipe, f"{work}:other")
        assert said.code == 2
        assert "another workload" in said.err


def test_bench_of_the_baseline_against_itself_and_json(
    work: Path, run_fettle: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "REPLICATES", 2)
    monkeypatch.setattr(comparing, "MOST_REPLICATES", 2)
    said = run_fettle("bench", work, "--json", "--rounds", "6", "--recipe", "baseline")
    assert said.code == 0, said.err
    trials = json.loads(said.out)["trials"]
    assert [trial["processes"] for trial in trials] == [2, 2]
    assert trials[1]["verdict"] in ("same", "cannot tell", "faster", "slower")


def test_bench_has_the_trial_timeout_of_tune(work: Path, run_fettle: Run) -> None:
    said = run_fettle("bench", work, "--recipe", "precision=bf16", "--trial-timeout", "0.5s")
    assert said.code == 2 and "the trial timeout must be 1 s or more, and is 0.5 s" in said.err


def test_recipe_texts() -> None:
    recipe = Recipe.parse("precision=bf16, compile=default")
    assert Recipe.parse(str(recipe)) == recipe
    assert Recipe.parse("baseline") == Recipe()
    for bad in ("precision", "precision=", "a=b a=c", "../../x=1"):
        with pytest.raises(fettle.UsageError):
            Recipe.parse(bad)


def test_an_interrupt_in_the_final_race_shows_what_was_known_by_then(tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    before, work, out = tuned

    def interrupted(session: object, space: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib.import_module("fettle.tuning.tune"), "final_race", interrupted)
    result = fettle.tune(str(work), techniques=FEW, budget_s=BUDGET_S, output=out)
    assert result.interrupted
    assert result.winner is not None
    assert len(result.trials) == len(before.trials)


def test_levels_that_are_no_longer_allowed_do_not_win(tuned) -> None:
    """What an earlier run of the study tried is kept, and is no answer to what is asked now."""
    before, work, out = tuned
    assert any("precision" in trial.recipe.levels for trial in before.trials)
    result = fettle.tune(str(work), techniques={**FEW, "precision": ["fp32"]}, budget_s=BUDGET_S, output=out)
    assert not any("precision" in trial.recipe.levels for trial in [result.winner, *result.trials] if trial is not None)
    assert len(result.trials) > 1
