"""Ablation: what a recipe loses when one technique is taken away."""

from __future__ import annotations

from collections.abc import Sequence

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search._evidence import Evidence
from fettle.search._moves import valid, with_required
from fettle.search._space import Session, Space
from fettle.search.auto import auto
from fettle.search.ladder import Step


def ablation(space: Space, session: Session, *, first: Sequence[str] = (), start: Recipe | None = None) -> Trial | None:
    """Remove one technique at a time from `start` (default: what `auto` finds); the best of what was tried."""
    if start is None:
        found = auto(space, session, first=first)
        start = found.recipe if found else Recipe()
    evidence = Evidence(space, session)
    _remove_each(space, evidence, start)
    return evidence.leader()


def removals(space: Space, session: Session, recipe: Recipe) -> list[Step]:
    """The recipe, then each variant with one technique as given (and without what needs it). `kept` says that
    the recipe is worse without it, so that it is worth its place."""
    evidence = Evidence(space, session)
    whole, without = _remove_each(space, evidence, recipe)
    if whole not in evidence.trials:
        return []
    steps = [Step(str(whole), evidence.trials[whole], True)]
    for name, smaller in without.items():
        if smaller in evidence.trials:
            worth = evidence.beats(evidence.trials[whole], evidence.trials[smaller])
            steps.append(Step(f"without {name}", evidence.trials[smaller], worth))
    return steps


def _remove_each(space: Space, evidence: Evidence, recipe: Recipe) -> tuple[Recipe, dict[str, Recipe]]:
    """Race the recipe, its variants with one technique less, and the baseline."""
    whole = with_required(space, recipe)
    names = [name for name in space.choices if name in whole.levels]
    asked = {name: evidence.moved(whole, name, space.default(name)) for name in names}
    without = {name: smaller for name, smaller in asked.items() if smaller is not None}
    evidence.measure([Recipe(), *([whole] if valid(space, whole) else []), *without.values()])
    return whole, without
