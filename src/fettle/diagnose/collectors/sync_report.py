"""Where the host waited: source lines, with how often and why."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from fettle.diagnose.evidence import Sync, SyncKind


@dataclass(frozen=True)
class SyncReport:
    """Every line that waits, most frequent first."""

    syncs: tuple[Sync, ...]
    calls: int
    wall_s: float
    """Seconds that looking took; the modes make small operators several times slower, so time nothing beside it."""
    source: Literal["modes", "cuda"]


_TORCH, _STANDARD_LIBRARY = (
    f"{Path(place)}/" for place in (Path(torch.__file__).parent, sysconfig.get_paths()["stdlib"])
)
_SITE = tuple(f"{Path(sysconfig.get_paths()[key])}/" for key in ("purelib", "platlib"))
_NOT_USERS = (str(Path(__file__).parent / "sync"), "<frozen", "<string>", _TORCH)


def _is_users(filename: str) -> bool:
    """Not torch, the standard library or what looks. Other installed packages count: the line is in them."""
    return not filename.startswith(_NOT_USERS) and (
        not filename.startswith(_STANDARD_LIBRARY) or filename.startswith(_SITE)
    )


def here(operator: str, kind: SyncKind, reason: str) -> Sync:
    """The current line of the user's code, not counted yet."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < 6:
        if _is_users(frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.f_back
    if not frames:
        return Sync("?", 0, "?", "", operator, kind, reason, 0)
    places = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]
    (file, line), callers = places[0], tuple(f"{file}:{line}" for file, line in places[1:])
    return Sync(file, line, frames[0].f_code.co_name, "", operator, kind, reason, 0, callers)


def counted(syncs: Counter[Sync]) -> tuple[Sync, ...]:
    """With their code and how often they happened, the most frequent first."""
    return tuple(
        replace(sync, code=linecache.getline(sync.file, sync.line).strip(), count=count)
        for sync, count in syncs.most_common()
    )
