"""The guided run: its steps one by one with the commands behind them replaced, and once whole."""

import json
import math
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fettle.diagnose import Finding
from fettle.errors import UsageError
from fettle.generate.speed import Generation
from fettle.improve import STEPS, Improvement, Settings, Step, guided, improve, page
from fettle.improve.guided import _line
from fettle.improve.state import recall
from fettle.inputs.kept import content_hash
from fettle.journal import Journal
from fettle.measure import Accuracy, Interval, Load, Trial
from fettle.recipe import Recipe
from fettle.result import Limits
from tests.conftest import Run

WORK = """
import torch
from torch import nn

def workload():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return model.eval(), [torch.randn(4, 64) for _ in range(4)]

def loader():
    return torch.utils.data.DataLoader(torch.arange(400.0).reshape(100, 4), batch_size=4)
"""
FOUND = {
    "measure": Step(name="measure", says="A call takes 3 ms."),
    "diagnose": Step(name="diagnose", says="It casts.", results={"first": ["precision"], "loading": 0.3}),
    "data": Step(name="data", status="skipped", says="no input pipeline was named"),
    "tune": Step(name="tune", says="Twice.", speedup=Interval(2.0, 1.9, 2.1), results={"recipe": "precision=bf16"}),
    "verify": Step(name="verify", says="Holds.", speedup=Interval(1.9, 1.8, 2.0), results={"verified": True}),
    "package": Step(name="package", says="Written.", files=["package"]),
}
HELD = {"recipe": "precision=bf16", "verified": True}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work.py").write_text(WORK)
    return tmp_path / "work.py"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict]]:
    """The steps that ran, with what they were told."""
    seen: list[tuple[str, dict]] = []

    def does(name: str):
        def step(run, told):
            seen.append((name, dict(told)))
            for file in FOUND[name].files:
                (run.folder / file).touch()
            return FOUND[name]

        return step

    monkeypatch.setattr(guided, "_DOES", {name: does(name) for name in STEPS})
    return seen


def test_each_step_is_told_what_those_before_it_found(work: Path, tmp_path: Path, asked) -> None:
    found = improve(str(work), Settings(output=tmp_path / "out"))
    assert [name for name, _ in asked] == list(STEPS)
    told = dict(asked)
    assert told["measure"] == {}
    assert told["tune"] == {"first": ["precision"], "loading": 0.3}
    assert told["package"]["verified"] is True
    assert found.headline == "1.90x [1.80, 2.00] as fast as given, verified in a race of its own."
    steps = [replace(step, speedup=Interval(1.6, 0.9, 2.7)) if step.name == "verify" else step for step in found.steps]
    unsure = "Tuning found 2.00x [1.90, 2.10]; a race of its own, 1.60x [0.90, 2.70], leaves that open."
    assert replace(found, steps=steps).headline == unsure
    assert not found.failed
    text = (tmp_path / "out" / "improve.html").read_text()
    for step in FOUND.values():
        assert step.says in text


def test_a_step_may_be_left_out(work: Path, tmp_path: Path, asked) -> None:
    found = improve(str(work), Settings(output=tmp_path / "out", skip=["diagnose", "verify"]))
    assert [name for name, _ in asked] == ["measure", "data", "tune", "package"]
    assert found.headline.endswith("not verified.")
    with pytest.raises(UsageError, match="`skip=cook`: there are measure, diagnose"):
        improve(str(work), Settings(output=tmp_path / "out", skip=["cook"]))
    with pytest.raises(UsageError, match="grad has no level 'on'"):
        improve(str(work), Settings(output=tmp_path / "out", techniques={"grad": "on"}))
    with pytest.raises(UsageError, match=r"no such file: absent\.py"):
        improve(str(work), Settings(output=tmp_path / "out", data="absent.py:loader"))


def test_it_goes_on_where_it_was_and_anew_where_the_target_was_edited(work: Path, tmp_path: Path, asked) -> None:
    settings = Settings(output=tmp_path / "out")
    improve(str(work), Settings(output=tmp_path / "out", skip=["verify", "package"]))
    asked.clear()
    improve(str(work), settings)
    assert [name for name, _ in asked] == ["data", "verify", "package"]  # nothing was done for data
    asked.clear()
    work.write_text(WORK + "\n# edited\n")
    improve(str(work), settings)
    assert [name for name, _ in asked] == list(STEPS)


def test_an_interrupt_keeps_what_is_done(work: Path, tmp_path: Path, asked, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(run, told):
        raise KeyboardInterrupt

    monkeypatch.setitem(guided._DOES, "tune", interrupted)  # type: ignore[index]
    found = improve(str(work), Settings(output=tmp_path / "out"))
    assert found.interrupted
    assert [step.name for step in found.steps] == ["measure", "diagnose", "data"]
    monkeypatch.setitem(guided._DOES, "tune", lambda run, told: FOUND["tune"])  # type: ignore[index]
    asked.clear()
    assert not improve(str(work), Settings(output=tmp_path / "out")).interrupted
    assert [name for name, _ in asked] == ["data", "verify", "package"]


def test_a_recipe_that_does_not_hold_any_more_has_no_package(work: Path, tmp_path: Path, asked, monkeypatch) -> None:
    improve(str(work), Settings(output=tmp_path / "out", skip=["verify"]))
    monkeypatch.setitem(guided._DOES, "verify", lambda run, told: Step(name="verify", status="failed", says="Slower."))
    asked.clear()
    improve(str(work), Settings(output=tmp_path / "out"))
    assert [name for name, _ in asked] == ["data", "package"]  # which is asked again, not shown as done


def test_what_is_left_out_later_is_not_gone_by(work: Path, tmp_path: Path, asked) -> None:
    improve(str(work), Settings(output=tmp_path / "out"))
    asked.clear()
    found = improve(str(work), Settings(output=tmp_path / "out", skip=["measure"]))
    assert found.steps[0].status == "skipped"
    assert [name for name, _ in asked] == ["data"]  # nobody goes by the time as given
    asked.clear()
    found = improve(str(work), Settings(output=tmp_path / "out", skip=["diagnose"]))
    assert found.steps[1].status == "skipped"
    assert [name for name, _ in asked] == ["measure", "data", "tune", "verify", "package"]
    assert dict(asked)["tune"] == {}


def test_what_a_loader_lets_through_is_only_said(work: Path, tmp_path: Path, asked, monkeypatch) -> None:
    data = Step(name="data", says="It waits.", results={"loop": {"step_s": 0.1}})
    monkeypatch.setitem(guided._DOES, "data", lambda run, told: data)
    improve(str(work), Settings(output=tmp_path / "out"))
    asked.clear()
    improve(str(work), Settings(output=tmp_path / "out", skip=["data"]))
    assert asked == []


def test_an_interrupt_does_not_forget_what_came_later(work: Path, tmp_path: Path, asked, monkeypatch) -> None:
    def interrupted(run, told):
        raise KeyboardInterrupt

    improve(str(work), Settings(output=tmp_path / "out"))
    with monkeypatch.context() as patch:
        patch.setitem(guided._DOES, "data", interrupted)
        assert improve(str(work), Settings(output=tmp_path / "out")).interrupted
    asked.clear()
    improve(str(work), Settings(output=tmp_path / "out"))
    assert [name for name, _ in asked] == ["data"]


def test_other_weights_another_machine_and_a_page_that_is_gone_are_not_taken_for_todays(
    work: Path, tmp_path: Path, asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, built = Settings(output=tmp_path / "out"), {"fingerprint": "first"}
    measured = Step(name="measure", says="3 ms.", results=dict(built))
    monkeypatch.setitem(guided._DOES, "measure", lambda run, told: asked.append(("measure", {})) or measured)
    worker = SimpleNamespace(ask=lambda *request: SimpleNamespace(**built))
    monkeypatch.setattr(guided, "Worker", lambda: nullcontext(worker))

    def again() -> list[str]:
        asked.clear()
        improve(str(work), settings)
        return [name for name, _ in asked]

    assert again() == list(STEPS)
    assert again() == ["data"]
    (tmp_path / "out" / "package").unlink()
    assert again() == ["data", "package"]
    built["fingerprint"] = "another"
    assert again() == list(STEPS)
    built["fingerprint"] = "first"
    monkeypatch.setattr(guided, "this_machine", lambda: SimpleNamespace(id="another", versions={}))
    assert again() == list(STEPS)


@pytest.mark.parametrize(("step", "command", "needs"), [
    ("measure", "bench", {}), ("data", "measure_and_search", {}), ("verify", "check", {"recipe": "precision=bf16"}),
])  # fmt: skip
def test_ctrl_c_in_a_step_ends_the_run_there(step: str, command: str, needs: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(guided, command, lambda *args, **options: SimpleNamespace(interrupted=True))
    run = SimpleNamespace(target="work.py", settings=Settings(data="work.py:loader"), folder=tmp_path, on_progress=None)
    with pytest.raises(KeyboardInterrupt):  # the commands themselves show what they know by then
        guided._DOES[step](run, needs)  # type: ignore[arg-type]


def test_tuning_goes_by_the_limit_on_text(tmp_path: Path, monkeypatch) -> None:
    def tune(target, options, **more):
        raise UsageError(f"max_kl={options.limits.max_kl}")

    monkeypatch.setattr(guided, "tune", tune)
    settings = Settings(limits=Limits(max_kl=0.05))
    run = SimpleNamespace(target="a.py", settings=settings, folder=tmp_path, on_progress=None, command="")
    with pytest.raises(UsageError, match=r"max_kl=0\.05"):
        guided._tune(run, {})  # type: ignore[arg-type]


def test_a_folder_of_the_users_is_not_taken_for_a_package(work: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "mine.py").write_text("x = 1")
    monkeypatch.setattr(guided, "load_recipe", lambda path: SimpleNamespace(recipe=Recipe(), evidence={}))
    run = SimpleNamespace(target=str(work), settings=Settings(), folder=tmp_path, quietly=nullcontext, say=print)
    with pytest.raises(UsageError, match="package exists already"):
        guided._package(run, HELD)  # type: ignore[arg-type]
    assert (tmp_path / "package" / "mine.py").is_file()


def test_a_training_loop_has_no_package_and_nothing_failed(work: Path, tmp_path: Path, monkeypatch) -> None:
    work.write_text("def workload():\n    return {'model': 1, 'optimizer': 2, 'loss': 3, 'data': []}\n")
    monkeypatch.setattr(guided, "load_recipe", lambda path: SimpleNamespace(recipe=Recipe(), evidence={}))
    run = SimpleNamespace(target=str(work), settings=Settings(), folder=tmp_path, quietly=nullcontext, say=print)
    step = guided._package(run, HELD)  # type: ignore[arg-type]
    assert (step.status, step.says) == ("skipped", "a training loop is not served")


def test_a_pipeline_has_no_package_and_nothing_failed(work: Path, tmp_path: Path, monkeypatch) -> None:
    work.write_text(
        WORK
        + """
def pipeline():
    model, inputs = workload()
    return {"model": model, "inputs": inputs, "call": lambda model, x: model[2](model[0](x)), "parts": ["0", "2"]}
"""
    )
    monkeypatch.setattr(guided, "load_recipe", lambda path: SimpleNamespace(recipe=Recipe(), evidence={}))
    target = f"{work}:pipeline"
    run = SimpleNamespace(target=target, settings=Settings(), folder=tmp_path, quietly=nullcontext, say=print)
    step = guided._package(run, HELD)  # type: ignore[arg-type]
    assert step.status == "skipped"
    assert "a pipeline is not served as one model" in step.says


@pytest.mark.parametrize("edited", ["net.py", "parts/blocks.py", "loading.py"])
def test_an_edit_of_what_the_target_imports_begins_anew(edited: str, work: Path, tmp_path: Path, asked) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("")
    (tmp_path / "parts" / "blocks.py").write_text("import net\n")
    (tmp_path / "net.py").write_text("import torch\nfrom parts import blocks\n")
    (tmp_path / "loading.py").write_text("def loader(): ...\n")
    work.write_text("from net import Net as workload\n")
    settings = Settings(output=tmp_path / "out", data=f"{tmp_path / 'loading.py'}:loader")
    improve(str(work), settings)
    asked.clear()
    improve(str(work), settings)
    assert [name for name, _ in asked] == ["data"]  # which came to nothing
    asked.clear()
    (tmp_path / edited).write_text((tmp_path / edited).read_text() + "# edited\n")
    improve(str(work), settings)
    assert [name for name, _ in asked] == list(STEPS)


def test_a_package_in_the_src_of_a_project_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "made_up_net"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    (package / "parts.py").write_text("WIDTH = 3\n")
    (package / "model.py").write_text("import torch\nfrom made_up_net.parts import WIDTH\n")
    (tmp_path / "train.py").write_text("from made_up_net.model import workload\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "src"))
    targets = "made_up_net.model:workload", f"{tmp_path / 'train.py'}:workload"
    before = [content_hash(target) for target in targets]
    (package / "parts.py").write_text("WIDTH = 4\n")
    after = [content_hash(target) for target in targets]
    assert all(before)
    assert not set(before) & set(after)
    assert content_hash("torch.nn:Linear") == ""  # what is installed has a version


def test_what_cannot_be_done_says_why_and_the_others_go_on(work: Path, tmp_path: Path, asked, monkeypatch) -> None:
    def fails(run, told):
        raise UsageError("it cannot be watched")

    monkeypatch.setitem(guided._DOES, "diagnose", fails)
    found = improve(str(work), Settings(output=tmp_path / "out"))
    assert found.failed
    assert [(step.name, step.says) for step in found.steps if step.status == "failed"] == [
        ("diagnose", "it cannot be watched")
    ]
    assert [name for name, _ in asked][-1] == "package"
    monkeypatch.setitem(guided._DOES, "measure", fails)
    with pytest.raises(UsageError, match="it cannot be watched"):  # nothing runs where the workload does not
        improve(str(work), Settings(output=tmp_path / "other"))


@pytest.mark.parametrize(("changed", "says"), [
    ({"verify": Step(name="verify", status="failed", says="It is slower.")},
     "Tuning found 2.00x [1.90, 2.10], which a race of its own did not confirm: It is slower."),
    ({"verify": Step(name="verify", says="It is.", under="On a busy machine: ", speedup=Interval(2.0, 1.9, 2.1))},
     "On a busy machine: 2.00x [1.90, 2.10] as fast as given, verified in a race of its own."),
    ({"tune": Step(name="tune", says="As given is best."), "verify": Step(name="verify", status="skipped", says="")},
     "As given is best."),
    ({"tune": Step(name="tune", status="failed", says="No budget.")}, "Nothing was tuned."),
])  # fmt: skip
def test_the_headline_claims_what_the_steps_found(changed: dict, says: str, tmp_path: Path) -> None:
    assert Improvement("work.py", list({**FOUND, **changed}.values()), tmp_path).headline == says
    assert Improvement("work.py", [], tmp_path, interrupted=True).headline == "Interrupted before anything was tuned."


@pytest.mark.parametrize(("changed", "says"), [
    ({"accuracy": Accuracy(error=0.01)}, "is 2.00x [1.90, 2.10] as fast as given, with a relative error of 0.01."),
    ({"accuracy": Accuracy(error=0.3, losses=(1.0, 0.9))},
     "with losses 0.3 times as far off as two seeds are from each other."),
    ({"accuracy": Accuracy(error=0.02, perplexity=3.0)}, "with a mean KL divergence of 0.02."),
    ({}, "is 2.00x [1.90, 2.10] as fast as given, with answers that were not compared."),
    ({"speedup": Interval(690.0, 75.0, 6347.0)}, "could not be compared with the workload as given"),
    ({"is_quiet": False, "load": Load(others=0.5), "elapsed_speedup": Interval(3.0, 2.9, 3.1)},
     "On a busy machine (others took 50% of the cores), with the time spent waiting for a core taken out: precision="),
    ({"is_quiet": False, "elapsed_speedup": Interval(3.0, 2.9, 3.1)}, "beside that load it was 3.00x [2.90, 3.10]."),
    ({"speedup": None}, "could not be compared with the workload as given, as others had too much of the machine"),
])  # fmt: skip
def test_verifying_says_what_it_knows(changed: dict, says: str, tmp_path: Path, monkeypatch) -> None:
    trial = Trial(Recipe({"precision": "bf16"}), "measured", **{"speedup": Interval(2.0, 1.9, 2.1), **changed})
    is_known = trial.speedup is not None and trial.speedup.is_known
    word = "faster" if is_known else "cannot tell"
    found = SimpleNamespace(interrupted=False, trials=[None, trial], verdicts=["same", word])
    monkeypatch.setattr(guided, "check", lambda *args, **options: found)
    run = SimpleNamespace(target="work.py", settings=Settings(), folder=tmp_path, on_progress=None)
    step = guided._verify(run, HELD)  # type: ignore[arg-type]
    assert says in step.says
    assert (step.status, step.passes_on, step.results) == (
        ("done", "to package: it holds", {"verified": True}) if is_known else ("failed", "", {"verified": False})
    )


@pytest.mark.parametrize(("changed", "says"), [
    ({}, "A call takes 10 ms, 400 samples a second."),
    ({"load": Load(others=0.5)},
     "On a busy machine (others took 50% of the cores): A call takes 10 ms, 400 samples a second."),
    ({"accuracy": Accuracy(losses=(1.0,))}, "A step takes 10 ms, 400 samples a second."),
    ({"generation": Generation()}, "A text takes 10 ms, 400 tokens a second."),
])  # fmt: skip
def test_measuring_speaks_of_what_the_workload_does(changed: dict, says: str, monkeypatch) -> None:
    given = Trial(Recipe(), "measured", time_ms=10.0, samples=4, **changed)
    found = SimpleNamespace(interrupted=False, trials=[given], fingerprint="f")
    monkeypatch.setattr(guided, "bench", lambda *args, **options: found)
    run = SimpleNamespace(target="work.py", settings=Settings(), on_progress=None)
    assert guided._measure(run, {}).says == says  # type: ignore[arg-type]


def test_techniques_that_findings_name_come_first_by_what_they_could_save() -> None:
    found = [SimpleNamespace(levels=levels, bound=bound) for levels, bound in (
        ({"precision": "bf16"}, 0.2), ({}, 0.9), ({"compile": "default", "freeze": "on"}, 0.5),
        ({"precision": "x"}, 0.6),
    )]  # fmt: skip
    assert guided._first(found, {}) == ["precision", "compile", "freeze"]  # type: ignore[arg-type]
    given = {"compile": ["off"], "precision": ["fp32", "bf16"]}
    assert guided._first(found, given) == ["precision", "freeze"]  # type: ignore[arg-type]


def test_without_a_pipeline_it_is_said_how_much_waits_for_one() -> None:
    run = SimpleNamespace(settings=Settings())
    assert "30% in a DataLoader" in guided._data(run, {"loading": 0.3}).says  # type: ignore[arg-type]
    assert guided._data(run, {}).says == "no input pipeline was named"  # type: ignore[arg-type]
    assert guided._verify(run, {}).status == "skipped"  # type: ignore[arg-type]


@pytest.mark.parametrize(("workers", "fetch_s", "most"), [
    (0, 0.01, "1.50x"),  # 10 ms of waiting and 10 ms of a step, which takes 3.3 ms then
    (2, 0.02, "2.00x"),  # a batch each 10 ms, however fast the step is
    (8, 0.02, ""),
])  # fmt: skip
def test_what_a_loader_lets_through_of_a_faster_step_is_said(
    workers: int, fetch_s: float, most: str, tmp_path: Path, monkeypatch
) -> None:
    setting = SimpleNamespace(num_workers=workers)
    best = SimpleNamespace(setting=setting, rate=50.0, waiting=0.5, slices={0: None},
                           last=SimpleNamespace(fetch_mean_s=fetch_s))  # fmt: skip
    loop = guided._loop(SimpleNamespace(best=best))  # type: ignore[arg-type]
    won = Trial(Recipe({"precision": "bf16"}), "measured", speedup=Interval(3.0, 2.9, 3.1))
    found = SimpleNamespace(interrupted=False, winner=won, baseline=None, recipe=won.recipe, notes=[])
    monkeypatch.setattr(guided, "tune", lambda *args, **options: found)
    monkeypatch.setattr(guided, "save", lambda *args: [])
    monkeypatch.setattr(guided, "verdict", lambda result: "Three times.")
    run = SimpleNamespace(target="work.py", settings=Settings(), folder=tmp_path, on_progress=None, command="")
    lines = guided._tune(run, {"loop": loop}).lines  # type: ignore[arg-type]
    assert [f"gains {most} of it at most" in line for line in lines] == ([True] if most else [])


def test_without_a_recipe_of_this_run_nothing_is_packaged(work: Path, tmp_path: Path) -> None:
    run = SimpleNamespace(target=str(work), settings=Settings(skip=["verify"]), folder=tmp_path)
    assert guided._package(run, {}).status == "skipped"  # type: ignore[arg-type]


def test_a_page_is_drawn_of_any_text(tmp_path: Path) -> None:
    text = page("<b>fast</b>", "x<script>", [Step(name="tune", status="failed", says="<i>", lines=["a & b"])])
    assert "x<script>" not in text
    assert "&lt;b&gt;fast&lt;/b&gt;" in text
    assert "a &amp; b" in text


def test_what_cannot_be_read_is_done_anew(tmp_path: Path) -> None:
    path = tmp_path / "improve.jsonl"

    def known(made_for: str = "x") -> dict[str, Step]:
        with closing(Journal(path, "fettle improve", {"target": made_for})) as journal:
            return recall(journal)

    unknown = Step(name="data", says="More.", lines=[], files=[], speedup=Interval(1.5, 0.0, math.inf))
    assert known() == {}
    with closing(Journal(path, "fettle improve", {"target": "x"})) as journal:
        for name, step in FOUND.items():
            journal.put(name, step)
        assert set(recall(journal)) == set(STEPS) - {"data"}
        journal.put("data", unknown)
    assert known()["tune"].speedup == Interval(2.0, 1.9, 2.1)
    assert known()["data"] == unknown
    for answer in (b"", b"null", b"[1]", b'{"name": 3}', b'{"a": "\xff"}', b"[" * 100_000):
        path.write_bytes(path.read_bytes() + b'{"key": "tune", "answer": ' + answer + b"}\n")
        assert known().keys() - {"tune"} == set(STEPS) - {"tune"}
    assert known("y") == {}


def test_a_run_of_an_earlier_version_begins_anew(work: Path, tmp_path: Path, asked) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "improve.json").write_text('{"made_for": {}, "steps": [{"name": "tune", "says": "Twice."}]}')
    improve(str(work), Settings(output=tmp_path / "out"))
    assert [name for name, _ in asked] == list(STEPS)


@pytest.mark.slow
def test_a_whole_run(work: Path, tmp_path: Path, run_fettle: Run) -> None:
    few = [f"--technique={name}={level}" for name, level in {
        "grad": "grad,inference_mode", "precision": "fp32,bf16", "matmul": "highest", "channels_last": "off",
        "threads": "as-given", "allocator": "default", "attention": "as-is", "quantize": "none", "compile": "off",
        "runtime": "torch",
    }.items()]  # fmt: skip
    words = ["improve", work, f"--data={work}:loader", *few, "--budget=60s", "--max-error=0.1", "-o", tmp_path / "out",
             "--json"]  # fmt: skip
    said = run_fettle(*words)
    assert said.code in (0, 1), said.err
    steps = {step["name"]: step for step in json.loads(said.out)["steps"]}
    assert list(steps) == list(STEPS)
    assert all(steps[name]["status"] == "done" for name in ("measure", "diagnose", "data", "tune")), steps
    assert {"improve.html", "diagnosis.html", "data.html", "tune"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    again = run_fettle(*words)
    kept = {step["name"]: step for step in json.loads(again.out)["steps"]}
    assert all(kept[name] == steps[name] for name in ("measure", "diagnose", "data", "tune"))  # not made again


def test_a_finding_that_the_verdict_has_told_is_not_told_again() -> None:
    finding = Finding(rule="precision", says="It runs in float32.", advice="run it in bfloat16")
    assert _line(finding, "It runs in float32. Mending it could save much.") == "Run it in bfloat16"
    assert _line(finding, "Nothing stands out.") == "It runs in float32. Run it in bfloat16"
    assert _line(replace(finding, advice="fused=True"), "Nothing stands out.").endswith(" fused=True")
