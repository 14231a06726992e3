"""Environments as a factor of a study: what is installed in each, how it differs from ours, whether it is the same."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from fettle.errors import UsageError
from fettle.procs.interpreter import Interpreter, look
from fettle.techniques import CATALOGUE, PYTHON, installed
from fettle.tuning import Session

_PACKAGES = {"torch", "numpy", "transformers", *(name for one in CATALOGUE for name in one.packages)}


def environments_of(interpreters: Sequence[Interpreter], folder: Path) -> dict[str, Interpreter]:
    """By name, with what is installed in each."""
    link = folder / "cache" / "source"
    link.mkdir(parents=True, exist_ok=True)
    return {one.name: look(one, _PACKAGES, link) for one in interpreters}


def differences(environments: Iterable[Interpreter]) -> list[str]:
    """What each has that ours has not, for people."""
    lines = []
    ours = {"python": platform.python_version(), **installed(_PACKAGES)}
    for one in environments:
        other = [f"{name} {version}" for name, version in one.versions.items() if version != ours.get(name)]
        other += [f"no {name}" for name in ours if name not in one.versions]
        what = one.problem or ", ".join(other) or "the same versions as here"
        lines.append(f"{PYTHON.name}={one.name} is {one.path}: {what}")
    return lines


def check_same(session: Session) -> None:
    """Raise `UsageError` where the study knows one of the names as another environment: its trials count for it."""
    for name, one in session.environments.items():
        now = {"path": one.path, "versions": dict(one.versions), "problem": one.problem}
        before = session.study.note(f"{PYTHON.name} {name}")
        if before is None:
            session.study.set_note(f"{PYTHON.name} {name}", now)
        elif before != now:
            raise UsageError(
                f"`python={name}`: {one.path} is not what was measured under that name in {session.folder}: give it "
                "another name, NAME=PATH, or choose another `output`"
            )
