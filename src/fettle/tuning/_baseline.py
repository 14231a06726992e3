"""What the slices of the workload as given say of it, before minutes are spent on others and when all is done."""

from __future__ import annotations

from fettle.measure import Trial, fetching
from fettle.recipe import Recipe
from fettle.techniques import Facts, keeps_memory

_SWINGS = 1.5
"""Slowest over fastest round from which that is said."""
_UNSEEN = "nobody else was seen: its own threads, the clock, or where the host of a virtual machine puts its cores"


def how_it_swings(baseline: Trial | None) -> str:
    """From what to what its time swings, and why; empty where it does not."""
    times = [one.ms for one in baseline.slices] if baseline is not None else []
    if baseline is None or not times:
        return ""
    fetched = fetching(baseline.slices)
    if fetched and baseline.load.is_quiet:
        return f"the model as given takes {fetched}"
    if max(times) < _SWINGS * min(times):
        return ""
    why = str(baseline.load) if not baseline.load.is_quiet else _UNSEEN
    return f"the model as given took {_ms(min(times))} to {_ms(max(times))} ms a call: {why}"


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def depends_on_memory(baseline: Trial | None, winner: Trial | None, facts: Facts) -> str:
    """Where its time depends on whether freed memory is kept, both times and what ends that; else empty."""
    fetched = fetching(baseline.slices) if baseline is not None else ""
    if not fetched:
        return ""
    ends = Recipe(keeps_memory(facts))
    has_it = winner is not None and any(name in winner.recipe.levels for name in ends.levels)
    return f"The model as given takes {fetched}." + (f" {ends} keeps it." if ends.levels and not has_it else "")
