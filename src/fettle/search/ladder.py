"""The ladder: techniques added one at a time in the usual order, and what each brought."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search._evidence import Evidence
from fettle.search._moves import valid, with_required
from fettle.search._space import Session, Space


@dataclass(frozen=True)
class Step:
    """One recipe tried beside the one before it: a rung that was added, or a level that was taken away."""

    label: str
    """What changed, for example ``precision=bf16``; the first is ``as given``."""
    trial: Trial
    kept: bool
    """Whether it is part of what comes next."""


def ladder(space: Space, session: Session, *, first: Sequence[str] = (), start: Recipe | None = None) -> Trial | None:
    """Climb the ladder and return the best of all trials; `steps` has what each rung brought."""
    evidence = Evidence(space, session)
    for _ in _climb(space, evidence, first, start):
        pass
    return evidence.leader()


def steps(space: Space, session: Session, *, first: Sequence[str] = (), start: Recipe | None = None) -> list[Step]:
    """The rungs in the order they were tried. One that fails or does not help is there, with `kept` false."""
    return list(_climb(space, Evidence(space, session), first, start))


def _climb(space: Space, evidence: Evidence, first: Sequence[str], start: Recipe | None) -> Iterator[Step]:
    """A rung is a technique; its levels are raced together and the best that helps is kept."""
    bottom = with_required(space, start or Recipe())
    if not evidence.measure([Recipe(), bottom] if valid(space, bottom) else [Recipe()]):
        return
    yield Step("as given", evidence.trials[Recipe()], True)
    if bottom not in evidence.trials:
        return
    standing = evidence.trials[bottom]
    if bottom != Recipe():
        yield Step(str(bottom), standing, True)
    for name in sorted(space.choices, key=lambda name: name not in first):
        asked = {f"{name}={level}": evidence.moved(standing.recipe, name, level) for level in space.choices[name][1:]}
        rung = {
            label: recipe
            for label, recipe in asked.items()
            if recipe is not None and standing.recipe.levels.items() < recipe.levels.items()  # up only, no exchange
        }
        going_on = evidence.measure(list(rung.values()))
        tried = {label: evidence.trials[recipe] for label, recipe in rung.items() if recipe in evidence.trials}
        best = min(tried, key=lambda label: evidence.score(tried[label]), default="")
        helped = bool(tried) and evidence.beats(tried[best], standing)
        for label, trial in tried.items():
            yield Step(label, trial, helped and label == best)
        standing = tried[best] if helped else standing
        if not going_on:
            return
