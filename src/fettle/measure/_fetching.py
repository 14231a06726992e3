"""Memory that calls fetch from the system: what it costs, as the slices of a recipe show it.

What a call frees goes back to the system where it lies at the end of the heap, and is kept for the next call where
anything that is still held lies behind it. Which of the two it is differs between processes, and while one runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fettle.measure._trial import Slice

_FEWEST_PAGES = 64
_LEAST_LOSS = 0.05
_EACH = 2
"""Slices of either kind."""


@dataclass(frozen=True)
class Fetching:
    """What a call takes with much and with little memory to fetch."""

    pages: float
    """A call, in the slices with most."""
    ms: float
    """Median call in these,"""
    kept_ms: float
    """and in those with next to none."""

    def __str__(self) -> str:
        return (
            f"{self.kept_ms:.3g} ms a call where the memory that it frees is kept, {self.ms:.3g} ms where it goes back "
            f"to the system and {self.pages:.0f} pages of it are fetched anew: which of the two is chance"
        )


def fetching(slices: Sequence[Slice]) -> Fetching | None:
    """How calls differ between the slices that fetch most memory and those that fetch next to none; None where they
    do not, by a twentieth of the time at least."""
    known = [(one.pages, one.best_ms) for one in slices if one.pages is not None and one.best_ms]
    most = max((pages for pages, _ in known), default=0.0)
    many = [ms for pages, ms in known if pages > most / 2]
    few = [ms for pages, ms in known if pages <= most / 16]
    if most < _FEWEST_PAGES or min(len(many), len(few)) < _EACH:
        return None
    found = Fetching(most, statistics.median(many), statistics.median(few))
    return found if found.ms > (1 + _LEAST_LOSS) * found.kept_ms else None
