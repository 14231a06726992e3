"""The plan of a study: how many combinations, how long, before they are measured."""

from __future__ import annotations

from dataclasses import dataclass

LONG_S = 3600.0
"""A study that takes longer is begun when somebody has agreed to that."""


@dataclass(frozen=True)
class Part:
    """One workload."""

    name: str
    cells: int
    """Combinations; of a ladder or an ablation about how many."""
    known: int
    """How many of them are measured already."""
    seconds: float
    """What the rest is expected to take."""


@dataclass(frozen=True)
class Plan:
    """All workloads of a study."""

    design: str
    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def is_long(self) -> bool:
        """Whether somebody should agree first."""
        return self.seconds > LONG_S

    def __str__(self) -> str:
        cells, known = (sum(getattr(part, name) for part in self.parts) for name in ("cells", "known"))
        many = f"{cells} combinations" + (f" of {len(self.parts)} workloads" if len(self.parts) > 1 else "")
        about = "about " if self.design in ("ladder", "ablation") else ""
        seen = f", {known} of them measured already" if known else ""
        return f"{self.design}: {about}{many}{seen}; the rest takes about {_duration(self.seconds)}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
