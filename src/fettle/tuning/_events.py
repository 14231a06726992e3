"""What a study reports while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fettle.measure import Trial


@dataclass(frozen=True)
class Event:
    """What a study reports while it runs, for a progress display."""

    doing: str
    """What runs now, for people."""
    trial: Trial | None = None
    """A trial that has just become known."""
    best: Trial | None = None
    elapsed_s: float = 0.0
    budget_s: float | None = None
    note: str = ""
    """A line that stays on the screen."""


OnProgress = Callable[[Event], None]
