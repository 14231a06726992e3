"""Was the advice right? What each fix brought beside the bound: in a race of its own, or by the trials of a study."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fettle.diagnose.finding import Finding
from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.result import ALONE, Advice, Limits, keeps
from fettle.techniques import Facts, conflict, normal
from fettle.workload import Target


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

    @property
    def saved(self) -> float | None:
        """Share of the call as given that the fix took off."""
        return None if self.speedup is None else (1 - 1 / self.speedup.estimate) / self.before.estimate

    @property
    def bound_kept(self) -> bool | None:
        """Whether the least that was surely saved stays below the bound; None where nothing was measured, or
        too little to tell."""
        return None if self.speedup is None else keeps(self.finding.bound, self.speedup, self.before)


def verify(
    target: str | Target,
    found: Sequence[Finding],
    facts: Facts,
    *,
    budget_s: float = 180.0,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Verified]:
    """Race the levels that each finding names, all in one race with the workload as given.

    Where train mode changes the answers, no fix but eval mode can be right: the others are put beside that.
    """
    from fettle.comparing import bench

    first = Recipe({"mode": "eval"} if facts.train_mode_differs else {})
    answers: list[Verified] = []
    able: dict[Recipe, Finding] = {}
    for finding in found:
        recipe = normal(Recipe({**first.levels, **finding.levels}))
        if not finding.levels or finding.bound <= 0 or recipe in able:
            continue
        why_not = conflict(recipe, facts)
        if why_not:
            answers.append(Verified(finding, str(recipe), None, why_not))
        else:
            able[recipe] = finding
    if not able:
        return answers
    tell(f"racing {len(able)} fixes against the workload as given")
    recipes = list(dict.fromkeys([first, *able] if first.levels else able))
    trials = bench(target, recipes, limits=Limits(max_error=None), budget_s=budget_s, max_rounds=20).trials[1:]
    trial_of = dict(zip(recipes, trials, strict=True))
    for recipe, finding in able.items():
        beside = first if recipe != first else Recipe()
        answers.append(_verified(finding, trial_of[recipe], str(beside) if beside.levels else "", trial_of.get(beside)))
    return answers


def _verified(finding: Finding, trial: Trial, beside: str, without: Trial | None) -> Verified:
    recipe = str(trial.recipe)
    for needed in (trial, without):
        if needed is not None and (needed.status == "failed" or needed.speedup is None):
            return Verified(finding, recipe, None, needed.reason, beside)
    if without is None:
        return Verified(finding, recipe, trial.speedup)
    return Verified(finding, recipe, _ratio(without.speedup, trial.speedup), "", beside, without.speedup or ALONE)


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
            brought = _ratio(without.speedup, with_it.speedup)
            item = replace(item, brought=brought, beside=without.recipe, before=without.speedup or ALONE)
        answers.append(item)
    return answers


def _ratio(before: Interval | None, after: Interval | None) -> Interval | None:
    if before is None or after is None:
        return None
    return Interval(after.estimate / before.estimate, after.low / before.high, after.high / before.low)
