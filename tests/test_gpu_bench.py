"""What somebody with a GPU runs, rehearsed without one."""

import inspect
import json
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from fettle.recipe import Recipe
from fettle.techniques import check_names

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "bench" / "gpu.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--results", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_ladders_name_techniques_and_arguments_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("sklearn")
    from bench.gpu import LADDERS
    from bench.stable_diffusion_attention import COMMON, CONFIGURATIONS

    monkeypatch.syspath_prepend(ROOT / "workloads")
    attention = ("workloads/stable_diffusion.py", "", ("steps=10",), (*CONFIGURATIONS.values(), *COMMON.values()))
    for target, given, arguments, rungs in (*LADDERS.values(), attention):
        path, _, factory = target.partition(":")
        takes = inspect.signature(runpy.run_path(str(ROOT / path))[factory or "workload"]).parameters
        words = [word for text in (given, *rungs) for word in text.split()]
        named = [*arguments, *(word[1:] for word in words if word.startswith("@"))]
        assert {name.partition("=")[0] for name in (*named, "device=")} <= {*takes}
        for rung in rungs:
            check_names(Recipe.parse(" ".join(word for word in rung.split() if not word.startswith("@"))))


def attention_study(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict:
    from bench import stable_diffusion_attention as script

    file = folder / "attention.json"
    monkeypatch.setattr(sys, "argv", ["", f"--json={file}", "--model=small", "--memory=4GiB", *arguments])
    script.main()
    return json.loads(file.read_text())


def test_kinds_of_attention_race_in_turn_at_the_pictures_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench import stable_diffusion_attention as script

    asked: list[tuple[str, int]] = []
    drawn: list[str] = []
    sizes = dict(zip(script.CONFIGURATIONS.values(), (900, 600, None, 500, 200), strict=False))  # MiB a picture

    def said_of(folder: Path, recipe: str) -> dict:
        kind = recipe.removesuffix(" grad=inference_mode")
        return {"metric": 1.0, "loaded_bytes": 0} if sizes.get(kind) else {}

    def ask(folder: Path, recipe: str, question: str, answered: bool = True) -> list:
        size = sizes[recipe.removesuffix(" grad=inference_mode")]
        if question == "stop":
            return []
        asked.append((recipe.removesuffix(" grad=inference_mode"), int(question)))
        if (size, question) == (500, "4"):
            return [None, None, "out of memory"]
        return [size * int(question) / 1000, (1000 + size * int(question)) << 20]

    monkeypatch.setattr(script.ladder, "start", lambda *_: None)
    monkeypatch.setattr(script.ladder, "said_of", said_of)
    monkeypatch.setattr(script.ladder, "ask", ask)
    monkeypatch.setattr(script, "write_pictures", lambda made, folder: drawn.extend(one.name for one in made))
    found = attention_study(tmp_path, monkeypatch, "--rounds=3")
    most = {name: row["pictures"] for name, row in found["most"].items()}
    assert [*most.values()][:5] == [3, 5, 0, 6, 15]
    products, math, _, flash, compiled = list(script.CONFIGURATIONS.values())[:5]
    race = [kind for kind, number in asked if number == 2][-12:]
    assert race == 3 * [products, math, flash, compiled]
    assert [*found["pictures"]] == ["1", "2", "4", "8"]
    assert not found["pictures"]["8"].get("SDPA, math")
    lines = found["table"]
    assert lines[2].startswith("| products and a softmax | 0.9, 1.00 (1.00 to 1.00) | 0.9, 1.00 (1.00 to 1.00) | – | –")
    assert "| 0.2, 4.50 (4.50 to 4.50) |" in lines[6]
    assert lines[6].endswith("| 1.0000 | 15 | 3.91 GiB |")
    assert drawn == ["1-at-once", "2-at-once", "4-at-once", "8-at-once"]

    asked.clear()
    assert attention_study(tmp_path, monkeypatch, "--rounds=3") == found
    assert not asked  # all of it is known
    attention_study(tmp_path, monkeypatch, "2", "--rounds=4")
    assert asked == [(kind, 2) for kind in (products, math, flash, compiled)]
    with pytest.raises(SystemExit, match="of another `steps`"):
        attention_study(tmp_path, monkeypatch, "--steps=7")


@pytest.mark.slow
def test_kinds_of_attention_on_a_reduced_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    from bench import stable_diffusion_attention as script

    few = {name: script.CONFIGURATIONS[name] for name in (script.FIRST, "SDPA, memory-efficient", "SDPA, flash")}
    monkeypatch.setattr(script, "CONFIGURATIONS", few)
    monkeypatch.setattr(script, "NUMBERS", [1, 2])
    found = attention_study(tmp_path, monkeypatch, "--rounds=3", "--steps=2")
    assert {name: row["pictures"] for name, row in found["most"].items()} == dict(zip(few, (64, 0, 64), strict=True))
    for rows in found["pictures"].values():
        assert [len(row["seconds"]) for row in rows.values()] == [3, 3]
        assert rows["SDPA, flash"]["metric"] > 0.999
    assert not (tmp_path / "attention.running").exists()
    assert len(list((tmp_path / "attention").glob("*-at-once.png"))) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
@pytest.mark.slow
def test_without_a_device_one_line_says_so(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no CUDA device" in done.stderr


@pytest.mark.slow
def test_a_rehearsal_goes_on_where_it_was_stopped_and_ends_with_one_file(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--budget", "8", "--only", "attention", "digits", "tests-decomposed")
    first = run(tmp_path, *arguments, "--pieces", "1")
    assert first.returncode == 3, first.stdout + first.stderr
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    attention = (folder / "attention.json").read_text()
    again = run(tmp_path, *arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "\nattention ..." not in "\n" + again.stdout  # it is not made again
    assert (folder / "attention.json").read_text() == attention
    (rows,) = (row for row in json.loads(attention).values() if isinstance(row, dict))
    assert max(row["error"] for row in rows.values()) < 1e-5
    assert min(row["median_ms"] for row in rows.values()) > 0
    digits = json.loads((folder / "digits.json").read_text())
    assert digits["fettle"]["status"] == "measured"
    tests = json.loads((folder / "tests-decomposed_attention.json").read_text())
    assert (tests["failed"], tests["skipped"] > 0) == (0, not torch.cuda.is_available())
    (packed,) = tmp_path.glob("gpu-*.zip")
    with zipfile.ZipFile(packed) as file:
        names = {Path(name).name for name in file.namelist()}
    assert names == {"about.json", "attention.json", "digits.json", "tests-decomposed_attention.json"}


@pytest.mark.slow
def test_a_test_that_crashes_ends_none_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xdist")
    from bench import gpu

    (tmp_path / "tests").mkdir()
    marked = "\n\n\n@pytest.mark.gpu\ndef test_"
    text = f"import os\n\nimport pytest{marked}crashes(): os._exit(3){marked}fails(): assert 0{marked}passes(): pass\n"
    (tmp_path / "tests" / "test_made_up.py").write_text(text)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    found = gpu.tests("tests-made_up")
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 0)
    assert found["failure"].startswith("2 of 3 tests failed, exit code 1\n")


@pytest.mark.slow
def test_a_piece_that_takes_too_long_is_ended_and_made_again(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--only", "digits")
    done = run(tmp_path, *arguments, "--limit", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: ended after 1 s" in done.stdout
    assert "digits ..." in run(tmp_path, *arguments, "--limit", "1").stdout
