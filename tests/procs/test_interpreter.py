"""Environments by their interpreters: which is meant, and why a worker cannot run there."""

import os
import sys
import venv
from pathlib import Path

import pytest

from fettle.errors import UsageError
from fettle.procs import interpreter
from fettle.procs.interpreter import Interpreter, find_interpreters, look


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing in it."""
    folder = tmp_path_factory.mktemp("environments") / "My Old.torch"
    venv.create(folder, symlinks=True)
    return folder


def _packages(folder: Path) -> Path:
    return next(folder.glob("lib/python*/site-packages"))


def test_an_environment_is_named_by_its_folder_or_by_the_user(bare: Path):
    found = find_interpreters([str(bare), f"Two={bare / 'bin' / 'python'}"])
    assert [(one.name, one.path) for one in found] == [
        ("my-old.torch", str(bare / "bin" / "python")),
        ("two", str(bare / "bin" / "python")),
    ]


def test_a_hidden_folder_is_named_by_the_one_that_holds_it(tmp_path: Path):
    venv.create(tmp_path / "nightly" / ".venv", symlinks=True)
    assert [one.name for one in find_interpreters([str(tmp_path / "nightly" / ".venv")])] == ["nightly"]


def test_what_is_no_environment_is_one_line(bare: Path, tmp_path: Path):
    for words, says in [
        ([str(tmp_path)], "there is no interpreter"),
        (["/nowhere/python"], "there is no interpreter /nowhere/python"),
        (["~nobody-of-that-name/python"], "there is no interpreter"),
        ([f"?={bare}"], "name the environment with letters or digits"),
        ([str(bare), str(bare)], "'my-old.torch' is two environments"),
        ([f"this={bare}"], "'this' is the environment that fettle runs in"),
    ]:
        with pytest.raises(UsageError, match=says):
            find_interpreters(words)


def test_what_is_missing_is_said_by_its_name(bare: Path, tmp_path: Path):
    [found] = find_interpreters([str(bare)])
    seen = look(found, ["msgspec"], tmp_path)
    assert seen.problem == "torch is not installed there"
    assert seen.versions == {"python": "{}.{}.{}".format(*sys.version_info[:3])}
    (_packages(bare) / "torch.py").touch()
    assert look(found, (), tmp_path).problem == "msgspec is not installed there"
    (_packages(bare) / "torch.py").write_text("raise OSError('libtorch.so: no such file')")
    assert look(found, (), tmp_path).problem == ("torch cannot be imported there (OSError: libtorch.so: no such file)")


def test_an_old_python_and_what_is_no_python_at_all(bare: Path, tmp_path: Path):
    [found] = find_interpreters([f"old={bare}"])
    old = _packages(bare) / "old.pth"  # a sitecustomize.py would stand behind that of Debian's Python
    old.write_text("import sys; sys.version_info = (3, 9, 18)")
    seen = look(found, (), tmp_path)
    old.unlink()
    assert seen.problem == "it is Python 3.9, and fettle needs 3.11 or later"
    assert look(Interpreter("no", "/bin/false"), (), tmp_path).problem == "ended with exit code 1"


def test_a_script_that_ends_in_an_interpreter_is_one(bare: Path, tmp_path: Path):
    script = tmp_path / "in-container.sh"
    script.write_text(f'#!/bin/sh\nexec "{bare}/bin/python" "$@"\n')
    script.chmod(0o755)
    [found] = find_interpreters([str(script)])
    assert found.name == "in-container"
    assert look(found, (), tmp_path).problem.startswith("torch ")
    # What fettle passes on is not passed on to a container by its daemon.
    closed = "import os, sys; os.closerange(3, 65536); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    script.write_text(f"#!/bin/sh\nexec '{bare}/bin/python' -c '{closed}' \"$@\"\n")
    assert look(found, (), tmp_path).problem.startswith("fettle cannot reach what runs there")
    script.write_text("exec python\n")
    assert look(found, (), tmp_path).problem == "it cannot be started (Exec format error)"


def test_fettle_alone_comes_along(bare: Path, tmp_path: Path, monkeypatch):
    """Another environment sees our fettle and no package that is installed beside it."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in ("torch", "msgspec", "psutil"):
        (_packages(bare) / f"{name}.py").write_text("")
    [found] = find_interpreters([str(bare)])
    monkeypatch.setattr(interpreter, "WORKER", "fettle.errors")
    seen = look(found, (), tmp_path)
    assert seen.problem == ""
    assert os.listdir(tmp_path) == ["fettle"]
    monkeypatch.setattr(interpreter, "WORKER", "numpy")
    assert look(found, (), tmp_path).problem == "numpy is not installed there"
