"""The table: what is written is read again, and what is no atlas is refused in one line."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import polars
import pytest

from fettle.atlas import effects, matching, merged, never_compared, pairs, read_atlas, rows_of, write_atlas
from fettle.atlas.table import SCHEMA, checked, frame_of, parse
from fettle.errors import UsageError
from fettle.measure import Interval
from fettle.recipe import Recipe
from tests.atlas.made_up import about, atlas, trial

BF16, BOTH = Recipe.parse("precision=bf16"), Recipe.parse("compile=default precision=bf16")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    rows = atlas(models=2, tried=5)
    broken = replace(trial(Recipe.parse("compile=default"), 0), status="failed", reason="no compiler")
    rows += rows_of(about("other", 1.0), [trial(Recipe(), 0), broken])
    write_atlas(rows, tmp_path / "atlas.parquet")
    assert parse(tmp_path / "atlas.parquet") == rows
    assert rows[-1].speedup is None  # missing, never zero
    assert rows[-1].reason == "no compiler"


def test_an_atlas_may_lie_in_a_folder_of_any_name(tmp_path: Path) -> None:
    """Brackets and stars are no patterns there."""
    rows, path = atlas(models=2, tried=5), tmp_path / "runs [1] *" / "atlas.parquet"
    write_atlas(rows, path)
    assert parse(path) == rows


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
        (_without, "it lacks the column 'recipe', as those of earlier versions do"),
        (_other_type, "its column 'speedup' holds String, not Float64"),
        (_more, "a newer one may have written its column 'more'"),
        (lambda path: polars.DataFrame({"x": [1]}).write_parquet(path), "it has none of its columns"),
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


def test_who_reads_one_imports_no_torch() -> None:
    code = "import sys, fettle.atlas, fettle.cli.atlas; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_damaged_file_is_refused_or_read_never_believed(tmp_path: Path) -> None:
    _damaged(tmp_path / "a.parquet")
    with pytest.raises(UsageError):
        parse(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    "wrong",
    [
        {"recipe": "rm -rf"}, {"recipe": "x" * 5000}, {"speedup": -1.0}, {"speedup": 1e9}, {"speedup": float("inf")},
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


def test_what_never_ran_beside_an_equal_recipe_is_named() -> None:
    apart = Recipe.parse("channels_last=on compile=default")
    rows = rows_of(about("model", 1.0), [trial(Recipe(), 0), trial(BF16, 1.0), trial(apart, 0.5)])
    assert [effect.name for effect in effects(rows)] == ["precision=bf16"]
    assert never_compared(rows, effects(rows)) == {"channels_last=on": 1, "compile=default": 1}


def test_models_of_one_name_are_never_set_against_each_other() -> None:
    fast = rows_of(about("model", 1.0), [trial(Recipe(), 0), trial(BF16, 1.0), trial(BOTH, 1.1)])
    slow = rows_of(about("model", 1.0), [trial(Recipe(), 0), trial(BF16, 0.1)])
    slow = [msgspec.structs.replace(row, fingerprint="another model.py") for row in slow]
    gains = {effect.name: effect for effect in effects(fast + slow)}
    assert gains["compile=default"].gain.estimate == pytest.approx(math.exp(0.1))  # not e, over the slow one
    assert gains["precision=bf16"].models == 2
    on_cuda = [msgspec.structs.replace(row, device="cuda") for row in fast]
    assert len(merged(fast, on_cuda)) == 2 * len(fast)


def test_a_row_from_before_code_counted_gives_way_to_the_same_trial_made_again() -> None:
    old = rows_of(about("model", 1.0), [trial(Recipe(), 0), trial(BF16, 1.0)])
    new = [msgspec.structs.replace(row, fingerprint=f"{row.fingerprint}-code") for row in old]
    assert merged(old, new) == new
    other = [msgspec.structs.replace(row, fingerprint=f"{row.fingerprint}-other") for row in old]
    assert len(merged(new, other)) == 4


def test_whatever_a_study_comes_to_can_be_read_again(tmp_path: Path) -> None:
    parts = Recipe({f"precision[image_encoder.layer_{number:02d}]": "bf16" for number in range(10)})
    unsure = replace(trial(BF16, 0.7), speedup=Interval(2.0, 1e-300, math.exp(700)))
    skewed = replace(trial(BOTH, 0.7), speedup=Interval(2.0, 2.1, 2.5))
    rows = rows_of(about("pipeline", 1.0), [trial(Recipe(), 0), trial(parts, 1.0), unsure, skewed])
    write_atlas(rows, tmp_path / "atlas.parquet")
    assert parse(tmp_path / "atlas.parquet") == rows
    assert [(row.low, row.high) for row in rows[2:]] == [(1e-300, 1e30), (2.0, 2.5)]


def test_a_question_about_what_is_not_there_says_what_is() -> None:
    with pytest.raises(UsageError, match="begins with 'graph'; there are convolutional"):
        matching(atlas(2, 3), family="graph")
