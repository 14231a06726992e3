"""Was the advice right? What each fix brought beside the bound: in a race of its own, or by the trials of a study."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fettle.diagnose.finding import Finding
from fettle.errors import UsageError
from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.result import Advice, Limits


@dataclass(frozen=True)
class Verified:
    """A finding, and what its fix brought."""

    finding: Finding
    recipe: str
    speedup: Interval | None
    """None where the fix did not run."""
    problem: str = ""

    @property
    def saved(self) -> float | None:
        """Share of the time that the fix took off."""
        return None if self.speedup is None else 1 - 1 / self.speedup.estimate

    @property
    def bound_kept(self) -> bool | None:
        """Whether the least that was surely gained stays below the bound; None where nothing was measured."""
        return None if self.speedup is None else self.speedup.low <= self.finding.speedup * 1.02


def verify(
    target: str, found: Sequence[Finding], *, budget_s: float = 180.0, tell: Callable[[str], None] = lambda text: None
) -> list[Verified]:
    """Race the levels that each finding names, all in one race with the workload as given."""
    from fettle.comparing import bench

    fixes = {finding.rule: Recipe(dict(finding.levels)) for finding in found if finding.levels and finding.bound > 0}
    answers: list[Verified] = []
    able: list[tuple[Finding, Recipe]] = []
    for finding in found:
        recipe = fixes.get(finding.rule)
        if recipe is None or any(recipe == other for _, other in able):
            continue
        able.append((finding, recipe))
    while able:
        tell(f"racing {len(able)} fixes against the workload as given")
        try:
            compared = bench(
                target, [recipe for _, recipe in able], limits=Limits(max_error=None), budget_s=budget_s, max_rounds=20
            )
        except UsageError as error:  # one recipe cannot work here: say so, and go on with the others
            culprit = next((pair for pair in able if str(pair[1]) in str(error)), None)
            if culprit is None:
                raise
            answers.append(Verified(culprit[0], str(culprit[1]), None, str(error)))
            able.remove(culprit)
            continue
        for (finding, recipe), trial in zip(able, compared.trials[1:], strict=False):
            failed = trial.status == "failed" or trial.speedup is None
            answers.append(
                Verified(finding, str(recipe), None if failed else trial.speedup, trial.reason if failed else "")
            )
        break
    return answers


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
            item = replace(item, brought=_ratio(without.speedup, with_it.speedup), beside=without.recipe)
        answers.append(item)
    return answers


def _ratio(before: Interval | None, after: Interval | None) -> Interval | None:
    if before is None or after is None:
        return None
    return Interval(after.estimate / before.estimate, after.low / before.high, after.high / before.low)
