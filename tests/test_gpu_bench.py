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

    monkeypatch.syspath_prepend(ROOT / "workloads")
    for target, given, arguments, rungs in LADDERS.values():
        path, _, factory = target.partition(":")
        takes = inspect.signature(runpy.run_path(str(ROOT / path))[factory or "workload"]).parameters
        words = [word for text in (given, *rungs) for word in text.split()]
        named = [*arguments, *(word[1:] for word in words if word.startswith("@"))]
        assert {name.partition("=")[0] for name in (*named, "device=")} <= {*takes}
        for rung in rungs:
            check_names(Recipe.parse(" ".join(word for word in rung.split() if not word.startswith("@"))))


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
def test_a_piece_that_takes_too_long_is_ended_and_made_again(tmp_path: Path) -> None:
    arguments = ("--device", "cpu", "--only", "digits")
    done = run(tmp_path, *arguments, "--limit", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: ended after 1 s" in done.stdout
    assert "digits ..." in run(tmp_path, *arguments, "--limit", "1").stdout
