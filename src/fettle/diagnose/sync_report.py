"""Where the host waited: source lines, with how often and why."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

Kind = Literal["read", "size", "check", "upload", "wait"]
"""read: a value comes to the host. size: the shape of a result depends on values. check: an operator reads back whether
it went well. upload: the host copies to the device and waits. wait: seen by CUDA's checks, which do not say why."""


@dataclass(frozen=True)
class Sync:
    """One source line that makes the host wait, with how often it did."""

    file: str
    line: int
    function: str
    code: str
    operator: str
    kind: Kind
    reason: str
    count: int
    stack: tuple[str, ...] = ()
    """The callers outside torch, nearest first, as file:line."""

    @property
    def where(self) -> str:
        """file:line, as an editor opens it."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class SyncReport:
    """Every line that waits, most frequent first."""

    syncs: tuple[Sync, ...]
    calls: int
    wall_s: float
    """Seconds that looking took; the modes make small operators several times slower, so time nothing beside it."""
    source: Literal["modes", "cuda"]

    @property
    def per_call(self) -> float:
        """Synchronisations in one call."""
        return sum(sync.count for sync in self.syncs) / self.calls


@dataclass(frozen=True)
class Place:
    """A line of the user's code with the operator that waits there; what is counted."""

    file: str
    line: int
    function: str
    operator: str
    kind: Kind
    reason: str
    stack: tuple[str, ...]


_INSIDE = tuple(
    str(Path(place)) + "/" for place in (Path(torch.__file__).parent, Path(sysconfig.get_paths()["stdlib"]))
)
_SITE = tuple(str(Path(sysconfig.get_paths()[key])) + "/" for key in ("purelib", "platlib"))
_MINE = (str(Path(__file__).parent / "sync"), "<frozen", "<string>")


def _is_users(filename: str) -> bool:
    """Not torch, the standard library or what looks. Other installed packages count: the line is in them."""
    if filename.startswith(_MINE) or filename.startswith(_INSIDE[0]):
        return False
    return not filename.startswith(_INSIDE[1]) or filename.startswith(_SITE)


def here(operator: str, kind: Kind, reason: str) -> Place:
    """The current line of the user's code."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < 6:
        if _is_users(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    if not frames:
        return Place("?", 0, "?", operator, kind, reason, ())
    callers = tuple(f"{caller.f_code.co_filename}:{caller.f_lineno}" for caller in frames[1:])
    code = frames[0].f_code
    return Place(code.co_filename, frames[0].f_lineno, code.co_name, operator, kind, reason, callers)


def counted(places: Counter[Place]) -> tuple[Sync, ...]:
    """The most frequent first."""
    return tuple(
        Sync(
            file=place.file,
            line=place.line,
            function=place.function,
            code=linecache.getline(place.file, place.line).strip(),
            operator=place.operator,
            kind=place.kind,
            reason=place.reason,
            count=count,
            stack=place.stack,
        )
        for place, count in places.most_common()
    )
