"""What findings advise, and what that brought beside the bound: in a race of its own, or by the trials of a study."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from fettle.diagnose.finding import Finding
from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.result import ALONE, Advice, keeps


@dataclass(frozen=True)
class Verified:
    """A finding, and what its fix brought."""

    finding: Finding
    recipe: str
    speedup: Interval | None
    """Over `beside`. None where the fix did not run."""
    problem: str = ""
    beside: str = ""
    """The recipe that the fix was added to; empty for the workload as given."""
    before: Interval = ALONE
    """Speed-up of `beside` itself over the workload as given."""
    load: str = ""
    """What others took of the machine meanwhile; empty on a quiet one. Waiting for a core is taken out of `speedup`."""

    @property
    def saved(self) -> float | None:
        """Share of the call as given that the fix took off."""
        return None if self.speedup is None else (1 - 1 / self.speedup.estimate) / self.before.estimate

    @property
    def bound_kept(self) -> bool | None:
        """Whether the least that was surely saved stays below the bound; None where nothing was measured, or
        too little to tell."""
        return None if self.speedup is None else keeps(self.finding.bound, self.speedup, self.before)


def advice(found: Iterable[Finding]) -> list[Advice]:
    """What findings advise a study to try, before it has."""
    return [Advice(f.rule, f.says, dict(f.levels), f.bound) for f in found if f.levels and f.bound > 0]


def brought(advised: Iterable[Advice], trials: Iterable[Trial]) -> list[Advice]:
    """The same with what it brought: of two trials that differ by its levels alone, the pair with the fewest others.

    Both were measured against the same baseline, not against each other: the interval is the widest that their own
    allow.
    """
    measured = {trial.recipe: trial for trial in trials if trial.speedup is not None and trial.status != "failed"}
    answers = []
    for item in advised:
        pairs = []
        for recipe, with_it in measured.items():
            if any(recipe.levels.get(name) != level for name, level in item.levels.items()):
                continue
            rest = Recipe({name: level for name, level in recipe.levels.items() if name not in item.levels})
            if rest != recipe and rest in measured:
                pairs.append((len(rest.levels), measured[rest], with_it))
        if pairs:
            _, without, with_it = min(pairs, key=lambda pair: pair[0])
            brought = ratio(without.speedup, with_it.speedup)
            item = replace(item, brought=brought, beside=without.recipe, before=without.speedup or ALONE)
        answers.append(item)
    return answers


def ratio(before: Interval | None, after: Interval | None) -> Interval | None:
    """What was gained between two speed-ups over the same baseline; its interval is the widest that theirs allow."""
    if before is None or after is None:
        return None
    return Interval(after.estimate / before.estimate, after.low / before.high, after.high / before.low)
