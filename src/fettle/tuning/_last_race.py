"""The last race: the best measured again in fresh processes. Only what it says is announced."""

from __future__ import annotations

import math
from dataclasses import replace

from fettle.measure import Trial
from fettle.recipe import Recipe
from fettle.search import Space
from fettle.techniques import CATALOGUE
from fettle.tuning.session import Session

REPLICATES = 3
"""Processes for each recipe of the last race, where starting them is cheap."""


def last_race(session: Session, space: Space) -> list[Trial]:
    """Measure the best again in fresh processes, beside the baseline and the cheap rungs of the leader's ladder.

    What was best in many races is likely to have been lucky in its own.
    """
    leader = session.best()
    if leader is None or not leader.recipe.levels:
        return []
    kept = session.study.note("last race")
    if kept:
        trials = [session.judged(Trial.from_json(item)) for item in kept]
        if any(trial.recipe == leader.recipe for trial in trials):
            return trials
    rungs = [recipe for recipe in climb(leader.recipe) if recipe != leader.recipe and not space.conflict(recipe)]
    cheap = [recipe for recipe in rungs if space.cost(recipe) == 1 and recipe not in session.known]
    best = [trial.recipe for trial in finalists(session, leader)]
    session.tell(f"last race: the best {len(best)} in fresh processes")
    session.baseline.close()
    budget_s = session.budget.seconds
    share_s = 60.0 if budget_s is None else min(60.0, 0.1 * budget_s)
    rules = replace(session.rules, deadline=math.inf, precision=0.05, replicates=REPLICATES, replicate_s=share_s)
    trials = session.run([Recipe(), *best, *cheap], rules)
    session.keep([trial for trial in trials if trial.recipe in cheap])
    dear = [recipe for recipe in rungs if recipe not in session.known]
    if dear and session.budget.affords(_cost_s(session) * len(dear)):
        session.race_unknown(dear)
    session.study.set_note("last race", [trial.to_json() for trial in trials])
    return trials


def finalists(session: Session, leader: Trial) -> list[Trial]:
    """The leader and up to two others that came within 5% of it."""
    near = session.score(leader) + math.log(1.05)
    able = [trial for trial in session.known.values() if trial.recipe.levels and session.score(trial) <= near]
    return sorted(able, key=session.rank)[:3]


def climb(recipe: Recipe) -> list[Recipe]:
    """The recipe's levels added one at a time, in the order of the rungs, then of the catalogue."""
    steps, levels = [], dict[str, str]()
    for technique in sorted(CATALOGUE, key=lambda technique: (technique.rung, CATALOGUE.index(technique))):
        if technique.name in recipe.levels:
            levels[technique.name] = recipe.levels[technique.name]
            steps.append(Recipe(levels))
    return steps


def _cost_s(session: Session) -> float:
    """What a recipe that takes long to start has typically cost."""
    dear = sorted(trial.seconds for trial in session.known.values() if trial.startup.total_s > 5) or [30.0]
    return dear[len(dear) // 2]
