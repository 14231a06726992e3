"""The table: what is written is read again, and what is no atlas is refused in one line."""

from dataclasses import replace
from pathlib import Path

import msgspec
import polars
import pytest

from fettle.atlas import effects, matching, merged, pairs, read_atlas, rows_of, write_atlas
from fettle.atlas.table import SCHEMA, checked, frame_of, parse
from fettle.errors import UsageError
from fettle.recipe import Recipe
from tests.atlas.made_up import about, atlas, trial


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    rows = atlas(models=2, tried=5)
    broken = replace(trial(Recipe.parse("compile=default"), 0), status="failed", reason="no compiler")
    rows += rows_of(about("other", 1.0), [trial(Recipe(), 0), broken])
    write_atlas(rows, tmp_path / "atlas.parquet")
    assert parse(tmp_path / "atlas.parquet") == rows
    assert rows[-1].speedup is None  # missing, never zero
    assert rows[-1].reason == "no compiler"


def test_a_trial_that_is_made_again_takes_the_place_of_the_earlier_one() -> None:
    rows = atlas(models=2, tried=5)
    again = [msgspec.structs.replace(rows[1], speedup=9.0, high=9.5)]
    found = merged(rows, again)
    assert len(found) == len(rows)
    assert [row.speedup for row in found if row.key == rows[1].key] == [9.0]
    elsewhere = [msgspec.structs.replace(rows[1], machine="there")]
    assert len(merged(rows, elsewhere)) == len(rows) + 1


def test_a_workload_that_did_not_run_has_no_rows() -> None:
    assert rows_of(about("broken", 0.0), [replace(trial(Recipe(), 0), status="failed")]) == []


def _without(path: Path) -> None:
    frame_of(atlas(1, 3)).drop("recipe").write_parquet(path)


def _other_type(path: Path) -> None:
    frame_of(atlas(1, 3)).with_columns(polars.lit("fast").alias("speedup")).write_parquet(path)


def _more(path: Path) -> None:
    frame_of(atlas(1, 3)).with_columns(polars.lit("x").alias("more")).write_parquet(path)


def _damaged(path: Path) -> None:
    frame_of(atlas(1, 3)).write_parquet(path)
    data = bytearray(path.read_bytes())
    data[100:400] = b"\xff" * 300
    path.write_bytes(bytes(data))


def _bomb(path: Path) -> None:
    """A few kilobytes that are gigabytes when they are read."""
    frame = frame_of(atlas(1, 3))
    polars.concat([frame.with_columns(polars.lit("x" * 200_000).alias("reason"))] * 200).write_parquet(path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.write_text("no table"), "is not a Parquet file"),
        (_without, "see its column 'recipe'"),
        (_other_type, "see its column 'speedup'"),
        (_more, "see its column 'more'"),
    ],
)
def test_what_is_no_atlas_is_refused_in_one_line(make, says: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    make(path)
    with pytest.raises(UsageError, match=says) as caught:
        parse(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: None, "No such file"),
        (_bomb, "row 1 is not a trial|cannot be read"),
    ],
)
def test_a_file_from_outside_is_read_by_a_process_with_little_memory(make, says: str, tmp_path: Path) -> None:
    make(tmp_path / "a.parquet")
    with pytest.raises(UsageError, match=says):
        read_atlas(tmp_path / "a.parquet")


def test_a_damaged_file_is_refused_or_read_never_believed(tmp_path: Path) -> None:
    _damaged(tmp_path / "a.parquet")
    with pytest.raises(UsageError):
        parse(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "wrong",
    [
        {"recipe": "rm -rf"}, {"recipe": "x" * 400}, {"speedup": -1.0}, {"speedup": 1e9}, {"speedup": float("inf")},
        {"status": "great"}, {"low": 3.0, "speedup": 2.0, "high": 4.0}, {"matrix": 2.0}, {"quiet": None},
        {"mode": None},
    ],
)  # fmt: skip
def test_every_value_is_checked(wrong: dict) -> None:
    row = msgspec.structs.asdict(atlas(1, 3)[1])
    assert len(checked([row], "it")) == 1
    with pytest.raises(UsageError, match="it: row 1 is not a trial"):
        checked([{**row, **wrong}], "it")


def test_the_columns_are_those_of_a_row() -> None:
    assert list(SCHEMA) == list(msgspec.structs.asdict(atlas(1, 3)[0]))
    assert SCHEMA["speedup"] == polars.Float64
    assert SCHEMA["quiet"] == polars.Boolean


def test_what_helps_and_what_fights_is_told_over_models() -> None:
    rows = atlas(models=8, tried=40)
    found = {effect.name: effect for effect in effects(rows)}
    assert found["matmul=medium"].gain.low < 1 < found["matmul=medium"].gain.high
    assert found["threads=1"].gain.high < 0.7
    assert found["threads=1"].hurt == found["threads=1"].models == 8
    assert found["channels_last=on"].gain.low < 1 < found["channels_last=on"].gain.high  # it depends on the model
    convolutional = {effect.name: effect for effect in effects(matching(rows, family="Conv"))}
    assert convolutional["channels_last=on"].gain.estimate == pytest.approx(1.65, rel=0.05)
    assert convolutional["channels_last=on"].models == 4
    fight = pairs(rows)[0]
    assert fight.name == "compile=default with precision=autocast-bf16"
    assert fight.together.estimate == pytest.approx(0.78, rel=0.05)
    assert fight.together.high < 1


def test_a_question_about_what_is_not_there_says_what_is() -> None:
    with pytest.raises(UsageError, match="no such row with 'graph'; there are convolutional"):
        matching(atlas(2, 3), family="graph")
