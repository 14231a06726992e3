"""What a rule says: the cause, its evidence, the most that mending it could bring, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fettle.units import size_text


@dataclass(frozen=True)
class Finding:
    """Something that costs time or memory."""

    rule: str
    """Name of the rule, for `--fail-on` and for machines."""
    says: str
    """The cause in one sentence."""
    bound: float = 0.0
    """Time: the most that mending it could take off, as a share of the wall time of a call or step, 0 to 1."""
    bound_bytes: int = 0
    """Memory: the most that mending it could free at the peak."""
    startup_s: float = 0.0
    """Start-up: the most that mending it could take off, in seconds."""
    where: tuple[str, ...] = ()
    """Modules and source lines, the costliest first; empty where it is the whole program."""
    evidence: tuple[str, ...] = ()
    """What was seen, a line each, the weightiest first."""
    parts: tuple[tuple[str, float], ...] = ()
    """The same as a picture: places, and their shares of the time or memory, 0 to 1, the largest first."""
    levels: Mapping[str, str] = field(default_factory=dict)
    """The techniques that answer it, as levels of a recipe; empty where only the user's own code can be changed."""
    advice: str = ""
    """What to do, one sentence."""
    formula: str = ""
    """How the bound was computed, in words."""
    before: str = ""
    """Code of the kind that has this fault."""
    after: str = ""
    """The same, mended."""
    opportunity: bool = False
    """Nothing is wrong: a technique could make it faster still. `fettle tune` tries those."""
    count: int = 0
    """How often it happens in a call, where that is what `--fail-on` limits."""

    @property
    def speedup(self) -> float:
        """The bound as a speed-up: 1 / (1 - bound)."""
        return 1 / max(1 - self.bound, 1e-9)

    @property
    def most(self) -> str:
        """The bound in words, for people; empty where there is none."""
        if self.bound >= 0.99:
            return "nearly all of the time"
        if self.bound > 0:
            return f"at most {self.bound:.0%} of the time, {self.speedup:.2f}x"
        if self.bound_bytes:
            return f"at most {size_text(self.bound_bytes)}"
        return f"at most {self.startup_s:.1f} s at start-up" if self.startup_s else ""

    @property
    def weight(self) -> tuple[bool, float, float, float]:
        """For sorting: faults before opportunities, then by time, start-up, bytes; larger is worse."""
        return (not self.opportunity, round(self.bound, 3), self.startup_s, float(self.bound_bytes))
