"""Bad input to the commands of tuning: one clear line, exit code 2, no traceback, nothing overwritten.

Here is what is told before any worker starts; what a factory or a model does wrong is in ``measure/test_race.py`` and
``tests/test_workload.py``.
"""

import json
from pathlib import Path

import pytest

import fettle
from tests.conftest import Run

GOOD = "format = 1\n[levels]\nprecision = 'bf16'\n"
WORK = "import torch\ndef workload():\n    return torch.nn.Linear(3, 2), torch.randn(4, 3)\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "good.toml").write_text(GOOD)
    (tmp_path / "text.txt").write_text("not a workload")
    (tmp_path / "result.json").write_text("{}")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "study.db").write_text("this is no database, but it is somebody's")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("tune", "Missing argument"),
        ("tune .", "is not a target"),
        ("tune ./text.txt", "is not a Python file"),
        ("tune work.py:", "is not a target"),
        ("tune work.py:two:three", "is not a target"),
        ("tune work.py --budget -5", "is not a duration"),
        ("tune work.py --budget nan", "is not a duration"),
        ("tune work.py --budget 1..5s", "is not a duration"),
        ("tune work.py --trial-timeout 0", "impossible limit"),
        ("tune work.py --max-error nan", "impossible limit"),
        ("tune work.py --max-error zero", "--max-error"),
        ("tune work.py --max-latency 0", "impossible limit"),
        ("tune work.py --max-latency 20", "Write 20ms or 20s"),
        ("tune work.py --max-kl -1", "impossible limit"),
        ("tune work.py --max-memory 0", "impossible limit"),
        ("tune work.py --max-memory lots", "is not a size"),
        ("tune work.py --min-throughput -3", "impossible limit"),
        ("tune work.py --min-agreement nan", "impossible limit"),
        ("tune work.py --max-metric-drop nan", "impossible limit"),
        ("tune work.py --technique precision=,", "write NAME=LEVEL"),
        ("tune work.py --technique =bf16", "write NAME=LEVEL"),
        ("tune work.py --technique threads=0", "no level '0'"),
        ("tune work.py --technique threads=-1", "no level '-1'"),
        ("tune work.py --mode sleeping", "unknown mode"),
        ("tune work.py --nproc 0", "--nproc 0"),
        ("tune work.py --nodes 0", "--nodes 0"),
        ("tune work.py --nodes 2 --listen 127.0.0.1:29400", "for training"),
        ("tune work.py --mode training --nodes 2", "--nodes and --listen go together"),
        ("tune work.py --mode training --listen 127.0.0.1:29400", "--nodes and --listen go together"),
        ("tune work.py --mode training --nodes 2 --listen here", "is not an address"),
        ("tune work.py --mode training --nodes 2 --listen 203.0.113.1:29400", "cannot listen on"),
        ("tune work.py --allow everything", "batch-size"),
        ("tune work.py --output text.txt", "cannot write to the output folder"),
        ("tune work.py --output text.txt/under", "cannot write to the output folder"),
        ("tune work.py --no-such-option", "No such option"),
        ("bench work.py --recipe precision", "is not TECHNIQUE=LEVEL"),
        ("bench work.py --recipe precision=bf17", "no level 'bf17'"),
        ("bench work.py --recipe warp=on", "unknown technique"),
        ("bench work.py --recipe absent.toml", "cannot read the recipe"),
        ("study work.py --design ablation --recipe absent.toml", "cannot read the recipe"),
        ("serve package work.py --recipe precision", "is not TECHNIQUE=LEVEL"),
        ("bench work.py --rounds 1", "3 or more"),
        ("bench work.py --confidence 95", "--confidence"),
        ("bench work.py --confidence nan", "--confidence"),
        ("bench absent.py", "no such file"),
        ("check absent.toml work.py", "cannot read the recipe"),
        ("check full work.py", "cannot read the recipe"),
        ("check good.toml absent.py", "no such file"),
        ("check work.py good.toml", "is not a recipe"),
        ("report absent", "cannot read the result"),
        ("report full", "cannot read the result"),
        ("report .", "no format number"),
        ("report text.txt", "is not JSON"),
        ("techniques absent.py", "no such file"),
        ("techniques --mode sleeping", "unknown mode"),
        ("tun work.py", "No such command"),
        ("bench work.py --max-error 0", "impossible limit"),
        ("bench work.py --mode sleeping", "unknown mode"),
        ("check good.toml work.py --mode sleeping", "unknown mode"),
        ("plan work.py --device tpu", "--device tpu"),
        ("plan work.py --headroom much", "--headroom"),
    ],
)
def test_one_line_and_exit_code_2(folder: Path, arguments: str, words: str, run_fettle: Run) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    said = run_fettle(*arguments.split())
    assert said.code == 2, said.err
    assert words in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert "Traceback" not in said.err
    assert said.out == ""
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[levels]\nprecision = 3", "levels.precision"),
        ("[levels]\n[evidence]\nlimits = 3", "evidence.limits"),
        ("[levels]\n[evidence.limits]\nmax_error = 'small'", "evidence.limits.max_error"),
        ("[levels]\n[machine]\nversions = 'new'", "machine.versions"),
        ("[levels]\n[machine]\ngpus = [1]", "machine.gpus.0"),
        ("[levels]\n[workload]\nfingerprint = 12", "workload.fingerprint"),
        ("levels = []", "levels"),
        ("format = 'one'\n[levels]", "format"),
    ],
)
def test_a_recipe_whose_tables_hold_something_else(folder: Path, text: str, words: str, run_fettle: Run) -> None:
    (folder / "bad.toml").write_text(text)
    said = run_fettle("check", "bad.toml", "work.py")
    assert said.code == 2
    assert f"is not a fettle recipe: {words}" in said.err
    assert len(said.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"trials": 3}, {"goal": "beauty"}, {"surprise": 1}, {"winner": []}, {"format": 2}, {"machine": None},
        {"limits": {"max_error": "small"}},
    ],
)  # fmt: skip
def test_a_result_that_was_tampered_with(folder: Path, change: dict, run_fettle: Run) -> None:
    from fettle.report import to_json
    from tests.report.made_up import resnet

    (folder / "result.json").write_text(json.dumps({**to_json(resnet()), **change}))
    said = run_fettle("report", ".")
    assert said.code == 2
    assert "result.json" in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"techniques": {"precision": []}}, "no level of precision is allowed"),
        ({"techniques": ["precision"]}, "techniques is a mapping"),
        ({"techniques": {"precision": "bf17"}}, "no level 'bf17'"),
        ({"confidence": 95}, "confidence"),
        ({"confidence": "high"}, "`confidence` takes float, not 'high'"),
        ({"budget_s": "60"}, r"`budget_s` takes float \| None, not '60'"),
        ({"exact": "no"}, "`exact` takes bool, not 'no'"),
        ({"first": 3}, r"`first` takes Sequence\[str\], not 3"),
        ({"effort": fettle.Effort(rounds="many")}, "`rounds` takes int, not 'many'"),
        ({"effort": fettle.Effort(rounds=2)}, "`rounds` must be 3 or more"),
        ({"effort": fettle.Effort(slice_s=0)}, r"an impossible Effort\(slice_s=0"),
        ({"options": {"budget_s": 60}}, "options takes fettle.Options"),
        ({"budget_s": -1}, "budget must be above 0"),
        ({"max_error": float("inf")}, "max error must be above 0 and finite"),
        ({"max_eror": 0.1}, "did you mean max_error"),
        ({"inputs": [1]}, "inputs, call and metric belong to a live model"),
        ({"nproc": 0}, "`nproc=0`"),
        ({"trial_timeout_s": float("nan")}, "trial timeout"),
        ({"on_progress": 3}, "on_progress is a function of one fettle.Event, not 3"),
    ],
)
def test_bad_arguments_of_the_function(folder: Path, arguments: dict, words: str) -> None:
    with pytest.raises(fettle.UsageError, match=words) as caught:
        fettle.tune("work.py", output="out", **arguments)
    assert "\n" not in str(caught.value)


def test_a_comparison_with_an_impossible_confidence_is_not_begun(folder: Path) -> None:
    with pytest.raises(fettle.UsageError, match="confidence"):
        fettle.bench("work.py", "baseline", confidence=95)
    with pytest.raises(fettle.UsageError, match="`budget_s` takes"):
        fettle.bench("work.py", "baseline", budget_s="60")


def test_live_objects_that_are_no_model(folder: Path) -> None:
    import torch

    for model, inputs, words in (
        (3, torch.ones(2), "cannot be called"),
        (torch.nn.Linear(2, 2), None, "give sample inputs"),
        (torch.nn.Linear(2, 2), [], "empty"),
        (torch.nn.Linear(2, 2), (), "empty"),
    ):
        with pytest.raises(fettle.UsageError, match=words):
            fettle.tune(model, inputs, output="out")
