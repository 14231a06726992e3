"""The environment of one side of a gate: how it is named, and how one is built from a lock file."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fettle.errors import UsageError
from fettle.gate import environments

MODEL = """
import time

try:
    from dependency import SECONDS
except ImportError:
    SECONDS = 0.001

def wait(x):
    time.sleep(SECONDS)
    return x

def workload():
    import torch
    return wait, [torch.ones(2, 2)]
"""


def _wheel(folder: Path, name: str, version: str, **files: str) -> str:
    """A wheel of a few text files; its name."""
    about = f"{name}-{version}.dist-info"
    files = {f"{key}": text for key, text in files.items()} | {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for place, text in {**files, f"{about}/RECORD": "".join(f"{place},,\n" for place in files)}.items():
            archive.writestr(place, text)
    return path.name


def test_an_environment_must_be_able_to_measure(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no Python at nowhere"):
        environments.named("nowhere", tmp_path)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no such library' \nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(UsageError, match=r"python cannot run what is measured here: .*no such library"):
        environments.named(str(python), tmp_path)
    assert environments.named(sys.executable, tmp_path).path == sys.executable


def test_what_an_environment_is_built_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "_needs", lambda: ["psutil"])
    home = tmp_path / "home"
    for name in ("requirements.txt", "constraints.txt", "pyproject.toml"):
        (tmp_path / name).touch()

    def calls(*locks: str) -> list[list[str]]:
        made = environments._commands(tmp_path, locks, home)
        assert made[0][1:] == ["-m", "venv", str(home)]
        return [command[6:] for command in made[1:]]

    assert calls("requirements.txt") == [["-r", "requirements.txt"], ["psutil"]]
    assert calls("requirements.txt", "gone/requirements.txt") == [["-r", "requirements.txt"], ["psutil"]]
    assert calls("constraints.txt") == [[".", "-c", "constraints.txt"], ["psutil", "-c", "constraints.txt"]]
    (tmp_path / "requirements-dev.txt").touch()
    bounds = ["-c", "constraints.txt"]
    assert calls("constraints.txt", "requirements-dev.txt", "requirements.txt") == [
        ["-r", "requirements-dev.txt", *bounds], ["-r", "requirements.txt", *bounds], ["psutil", *bounds],
    ]  # fmt: skip
    assert environments.can_build(["requirements-dev.txt"])
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name == "poetry" else None)
    assert environments.can_build(["poetry.lock", "pyproject.toml"])
    assert not environments.can_build(["uv.lock", "pixi.lock", "environment.yml"])
    made = environments._commands(tmp_path, ["uv.lock", "poetry.lock", "requirements.txt"], home)
    assert made[1:] == [["poetry", "install", "--no-interaction"], [*made[2][:6], "psutil"]]


def test_what_a_project_asks_for_within_constraints_is_installed_anew_where_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(command: list[str], place: Path, home: Path) -> None:
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(environments, "_commands", lambda *_: [["make"]])
    monkeypatch.setattr(environments, "_run", made)
    monkeypatch.setattr(environments, "_able", lambda found, *_: found)
    (tmp_path / "constraints.txt").touch()
    built = []
    for text in ("torch==2.9", "torch==2.10", "torch==2.9"):
        (tmp_path / "pyproject.toml").write_text(text)
        built.append(environments.build(tmp_path, ["constraints.txt"], tmp_path / "out", lambda text: None).path)
    assert built[0] == built[2] != built[1]
    unused = Path(built[1]).parents[1]
    os.utime(unused / "complete", (0, 0))
    (tmp_path / "pyproject.toml").write_text("torch==2.11")
    environments.build(tmp_path, ["constraints.txt"], tmp_path / "out", lambda text: None)
    assert not unused.exists()
    assert Path(built[0]).exists()


def test_of_two_gates_that_need_an_environment_at_once_one_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, made = threading.Event(), []

    def run(command: list[str], place: Path, home: Path) -> None:
        made.append(home)
        begun.set()
        for _ in range(50):  # for as long as the other would take to begin as well
            if len(made) > 1:
                break
            time.sleep(0.01)
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "python").symlink_to(sys.executable)

    def build() -> str:
        return environments.build(tmp_path, ["requirements.txt"], tmp_path / "out", lambda text: None).path

    monkeypatch.setattr(environments, "_commands", lambda *_: [["make"]])
    monkeypatch.setattr(environments, "_run", run)
    monkeypatch.setattr(environments, "_able", lambda found, *_: found)
    (tmp_path / "requirements.txt").touch()
    with ThreadPoolExecutor(2) as gates:
        first = gates.submit(build)
        assert begun.wait(60)
        assert gates.submit(build).result(60) == first.result(60)
    assert len(made) == 1


PROJECT = """
[project]
name = "project"
version = "0"
requires-python = ">=3.11"
dependencies = [{dependency}]
[tool.poetry]
package-mode = false
[tool.pdm]
distribution = false
[tool.uv]
package = false
"""
MAKES_LOCK = {
    "uv": ("uv.lock", ["uv", "lock", "--offline"]),
    "poetry": ("poetry.lock", ["poetry", "lock"]),
    "pdm": ("pdm.lock", ["pdm", "lock"]),
    "pipenv": ("Pipfile.lock", ["pipenv", "lock"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("tool", MAKES_LOCK)
def test_what_the_tools_lock_is_installed_where_it_belongs(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    wheel = tmp_path / _wheel(tmp_path, "dependency", "1.0", **{"dependency.py": "SECONDS = 0.02\n"})
    here = "\n".join(path for path in sys.path if path and Path(path).is_dir())
    ours = _wheel(tmp_path, "ours", "1.0", **{"ours.pth": here + "\n"})
    monkeypatch.setattr(environments, "_needs", lambda: [str(tmp_path / ours)])
    place = tmp_path / "checkout"
    place.mkdir()
    if tool == "pipenv":
        (place / "Pipfile").write_text(f'[packages]\ndependency = {{file = "{wheel.as_uri()}"}}\n')
    else:
        (place / "pyproject.toml").write_text(PROJECT.format(dependency=f'"dependency @ {wheel.as_uri()}"'))
    lock, command = MAKES_LOCK[tool]
    env = {**os.environ, "PIPENV_VENV_IN_PROJECT": "1"}
    subprocess.run(command, cwd=place, check=True, capture_output=True, env=env)
    built = environments.build(place, [lock], tmp_path / "out", lambda text: None)
    said = subprocess.run([built.path, "-c", "import dependency; print(dependency.__file__)"], check=True, text=True,
                          capture_output=True, cwd=tmp_path)  # fmt: skip
    assert said.stdout.startswith(str(tmp_path / "out"))


def test_an_environment_that_cannot_be_built_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = [sys.executable, "-c", "import sys; sys.exit('begin\\nERROR: No matching distribution found for x')"]
    monkeypatch.setattr(environments, "_commands", lambda *_: [fails])
    (tmp_path / "requirements.txt").touch()
    with pytest.raises(UsageError, match=r"cannot be built .*No matching distribution found for x\): name one"):
        environments.build(tmp_path, ["requirements.txt"], tmp_path / "out", lambda text: None)


@pytest.mark.slow
def test_a_revision_with_another_lock_file_runs_in_an_environment_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_fettle
) -> None:
    """The dependency makes the model wait 20 ms in place of 1 ms; it is not installed here."""
    monkeypatch.chdir(tmp_path)

    def git(*arguments: str) -> None:
        names = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *names, *arguments], check=True, capture_output=True)

    wheel = _wheel(tmp_path, "dependency", "1.0", **{"dependency.py": "SECONDS = 0.02\n"})
    here = "\n".join(path for path in sys.path if path and Path(path).is_dir())
    ours = _wheel(tmp_path, "ours", "1.0", **{"ours.pth": here + "\n"})  # torch and the rest are not installed again
    monkeypatch.setattr(environments, "_needs", lambda: [str(tmp_path / ours)])
    (tmp_path / "model.py").write_text(MODEL)
    git("init", "-q")
    for text in (f"./{wheel}\n", "# nothing any more\n"):
        (tmp_path / "requirements.txt").write_text(text)
        git("add", "model.py", "requirements.txt", wheel), git("commit", "-qm", text)
    for _ in range(2):  # the second finds the environment that the first built
        said = run_fettle("bench", "model.py", "--against", "HEAD~1", "--processes", "2", "--json")
        assert said.code == 0, said.err
        found = json.loads(said.out)
        assert found["judged"][0]["change"]["high"] < 0.3
        assert any("runs in the environment that it asks for" in note for note in found["notes"])
    said = run_fettle("bench", "model.py", "--against", "HEAD~1", "--processes", "2", "--json", "--same-environment")
    found = json.loads(said.out)
    assert found["judged"][0]["change"]["high"] > 0.5
    assert any("all run in this environment" in note for note in found["notes"])
