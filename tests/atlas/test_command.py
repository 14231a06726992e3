"""`fettle atlas` on studies that were made, and a search that begins with one."""

import json
from pathlib import Path

import msgspec
import pytest

from fettle.atlas import merged, read_atlas, subject, write_atlas
from fettle.errors import UsageError
from fettle.machine import Machine
from fettle.recipe import Recipe
from fettle.storage import storage_url
from fettle.study import Study
from fettle.techniques import Facts
from fettle.tuning import atlas_rows
from tests.atlas.made_up import atlas, gain, trial
from tests.conftest import Run

pytestmark = pytest.mark.usefixtures("forks")
MACHINE = Machine("here", "made up", 2, 1, (), "linux", "3.13", {"torch": "2.13", "openvino": "2026.4"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which a study was made."""
    made(tmp_path, "model")
    return tmp_path


def made(folder: Path, name: str, structure: str = "") -> Study:
    study = Study.open(name, storage_url(None, folder), "f00", MACHINE.id, structure=structure, beside=True)
    facts = Facts(num_conv=3, num_parameters=1000, cpu_flags=("avx512f", "amx_bf16"), samples=4)
    study.set_note("machine", msgspec.to_builtins(MACHINE))
    study.set_note("probe", {"facts": msgspec.to_builtins(facts), "peaks": {"matmul_float32": 1e12},
                             "features": {"convolution": 0.9, "matrix": 0.7, "shapes": "4x8"}})  # fmt: skip
    for recipe in (Recipe(), Recipe.parse("precision=bf16"), Recipe.parse("compile=default precision=bf16")):
        study.add(trial(recipe, gain(recipe, 1.0)))
    return study


def test_a_study_is_added_with_what_its_probe_saw(folder: Path) -> None:
    rows = atlas_rows(storage_url(None, folder))
    assert [row.recipe for row in rows] == ["baseline", "precision=bf16", "compile=default precision=bf16"]
    last = rows[-1]
    assert last.speedup == pytest.approx(2.46, rel=0.01)
    assert (last.family, last.convolution, last.matrix_units, last.vector) == (
        "convolutional",
        0.9,
        "amx_bf16",
        "avx512f",
    )
    assert (last.machine, last.torch, last.versions, last.peak_fp32) == ("here", "2.13", "openvino=2026.4", 1e12)
    assert (last.start_s, last.given_start_s, last.shapes) == (40.0, 4.0, "4x8")


@pytest.mark.parametrize("changed", [{"features": {"of_another_version": 1.0}}, {"facts": {"parts": [1]}}])
def test_a_probe_of_another_version_is_refused_in_one_line(tmp_path: Path, changed: dict[str, object]) -> None:
    study = made(tmp_path, "model")
    study.set_note("probe", {**study.note("probe"), **changed})
    with pytest.raises(UsageError, match="the study 'model' cannot be read"):
        atlas_rows(storage_url(None, tmp_path))


def test_two_versions_of_the_code_are_two_models_and_what_is_under_load_is_none(tmp_path: Path) -> None:
    names = [made(tmp_path, "model", structure).name for structure in ("one", "two")]
    made(tmp_path, "model-under-load", "one").set_note("under load", True)
    rows = atlas_rows(storage_url(None, tmp_path))
    assert list(dict.fromkeys((row.workload, row.fingerprint) for row in rows)) == [
        (names[0], "f00-one"),
        (names[1], "f00-two"),
    ]
    assert len(merged(rows, rows)) == len(rows) == 6


def test_features_that_are_not_known_stay_missing() -> None:
    about = subject("m", "f", Facts(num_linear=2), {}, MACHINE, {})
    assert (about.flops, about.matrix, about.family, about.peak_bf16) == (None, None, "MLP", None)


def test_add_show_and_query(folder: Path, run_fettle: Run) -> None:
    path = folder / "atlas.parquet"
    write_atlas(atlas(models=4, tried=20), path)
    said = run_fettle("atlas", "add", path, folder, "--family=vision", "--json")
    assert json.loads(said.out) == {"added": 3, "rows": len(atlas(4, 20)) + 3, "models": 5}
    assert {row.family for row in read_atlas(path)} == {"vision", "convolutional", "transformer"}
    data = json.loads(run_fettle("atlas", "query", path, "--family", "conv", "--json").out)
    gains = {effect["name"]: effect["gain"]["estimate"] for effect in data["effects"]}
    assert gains["channels_last=on"] > 1.4
    assert gains["threads=1"] < 0.7
    assert {best["workload"] for best in data["best"]} == {"model1", "model3"}
    shown = run_fettle("atlas", "show", path)
    assert shown.code == 0
    assert "vision" in shown.out


def test_machines_have_answers_of_their_own(tmp_path: Path, run_fettle: Run) -> None:
    path = tmp_path / "atlas.parquet"
    here = atlas(models=4, tried=30)
    other = [msgspec.structs.replace(row, machine="there") for row in atlas(models=4, tried=30, sign=-1.0)]
    write_atlas([*here, *other], path)
    data = json.loads(run_fettle("atlas", "query", path, "--json").out)
    gains = {one["machine"]: one["gain"]["estimate"] for one in data["effects"] if one["name"] == "threads=1"}
    assert gains["here"] < 0.7
    assert gains["there"] > 1.4
    assert {(one["machine"], one["device"], one["mode"]) for one in data["pairs"]} == {
        ("here", "cpu", "inference"), ("there", "cpu", "inference")}  # fmt: skip
    words = run_fettle("atlas", "query", path).out
    assert "made up (here), cpu, inference" in words
    assert words.count("what a level brought") == 2
    assert words.count("best recipes tried") == 1


def test_what_another_adds_meanwhile_stays(folder: Path, run_fettle: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    path, theirs = folder / "atlas.parquet", atlas(models=4, tried=20)
    monkeypatch.setattr("fcntl.flock", lambda file, how: write_atlas(theirs, path))  # while this one waits
    assert run_fettle("atlas", "add", path, folder).code == 0
    assert len(read_atlas(path)) == len(theirs) + 3


def test_bad_input_is_one_line(tmp_path: Path, run_fettle: Run) -> None:
    (tmp_path / "a.parquet").write_text("hello")
    for words, says in (
        (["atlas", "show", tmp_path / "a.parquet"], "is not a Parquet file"),
        (["atlas", "add", tmp_path / "b.parquet", tmp_path], "there is no study.db in"),
        (["atlas", "add", tmp_path / "b.parquet", f"sqlite:///{tmp_path}/typo.db"], "no such storage"),
        (["tune", "w.py", "--atlas", tmp_path / "a.parquet"], "is not a Parquet file"),
        (["tune", "w.py", "--design=ladder", "--atlas", tmp_path / "a.parquet"], "--atlas tells the design auto"),
    ):
        said = run_fettle(*words)
        assert (said.code, len(said.err.splitlines())) == (2, 1), said.err
        assert says in said.err
    assert not (tmp_path / "typo.db").exists()


WORK = """
import torch
from torch import nn

def workload():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    return model.eval(), [torch.randn(4, 64) for _ in range(4)]

def other():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(96, 300), nn.ReLU(), nn.Linear(300, 8)).eval(), [torch.randn(4, 96)]
"""
FEW = ["--technique=grad=grad,inference_mode", "--technique=precision=fp32,bf16", "--technique=matmul=highest,medium",
       *(f"--technique={name}={level}" for name, level in {
           "channels_last": "off", "threads": "as-given", "allocator": "default", "attention": "as-is",
           "quantize": "none", "compile": "off", "runtime": "torch",
       }.items())]  # fmt: skip


@pytest.mark.slow
def test_a_study_is_added_and_guides_the_search_of_another_model(tmp_path: Path, run_fettle: Run) -> None:
    (tmp_path / "work.py").write_text(WORK)
    path, first = tmp_path / "atlas.parquet", tmp_path / "first"
    assert run_fettle("study", tmp_path / "work.py", *FEW, "--rounds=3", "-o", first).code == 0
    assert run_fettle("atlas", "add", path, first).code == 0
    rows = read_atlas(path)
    assert len(rows) in (4, 6)  # without bfloat16 units matmul=medium changes nothing, and is left out
    assert all(row.flops and row.matrix is not None and row.parameters for row in rows)
    assert {row.family for row in rows} == {"MLP"}
    said = run_fettle("tune", f"{tmp_path / 'work.py'}:other", *FEW, "--budget=60s", "--atlas", path,
                      "-o", tmp_path / "tuned", "--json")  # fmt: skip
    assert said.code == 0, said.err
    notes = json.loads(said.out)["notes"]
    assert any(note.startswith("The atlas foresaw") for note in notes) or not any("expected" in note for note in notes)
    said = run_fettle("study", f"{tmp_path / 'work.py'}:other", *FEW, "--design=sensitivity", "--rounds=3",
                      "--atlas", path, "-o", tmp_path / "second", "--json")  # fmt: skip
    assert any("The atlas foresaw" in note for note in json.loads(said.out)["notes"])
