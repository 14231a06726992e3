"""The environment that one side of a gate runs in: one that is named, or one built from a revision's lock file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from fettle.errors import UsageError
from fettle.journal import locked
from fettle.procs.interpreter import Interpreter, find_interpreters, look

_PIP_FILE = re.compile(r"(requirements|constraints)[^/]*\.(txt|lock)$|requirements/[^/]+\.txt$")
_TOOLS = {
    "uv.lock": ("uv", "sync", "--frozen", "--inexact"),
    "poetry.lock": ("poetry", "install", "--no-interaction"),
    "pdm.lock": ("pdm", "sync"),
    "Pipfile.lock": ("pipenv", "sync"),
}
"""What installs a tool's lock file into the virtual environment that is active."""
_PROJECT = ("pyproject.toml", "setup.py", "setup.cfg")
"""Where a project says what it asks for."""
_ACTIVE = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "POETRY_ACTIVE",
           "PIPENV_ACTIVE", "PDM_PROJECT_ROOT")  # fmt: skip
"""Variables that say which environment or project is active here."""
_MINUTES = 30
"""Longest installation."""
_UNUSED_S = 30 * 86400.0
"""An environment that nobody has used for so long goes when another is built: each takes some GB."""


def named(path: str, folder: Path) -> Interpreter:
    """The environment of another Python, by its path or that of its folder. Raises `UsageError` where it cannot run
    what is measured here. `folder` is written to."""
    place = path if os.sep in path or Path(path).exists() else shutil.which(path) or path
    try:
        (found,) = find_interpreters([f"other={place}"])
    except UsageError:
        raise UsageError(f"`against_python`: there is no Python at {path}") from None
    return _able(found, folder, f"`against_python`: {path}")


def installed_from(changed: Sequence[str], beside: Sequence[str]) -> list[str]:
    """Of the lock files `beside` each other in a checkout those that its environment is built from: the `changed` ones
    with the main list and all constraints, but not alternatives to these (`requirements-cuda.txt`) or what another tool
    reads, unless nothing else says what to install."""
    usual = [name for name in beside if Path(name).name == "requirements.txt" or "constraints" in name]
    chosen = sorted({*usual, *(name for name in beside if name in changed)})
    return chosen if any("constraints" not in name for name in chosen) else sorted(beside)


def can_build(locks: Sequence[str]) -> bool:
    """Whether an environment can be built from these files."""
    return bool(_tool(locks)) or any(_PIP_FILE.search(name) for name in locks)


def build(place: Path, locks: Sequence[str], folder: Path, say: Callable[[str], None]) -> Interpreter:
    """The environment that the lock files `locks` of the checkout `place` ask for, and what fettle needs beside it. It
    lies below `folder`, by the files' content, and is built once. Raises `UsageError` where it cannot be."""
    files = [*locks, *(_PROJECT if _is_installed_itself(place, locks) else ())]
    content = b"".join(name.encode() + b"\0" + (place / name).read_bytes() for name in files if (place / name).exists())
    home = folder / "environments" / hashlib.sha256(content + sys.version.encode()).hexdigest()[:12]
    done = home / "complete"
    if not done.exists():
        say(f"installing {', '.join(locks[:3])} into {home}")
        home.parent.mkdir(parents=True, exist_ok=True)
        lock = locked(home.with_name(f"{home.name}.lock"), wait=True)
        try:
            if not done.exists():  # no other gate has built it meanwhile
                _let_go(home.parent)
                shutil.rmtree(home, ignore_errors=True)  # what was begun and not finished
                for command in _commands(place, locks, home.resolve()):
                    _run(command, place, home.resolve())
                done.touch()
        finally:
            os.close(lock)
    with contextlib.suppress(OSError):  # it may be another user's
        done.touch()  # it is used now
    (found,) = find_interpreters([f"other={home}"])
    return _able(found, folder, f"the environment of {', '.join(locks[:3])}")


def _let_go(homes: Path) -> None:
    """Delete the environments that nobody uses any more."""
    with contextlib.suppress(OSError):  # there are none yet, or another process was first
        for home in homes.iterdir():
            used = home / "complete" if (home / "complete").exists() else home
            if time.time() - used.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(home, ignore_errors=True)


def _tool(locks: Sequence[str]) -> list[str]:
    """What installs one of these lock files, where it is a tool's and that is at hand; else empty."""
    known = [_TOOLS[name] for name in locks if name in _TOOLS and shutil.which(_TOOLS[name][0])]
    return list(known[0]) if known else []


def _commands(place: Path, locks: Sequence[str], home: Path) -> list[list[str]]:
    """What builds the environment, in the checkout's folder."""
    make = [sys.executable, "-m", "venv", str(home)]
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    needs = _needs()
    if tool := _tool(locks):
        return [make, tool, [*pip, *needs]]
    lists, constraints = _pip_files(place, locks)
    wanted = [["-r", name] for name in lists]
    bounds = [word for name in constraints for word in ("-c", name)]
    if _is_installed_itself(place, locks):
        wanted = [["."]]
    # Where a list has hashes, pip asks for them of everything in its call: a call for each list, and for our needs.
    return [make, *([*pip, *words, *bounds] for words in (*wanted, needs))]


def _pip_files(place: Path, locks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Lists of what to install, and constraints on their versions."""
    files = [name for name in locks if _PIP_FILE.search(name) and (place / name).exists()]
    return [name for name in files if "constraints" not in name], [name for name in files if "constraints" in name]


def _is_installed_itself(place: Path, locks: Sequence[str]) -> bool:
    """Whether the project says what is installed: constraints alone tell no more than in which versions."""
    has_lists = bool(_tool(locks) or _pip_files(place, locks)[0])
    return not has_lists and any((place / name).exists() for name in ("pyproject.toml", "setup.py"))


def _needs() -> list[str]:
    """What fettle itself asks for; it is linked there, in the version that is here."""
    try:
        return [text for text in metadata.requires("torch-fettle") or () if "extra ==" not in text]
    except metadata.PackageNotFoundError:
        raise UsageError(
            "fettle is not installed here, so nothing says what it needs in another environment: name one, "
            "`against_python`, or run both sides in this one, `same_environment`"
        ) from None


def _run(command: Sequence[str], place: Path, home: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in _ACTIVE}
    environment |= {"VIRTUAL_ENV": str(home), "UV_PROJECT_ENVIRONMENT": str(home), "PDM_IGNORE_SAVED_PYTHON": "1",
                    "PATH": f"{home / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=place, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL,
            timeout=60 * _MINUTES, env=environment,
        )  # fmt: skip
        lines = (done.stderr or done.stdout).strip().splitlines()
        problem = "" if done.returncode == 0 else next((line for line in lines if "error" in line.lower()), "it failed")
    except subprocess.TimeoutExpired:
        problem = f"it took longer than {_MINUTES} minutes"
    except OSError as error:
        problem = str(error)
    if problem:
        words = " ".join(Path(word).name if os.sep in word else word for word in command[:4])
        raise UsageError(
            f"the revision's environment cannot be built ({words}: {problem[:300]}): name one, `against_python`, or "
            "run both sides in this one, `same_environment`"
        )


def _able(found: Interpreter, folder: Path, what: str) -> Interpreter:
    source = folder / "cache" / "source"
    source.mkdir(parents=True, exist_ok=True)
    found = look(found, (), source)
    if found.problem:
        raise UsageError(f"{what} cannot run what is measured here: {found.problem}")
    return found
