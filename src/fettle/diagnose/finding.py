"""What a rule says: the cause, its evidence, the most that mending it could bring, and what to do; and what that
brought beside the bound, in a race of its own or by the trials of a study."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from fettle.measure import Interval, Load, Trial
from fettle.result import ALONE, Advice, keeps
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
    before: str = "y = model(x)"
    """Code of the kind that has this fault: where it shows nowhere else, the call."""
    after: str = ""
    """The same, fixed."""
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


@dataclass(frozen=True)
class Verified:
    """A finding, and what its fix brought."""

    finding: Finding
    recipe: str
    speedup: Interval | None
    """Over `beside`. None where the fix did not run, or broke the answers."""
    problem: str = ""
    beside: str = ""
    """The recipe that the fix was added to; empty for the workload as given."""
    before: Interval = ALONE
    """Speed-up of `beside` itself over the workload as given."""
    is_quiet: bool = True
    """Whether `speedup` was measured on a quiet machine: where not, waiting for a core is taken out of it."""
    load: Load = field(default_factory=Load)
    """What others took on the mean, over all slices of the fix."""
    elapsed_speedup: Interval | None = None
    """The same ratio in elapsed time, from the rounds in which others had the machine too; None where there were none.
    """
    also: float = 0.0
    """Bounds of the other findings that the recipe answers, added up."""

    @property
    def under(self) -> str:
        """What `speedup` is of, to stand before it; empty on a quiet machine."""
        return "" if self.is_quiet else self.load.waiting_taken_out

    @property
    def elapsed(self) -> str:
        """What the ratio was beside the neighbours, to stand behind it; empty where that was not measured."""
        known = self.elapsed_speedup is not None and self.elapsed_speedup.is_known
        return f"; in time elapsed beside that load {self.elapsed_speedup}" if known and not self.is_quiet else ""

    @property
    def saved(self) -> float | None:
        """Share of the call as given that the fix took off."""
        return None if self.speedup is None else (1 - 1 / self.speedup.estimate) / self.before.estimate

    @property
    def bound_kept(self) -> bool | None:
        """Whether the least that was surely saved stays below the bounds of all that the recipe answers; None where
        nothing was measured, or too little to tell."""
        return None if self.speedup is None else keeps(self.finding.bound + self.also, self.speedup, self.before)


def also_answered(item: Finding | Advice, every: Iterable[Finding | Advice]) -> float:
    """Bounds of the others whose levels are among those of this one, added up."""
    return sum(
        other.bound
        for other in every
        if other is not item and other.levels and other.levels.items() <= item.levels.items()
    )


def advice(findings: Iterable[Finding]) -> list[Advice]:
    """What findings advise a study to try, before it has."""
    return [Advice(f.rule, f.says, dict(f.levels), f.bound) for f in findings if f.levels and f.bound > 0]


def with_gains(advised: Iterable[Advice], trials: Iterable[Trial]) -> list[Advice]:
    """The same with what it brought: of two trials that differ by its levels alone, the pair with the fewest others.

    Both were measured against the same baseline, not against each other: the interval is the widest that their own
    allow.
    """
    advised = list(advised)
    measured = {trial.recipe: trial for trial in trials if trial.speedup is not None and trial.status != "failed"}
    answers = []
    for item in advised:
        pairs = [
            (measured[rest], with_it)
            for recipe, with_it in measured.items()
            if item.levels.items() <= recipe.levels.items() and (rest := recipe.without(*item.levels)) in measured
        ]
        if pairs:
            without, with_it = min(pairs, key=lambda pair: len(pair[0].recipe.levels))
            item = replace(
                item,
                brought=ratio(without.speedup, with_it.speedup),
                beside=without.recipe,
                before=without.speedup or ALONE,
                also=also_answered(item, advised),
            )
        answers.append(item)
    return answers


def ratio(before: Interval | None, after: Interval | None) -> Interval | None:
    """What was gained between two speed-ups over the same baseline; its interval is the widest that theirs allow."""
    if before is None or after is None:
        return None
    high = after.high / before.low if before.low > 0 else math.inf  # 0 after a single round: nothing is known of it
    return Interval(after.estimate / before.estimate, after.low / before.high, high)
