"""The functions of Python as a caller uses them: live objects, what a study had, and what was edited since."""

import os
import signal
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from masked import masked
from test_tuning import FEW

import fettle
from fettle.comparing import comparison_json
from fettle.report import load_result, save
from fettle.studies import Settings
from fettle.study import Study
from tests.conftest import quick_comparisons, quick_studies
from tests.forking import forked

pytestmark = pytest.mark.usefixtures("forks")
TINY = Path(__file__).parents[1] / "train" / "tiny_loop.py"
GIVEN = {**FEW, "precision": ["fp32"], "grad": ["grad", "inference_mode"]}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Few rounds and processes: how certain a verdict is, is for the tests of the race."""
    with quick_studies(), quick_comparisons():
        yield


@pytest.fixture
def training_forks() -> Iterator[None]:
    """Children begin as forks of a process that has imported what every optimizer imports."""
    with forked():
        yield


def test_a_dict_is_tuned_and_the_result_applies_with_the_studys_inputs(tmp_path: Path) -> None:
    model, inputs = masked()
    wanted = model(**inputs).detach()
    notes: list[str] = []
    result = fettle.tune(
        model, inputs, techniques=GIVEN, budget_s=0, output=tmp_path, on_progress=lambda event: notes.append(event.note)
    )
    assert "inputs: one batch of keyword arguments: ids, mask" in notes
    assert result.trials[0].status == "measured"
    fast = result.apply(masked()[0])
    assert torch.allclose(fast(**inputs).detach(), wanted, atol=1e-3)
    save(result, tmp_path / "saved")
    kept = load_result(tmp_path / "saved" / "result.json")
    with pytest.raises(fettle.UsageError, match="read from a file: give sample inputs"):
        kept.apply(masked()[0])
    assert torch.allclose(kept.apply(masked()[0], inputs)(**inputs).detach(), wanted, atol=1e-3)


EDITED = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.relu(self.layer(x))

def workload():
    torch.manual_seed(0)
    return Net().eval(), [torch.ones(4, 8)]
"""


def test_an_edited_model_starts_a_study_beside_the_old_one_and_says_so(tmp_path: Path) -> None:
    work, out = tmp_path / "work.py", tmp_path / "out"
    work.write_text(EDITED)

    def names(result: fettle.Result) -> list[str]:
        return [note for note in result.notes if "beside it" in note]

    run = partial(fettle.tune, str(work), techniques=FEW | {"precision": ["fp32"]}, budget_s=600, output=out)
    assert names(run()) == []
    work.write_text(EDITED.replace("relu", "sigmoid"))
    again = run()
    assert len(names(again)) == 1
    assert "not those of the study 'work'" in again.notes[0]
    events: list[fettle.Event] = []
    same = run(on_progress=events.append)  # the edited one goes on
    assert names(same) == names(again)
    assert not any(event.trial for event in events)
    with pytest.raises(fettle.UsageError, match="another workload"):
        run(study="work")
    work.write_text("# a comment\n" + EDITED)
    assert names(run()) == []  # the edit was undone: the old study goes on


def test_names_of_studies(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'study.db'}"
    assert Study.open("net", url, "weights", "here", structure="code").name == "net"
    beside = Study.open("net", url, "weights", "here", structure="edited", beside=True).name
    assert beside.startswith("net-")
    assert Study.open("net", url, "weights", "here", structure="edited", beside=True).name == beside
    assert Study.open("net", url, "others", "here", structure="code", beside=True).name not in ("net", beside)
    assert Study.open("net", url, "weights", "here", structure="code", beside=True).name == "net"
    assert Study.open("net", url, "weights", "there", structure="other Python").name == "net"
    for edited in (("others", "code"), ("weights", "edited")):
        with pytest.raises(fettle.UsageError, match="of another workload"):
            Study.open("net", url, edited[0], "here", structure=edited[1])


def test_a_storage_that_does_not_answer_any_more_is_one_line(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("fettle.study.LOCKED_S", 0.0)
    study = Study.open("net", f"sqlite:///{tmp_path / 'study.db'}", "weights", "here")
    with sqlite3.connect(tmp_path / "study.db") as file:
        file.execute("DROP TABLE study_user_attributes")
    with pytest.raises(fettle.UsageError, match=r"the study 'net' cannot be read or written: .*no such table"):
        study.set_note("goal", "latency")


def test_bench_takes_a_live_model_and_texts(tmp_path: Path) -> None:
    model, inputs = masked()
    found = fettle.bench(model, "grad=inference_mode", inputs, max_rounds=4, settle=False)
    assert [str(trial.recipe) for trial in found.trials] == ["baseline", "grad=inference_mode"]
    assert not found.failed
    workload = fettle.Workload(model, inputs, call=lambda model, **rest: model(**rest))
    recipe = tmp_path / "recipe.toml"
    fettle.Recipe({"grad": "inference_mode"}).save(recipe)
    found = fettle.bench(workload, [recipe, fettle.Recipe({"precision": "bf16"})], max_rounds=4, settle=False)
    assert [trial.status for trial in found.trials[1:]] == ["measured", "measured"]


def test_a_level_that_the_model_has_already_is_the_workload_as_given() -> None:
    model, inputs = masked()
    found = fettle.bench(model.eval(), "mode=eval", inputs, max_rounds=4, settle=False)
    assert [str(trial.recipe) for trial in found.trials] == ["baseline", "baseline"]
    assert not found.failed


def test_ctrl_c_ends_a_comparison_with_what_it_has() -> None:
    model, inputs = masked()
    sent: list[str] = []

    def interrupt(event: fettle.Event) -> None:
        if event.doing.startswith("round 2") and not sent:
            sent.append(event.doing)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    found = fettle.bench(model, "grad=inference_mode", inputs, on_progress=interrupt)
    assert found.interrupted
    assert signal.getsignal(signal.SIGINT) is before
    assert [trial.status for trial in found.trials] == ["measured", "measured"]
    assert max(one.round for one in found.trials[1].slices) <= 3
    assert comparison_json(found)["interrupted"]


def test_a_training_loop_is_found_out_raced_checked_and_applied(tmp_path: Path, training_forks: None) -> None:
    found = fettle.bench(str(TINY), ["zero_grad=zeros"], max_rounds=4, settle=False)
    assert not found.failed, found.trials[1].reason
    assert len(found.trials[1].accuracy.losses) > 3
    recipe = tmp_path / "recipe.toml"
    evidence = {"goal": "memory", "under_load": True}
    workload = {"fingerprint": found.fingerprint}
    fettle.RecipeFile(levels={"zero_grad": "zeros"}, workload=workload, evidence=evidence).save(recipe)
    checked = fettle.check(str(TINY), recipe)
    assert not checked.failed
    assert (checked.goal, checked.under_load) == ("memory", True)
    with pytest.raises(fettle.UsageError, match="for another workload"):
        fettle.check(f"{TINY}:wide", recipe)
    losses = fettle.apply(_tiny(), recipe)
    assert float(next(losses)) > 0
    assert torch.isfinite(next(losses))


def _tiny() -> fettle.TrainingWorkload:
    names: dict = {"__name__": "tiny"}
    exec(compile(TINY.read_text(), str(TINY), "exec"), names)
    made = names["workload"]()
    return made if isinstance(made, fettle.TrainingWorkload) else fettle.TrainingWorkload(**made)


def test_the_mode_stands_above_what_is_found_out(tmp_path: Path) -> None:
    with pytest.raises(fettle.UsageError, match="is for training"):
        fettle.tune(str(TINY), mode="inference", techniques=FEW, output=tmp_path)
    with pytest.raises(fettle.UsageError, match="is not for `mode='inference'`"):
        fettle.bench(_tiny(), "baseline", mode="inference")


def test_budget_0_is_no_limit_in_python_too() -> None:
    from fettle.tuning._arguments import check_options

    check_options(fettle.Options(budget_s=0))
    check_options(replace(fettle.Options(), budget_s=None))
    assert Settings(budget_s=0).budget_s is None
