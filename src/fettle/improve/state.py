"""What each step brought, kept in a file, so that a run that was killed goes on where it was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from fettle.files import write_text
from fettle.measure import Interval

_LARGEST = 4 << 20


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the run."""

    name: str
    status: Literal["done", "skipped", "failed"] = "done"
    says: str
    """What it found, one sentence."""
    lines: Sequence[str] = ()
    """What more there is to say."""
    speedup: Interval | None = None
    """What it brought over the workload as given; of the input pipeline over the loader as given."""
    passes_on: str = ""
    """What it hands to the steps after it, for people."""
    results: Mapping[str, Any] = msgspec.field(default_factory=dict, name="told")
    """The same as data, `told` in the file."""
    files: Sequence[str] = ()
    """What it wrote, relative to the folder."""
    seconds: float = 0.0


class _Kept(msgspec.Struct):
    made_for: dict[str, Any]
    steps: list[Any]


def recall(path: Path, made_for: Mapping[str, Any]) -> dict[str, Step]:
    """The steps that an earlier run of the same has done; none where there was none, or it was for something else."""
    try:
        if path.stat().st_size > _LARGEST:
            return {}
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
        steps = [_step(data) for data in kept.steps]
    except (OSError, ValueError, RecursionError):
        return {}
    if kept.made_for != msgspec.json.decode(msgspec.json.encode(made_for)):
        return {}
    return {step.name: step for step in steps if step.status == "done"}


def _step(data: Any) -> Step:
    """A step as written; JSON has null for the end of an interval that is not known."""
    match data:
        case {"speedup": {"high": None, **others}}:
            data = {**data, "speedup": {**others, "high": math.inf}}
    return msgspec.convert(data, Step, strict=False)


def keep(path: Path, made_for: Mapping[str, Any], steps: Sequence[Step]) -> None:
    """Write what was done."""
    write_text(path, msgspec.json.encode(_Kept(dict(made_for), list(steps))).decode())
