"""Was the advice right? The fixes that a diagnosis names, raced against the workload as given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fettle.comparing import bench
from fettle.diagnose import Finding, Verified
from fettle.diagnose.finding import also_answered, ratio
from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.result import ALONE, Limits
from fettle.techniques import Facts, canonical, conflict, for_parts, preconditions
from fettle.workload import Target


def verify(
    target: str | Target,
    findings: Sequence[Finding],
    facts: Facts,
    *,
    max_metric_drop: float | None = None,
    budget_s: float = 180.0,
    on_progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Verified], bool]:
    """Race the levels that each finding names, all in one race with the workload as given; whether it was interrupted.

    What several findings name is raced once, and answers them all. One by which the workload's metric falls more than
    `max_metric_drop` is no fix; where nothing but the metric can judge, that must be given.
    Where train mode changes the answers, no fix but eval mode can be right: the others are put beside that.
    """
    first = preconditions(facts)
    answers: list[Verified] = []
    able: dict[Recipe, list[Finding]] = {}
    for finding in findings:
        recipe = canonical(Recipe({**first.levels, **for_parts(finding.levels, facts)}))
        if not finding.levels or finding.bound <= 0:
            continue
        why_not = conflict(recipe, facts)
        if why_not:
            answers.append(Verified(finding, str(recipe), None, why_not))
        else:
            able.setdefault(recipe, []).append(finding)
    if not able:
        return answers, False
    on_progress(f"racing {len(able)} fixes against the workload as given")
    recipes = list(dict.fromkeys([first, *able] if first.levels else able))
    limits = Limits(max_error=None, max_metric_drop=max_metric_drop)
    found = bench(target, recipes, limits=limits, budget_s=budget_s, max_rounds=20)
    # The last ones are left out where there was no time for them.
    trial_of = dict(zip(recipes, found.trials[1:], strict=False))
    for recipe, named in able.items():
        beside = first if recipe != first else Recipe()
        trial = trial_of.get(recipe, Trial(recipe, "failed", "there was no time for it"))
        without, name = trial_of.get(beside), str(beside) if beside.levels else ""
        every = [finding for findings in able.values() for finding in findings]
        answers += [
            replace(_verified(finding, trial, name, without), also=also_answered(finding, every)) for finding in named
        ]
    return answers, found.interrupted


def _verified(finding: Finding, trial: Trial, beside: str, without: Trial | None) -> Verified:
    recipe = str(trial.recipe)
    for needed in (trial, without):
        if needed is not None and not needed.ok:
            return Verified(finding, recipe, None, needed.reason, beside)
    before, elapsed = (ALONE, ALONE) if without is None else (without.speedup, without.elapsed_speedup)
    gain = ratio(before, trial.speedup)
    problem = "" if gain is not None and gain.is_known else "too few rounds: give a longer --budget"
    is_quiet = trial.is_quiet and (without is None or without.is_quiet)
    return Verified(finding, recipe, None if problem else gain, problem, beside, before or ALONE, is_quiet, trial.load,
                    ratio(elapsed, trial.elapsed_speedup))  # fmt: skip
