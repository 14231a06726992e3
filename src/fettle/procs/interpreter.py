"""The interpreter of another environment: which one is meant, what is installed there, and why a worker cannot run."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from fettle.errors import UsageError
from fettle.procs.process import Process, how_it_ended

OURS = "this"
"""What the environment that fettle runs in is called."""
WORKER = "fettle.measure._worker"
"""The module that a worker runs."""
_LOOK_S = 120.0
_PLAIN = ("bin", "venv", ".venv", "env", ".env", "")
"""Folders whose names tell nobody which environment it is."""
# Runs by whatever interpreter there is, so it must be read by an old one too.
_LOOK = """
import json, os, sys
found = {"versions": {"python": "%d.%d.%d" % sys.version_info[:3]}, "problem": ""}
if sys.version_info < (3, 11):
    found["problem"] = "it is Python %d.%d, and fettle needs 3.11 or later" % sys.version_info[:2]
else:
    from importlib import import_module, metadata
    for name in sys.argv[4:]:
        try:
            found["versions"][name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    try:
        if os.fstat(int(sys.argv[2])).st_ino != int(sys.argv[3]):
            raise OSError
    except OSError:
        found["problem"] = "fettle cannot reach what runs there: it is no child of its own, as with docker exec"
    try:
        for name in () if found["problem"] else ("torch", "msgspec", "psutil", sys.argv[1]):
            import_module(name)
    except ModuleNotFoundError as error:
        found["problem"] = "%s is not installed there" % (error.name or error)
    except Exception as error:
        found["problem"] = "%s cannot be imported there (%s: %s)" % (name, type(error).__name__, error)
print()
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Interpreter:
    """An environment by its interpreter."""

    name: str
    """What people call it."""
    path: str
    """The executable, its links not followed: a virtual environment is known by its own."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """With these it imports fettle from where ours lies, and nothing else of ours."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of python itself, and of packages as far as they are installed."""
    problem: str = ""
    """Why a worker cannot run there, one phrase; empty where it can."""


def find_interpreters(texts: Collection[str]) -> list[Interpreter]:
    """The environments that are meant by ``PATH`` or ``NAME=PATH``, a path being an interpreter, a script that ends in
    one, or the folder of a virtual environment. Raises `UsageError` where there is none, and for two of one name."""
    by_name: dict[str, Interpreter] = {}
    for text in texts:
        named, equals, rest = text.partition("=")
        path = Path(os.path.abspath(os.path.expanduser(rest if equals else text)))  # `Path` raises for nobody's home
        if path.is_dir():
            path /= "bin/python"
        if not os.access(path, os.X_OK) or path.is_dir():
            raise UsageError(f"`python={text}`: there is no interpreter {path}")
        name = _name(named) if equals else _name_of(path)
        if name == OURS:
            raise UsageError(f"`python={text}`: {OURS!r} is the environment that fettle runs in: choose another name")
        if name in by_name:
            raise UsageError(f"`python={text}`: {name!r} is two environments: name them, `python='NAME={path}'`")
        by_name[name] = Interpreter(name, str(path))
    return list(by_name.values())


def look(interpreter: Interpreter, packages: Collection[str], folder: Path) -> Interpreter:
    """The same with what is installed there of these `packages` (distributions) and why a worker cannot run, if it
    cannot. `folder` is written to: fettle is linked from there."""
    path = os.pathsep.join(filter(None, [str(_linked(folder)), os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": path}
    with tempfile.TemporaryFile() as reached:
        own = reached.fileno()
        words = ["-c", _LOOK, WORKER, str(own), str(os.fstat(own).st_ino), *sorted(packages)]
        try:
            with Process(
                words, python=interpreter.path, environment={**os.environ, **variables}, pass_fds=[own]
            ) as process:
                code = process.wait(_LOOK_S)
                lines = process.printed(1 << 16).splitlines()
        except OSError as error:  # a script without its first line, a program for another processor
            return replace(interpreter, problem=f"it cannot be started ({error.strerror})")
    try:
        answer = json.loads(lines[-1])
        versions, problem = answer["versions"], answer["problem"]
    except (IndexError, ValueError, KeyError, TypeError):
        why = "it does not answer" if code is None else how_it_ended(code)
        versions, problem = {}, f"{why}: {lines[-1].strip()}" if lines else why
    return Interpreter(interpreter.name, interpreter.path, variables, versions, problem)


def _linked(folder: Path) -> Path:
    """A folder that holds fettle alone: where ours is installed, all else of our environment lies beside it."""
    link = folder.resolve() / "fettle"
    source = Path(__file__).resolve().parent.parent
    if not link.exists() or link.resolve() != source:
        link.unlink(missing_ok=True)
        link.symlink_to(source, target_is_directory=True)
    return link.parent


def _name_of(path: Path) -> str:
    if not path.name.startswith("py"):  # a script that ends in an interpreter
        return _name(path.stem)
    names = [part for part in reversed(path.parts[:-1]) if part not in _PLAIN]
    return _name(names[0] if names else path.name)


def _name(text: str) -> str:
    plain = re.sub(r"[^a-z0-9_.+-]+", "-", text.lower()).strip("-._+")
    if not plain:
        raise UsageError(f"`python={text}`: name the environment with letters or digits")
    return plain[:48]
