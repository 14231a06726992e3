"""A study's page from its storage alone, on a machine that took no part."""

import csv
import json
import math
import platform
import shutil
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace

import msgspec
import optuna
import polars
import pytest
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import IntegrityError, ProgrammingError

from fettle import storage as room
from fettle.errors import UsageError
from fettle.machine import Machine
from fettle.recipe import Recipe
from fettle.storage import hidden, opening, storage_url
from fettle.studies import Settings, stored
from fettle.studies.orders import agree, announce
from fettle.study import Study
from tests.atlas.made_up import trial
from tests.conftest import Run

RECIPES = ("", "precision=bf16", "compile=default", "compile=default precision=bf16")
GAINS = {"precision=bf16": 0.6, "compile=default": 0.2}


def opened(name: str, url: str, place: int = 0) -> Study:
    """A study on one kind of machine."""
    machine = Machine(f"id{place}", f"cpu {place}", 2, 1, (), "linux", "3.13", {"torch": "2.13"})
    study = Study.open(name, url, name, machine.id)
    study.set_note("machine", msgspec.to_builtins(machine))
    return study


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage of a study for workers that three kinds of machines measured, and that of one workload by itself."""
    folder = tmp_path_factory.mktemp("studies")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "net.py").write_text("def workload():\n    ...\n")
        settings = Settings(storage="s.db", name="night", output=folder, arguments={"batch": ["1", "4"]})
        announce(agree(["net.py"], settings), settings)
        url = storage_url("s.db", folder)
        for name in ("night/net-batch1", "night/net-batch4", "alone"):
            for place in range(1 if name == "alone" else 3):
                study = opened(name, url, place)
                random = Random(f"{name} {place}")
                for text in RECIPES:
                    recipe = Recipe.parse(text)
                    gain = sum(value * (1 + 0.1 * place) for level, value in GAINS.items() if level in text)
                    study.add(trial(recipe, gain + random.gauss(0, 0.01)))
    return folder / "s.db"


@pytest.fixture
def storage(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy of it in the folder that is worked in."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(made, "s.db")
    return "s.db"


def test_the_page_is_drawn_with_machine_and_host_of_each_experiment(storage: str, run_fettle: Run, tmp_path: Path):
    said = run_fettle("study", f"--storage={storage}", "--study=night", "--json", "-o", "drawn", "-o", "t.parquet")
    assert said.code == 0, said.err
    data = json.loads(said.out)
    assert data["factors"]["machine"] == ["cpu-0-x2", "cpu-1-x2", "cpu-2-x2"]
    assert data["factors"]["batch"] == ["1", "4"]
    assert data["design"] == "factorial"
    assert len(data["experiments"]) == 2 * 3 * len(RECIPES)
    assert any("24 experiments" in note for note in data["notes"])
    time = next(one for one in data["analyses"] if one["response"] == "ms_per_sample")
    assert "3 machines are pooled by a mixed model" in time["pooling"]
    found = {json.dumps(one["levels"]): one["ratio"] for one in time["effects"]}
    bf16 = found['[["precision", "bf16"]]']
    assert bf16["low"] < math.exp(0.6 * 1.1) < bf16["high"]
    with (tmp_path / "drawn" / "study.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["machine"] for row in rows} == set(data["factors"]["machine"])
    assert {row["host"] for row in rows} == {platform.node()}
    assert polars.read_parquet(tmp_path / "t.parquet").columns == list(rows[0])
    assert "Which machine measured what" in (tmp_path / "drawn" / "study.html").read_text()


@pytest.mark.parametrize(
    "seconds", ["a while", [1], 10**400, math.nan, -1.0], ids=["words", "list", "huge", "nan", "below"]
)
def test_a_time_that_is_none_is_left_out(storage: str, seconds: object):
    study = opened("alone", storage_url(storage, Path()))
    study.set_note("seconds", 5.0)
    study.on("id1").set_note("seconds", seconds)
    assert (study.seconds, study.on("id1").seconds) == (5.0, 0.0)


def test_a_level_that_was_pinned_is_told_from_the_workload_as_given(storage: str, run_fettle: Run, tmp_path: Path):
    (tmp_path / "net.py").write_text("def workload():\n    ...\n")
    settings = Settings(storage=storage, name="pinned", output=tmp_path, techniques={"precision": "bf16"})
    announce(agree(["net.py"], settings), settings)
    study = opened("pinned/net", storage_url(storage, tmp_path))
    for text, ratio in (("", 1.0), ("precision=bf16", 2.0), ("compile=default precision=bf16", 10 / 3)):
        study.add(trial(Recipe.parse(text), math.log(ratio)))
    data = json.loads(run_fettle("study", f"--storage={storage}", "--study=pinned", "--json", "-o", "drawn").out)
    assert data["factors"] == {"precision": ["fp32", "bf16"], "compile": ["off", "default"]}
    time = next(one for one in data["analyses"] if one["response"] == "ms_per_sample")
    (found,) = [one["ratio"] for one in time["effects"] if one["levels"] == [["compile", "default"]]]
    assert found["estimate"] == pytest.approx(5 / 3)


def test_one_workloads_study_is_drawn_by_its_own_name_and_its_machine_is_a_column(storage: str, run_fettle: Run):
    data = json.loads(run_fettle("study", f"--storage={storage}", "--study=alone", "--json", "-o", "drawn").out)
    assert "machine" not in data["factors"]
    assert [row["machine"] for row in data["experiments"]] == ["cpu-0-x2"] * len(RECIPES)
    assert [row["precision"] for row in data["experiments"]] == ["fp32", "bf16", "fp32", "bf16"]


def test_what_is_not_there_is_said_in_one_line_and_nothing_is_made(storage: str, run_fettle: Run, tmp_path: Path):
    said = run_fettle("study", f"--storage={storage}", "--study=other", "-o", "drawn")
    assert (said.code, "there are: 'alone', 'night'" in said.err.replace("\n", " ")) == (2, True), said.err
    assert "there is no study 'other'" in said.err.replace("\n", " ")
    (tmp_path / "empty.db").touch()
    for file, words in (("none.db", "no such storage"), ("empty.db", "is not a storage of studies")):
        said = run_fettle("study", f"--storage={file}", "--study=night", "-o", "drawn")
        assert (said.code, words in said.err.replace("\n", " ")) == (2, True), said.err
    assert not (tmp_path / "none.db").exists()
    assert not (tmp_path / "empty.db").read_bytes()


def test_what_a_storage_calls_an_argument_leads_out_of_no_folder(storage: str, tmp_path: Path):
    """A chart over its values is written under its name."""
    url = storage_url(storage, tmp_path)
    study = optuna.load_study(study_name="night", storage=room.open_storage(url))
    study.set_user_attr(room.ORDERS, {**study.user_attrs[room.ORDERS], "arguments": {"/../../batch": ["1", "4"]}})
    with pytest.raises(UsageError, match=r"varies '/../../batch', which is no argument's name"):
        stored(Settings(storage=storage, name="night", output=tmp_path))


def test_a_study_lies_in_the_folder_that_is_meant_whatever_its_name(tmp_path: Path):
    folder = tmp_path / "what? 50%41 {b} #1 é"
    folder.mkdir()
    url = storage_url(None, folder)
    assert room.open_storage(url).get_all_studies() == []
    room.check_there(url)
    assert (list(tmp_path.iterdir()), list(folder.iterdir())) == ([folder], [folder / "study.db"])


def test_of_two_that_make_a_storage_at_once_the_other_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    makes = room.RDBStorage
    met = [IntegrityError("INSERT", {}, Exception("UNIQUE constraint failed: alembic_version.version_num"))]

    def make(*args, **options):
        if met:
            raise met.pop()
        return makes(*args, **options)

    monkeypatch.setattr(room, "RDBStorage", make)
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    assert room.open_storage(f"sqlite:///{tmp_path / 's.db'}").get_all_studies() == []


def test_what_a_server_refuses_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def denied() -> None:
        raise StorageInternalError("") from ProgrammingError("INSERT", {}, Exception("permission denied for studies"))

    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    with pytest.raises(StorageInternalError):
        room.outlast(denied, room.OUTAGE_S)
    assert now[0] < room.OUTAGE_S / 10


def test_a_storage_is_shown_without_its_password():
    assert hidden("postgresql://fettle:p@s:s@db/studies") == "postgresql://fettle:***@db/studies"
    assert hidden("postgresql://fettle@db/studies") == "postgresql://fettle@db/studies"
    asked = "postgresql:///studies?host=db&{}=secret&sslmode=require"
    for name in ("password", "sslpassword", "PASSWORD"):
        assert hidden(asked.format(name)) == asked.format(name).replace("secret", "***")


@pytest.mark.parametrize(
    ("url", "said"),
    [("postgresql://me:secret@db/studies", r"me:\*\*\*@db/studies needs psycopg: pip install .*postgresql"),
     ("mysql://db/studies", "mysql://db/studies needs psycopg, which is not installed")],
)  # fmt: skip
def test_a_driver_that_is_missing_is_named(url: str, said: str):
    with pytest.raises(UsageError, match=said), opening(url):
        raise ImportError("as Optuna does") from ModuleNotFoundError(name="psycopg")
