"""What each step brought, kept in a journal, so that a run that was killed goes on where it was."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fettle.journal import Journal
from fettle.measure import Interval, typed


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of the run."""

    name: str
    status: Literal["done", "skipped", "failed"] = "done"
    says: str
    """What it found, one sentence."""
    lines: Sequence[str] = ()
    """What more there is to say."""
    speedup: Interval | None = None
    """What it brought over the workload as given, where that is known."""
    under: str = ""
    """What that was measured under, to stand before it; empty on a quiet machine."""
    passes_on: str = ""
    """What it hands to the steps after it, for people."""
    results: Mapping[str, Any] = field(default_factory=dict)
    """The same as data."""
    files: Sequence[str] = ()
    """What it wrote, relative to the folder."""
    seconds: float = 0.0


def recall(journal: Journal) -> dict[str, Step]:
    """The steps that an earlier run of the same has done, and none has forgotten since."""
    steps = {}
    for name in journal.lines:
        with contextlib.suppress(ValueError):
            steps[name] = msgspec.convert(typed(journal.answer(name, object), Step), Step)
    return {name: step for name, step in steps.items() if step.status == "done"}


def forget(journal: Journal, but: Collection[str]) -> None:
    """Have no later run go by any step `but` these."""
    for name in journal.lines.keys() - but:
        journal.put(name)
