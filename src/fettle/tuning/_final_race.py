"""The final race: the best measured again in fresh processes. Only what it says is announced."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fettle.errors import UsageError
from fettle.measure import Stop, Trial, is_vague, verdict
from fettle.recipe import Recipe
from fettle.result import TIMES
from fettle.search import Space
from fettle.techniques import find
from fettle.tuning._budget import MOST_REPLICATES, REPLICATES_S, plan_final_race, race_s
from fettle.tuning.session import Session
from fettle.tuning.standings import SIMPLER


@dataclass(frozen=True)
class FinalRace:
    """What the final race found."""

    trials: Sequence[Trial] = ()
    unconfirmed: str = ""
    """Why the leader was not measured again, one sentence; empty where it was, or where nothing had to be."""
    interrupted: bool = False
    """More rounds were to come."""


def final_race(session: Session, space: Space) -> FinalRace:
    """Measure the best again in fresh processes, beside the baseline and the cheap rungs of the leader's ladder.

    What was best in many races is likely to have been lucky in its own. It is all inside the budget: what does not fit
    is left out, the confirmation of the leader last of all.
    """
    leader, baseline = session.standings.best(), session.standings.known.get(Recipe())
    if leader is None or baseline is None or not leader.recipe.levels:
        return FinalRace()
    kept = [session.standings.judged(trial) for trial in session.standings.raced(session.study.note("final race"))]
    earlier = FinalRace()
    if any(trial.recipe == leader.recipe and trial.status != "failed" for trial in kept):
        earlier = FinalRace(session.standings.confirmed(kept))
        if _is_settled(session, earlier, leader.recipe):
            return earlier
    rungs = [recipe for recipe in climb(leader.recipe) if recipe != leader.recipe and not space.conflict(recipe)]
    cheap = [recipe for recipe in rungs if space.cost(recipe) == 1 and recipe not in session.standings.known]
    best = session.standings.finalists()
    budget, replicates = session.budget, session.options.effort.replicates
    plan = plan_final_race(budget.left_s + 0.5 * budget.grace_s, baseline, best, len(cheap), replicates)
    if plan is None:
        return earlier if earlier.trials else _too_small(session, [baseline, leader])
    again, cheap = [trial.recipe for trial in best[: plan.finalists]], cheap[: plan.extras]
    if len(again) == 1 < len(best):
        others = ", ".join(str(trial.recipe) for trial in best[1:])
        session.remark(
            f"there was time for only one of {len(best)} recipes in the final race: {others} may be as fast or faster"
        )
    session.report(f"final race: the best{f' {len(again)}' if len(again) > 1 else ''} in fresh processes")
    session.held.keep({Recipe()})  # the only process that was not picked for its speed
    session.be_patient(plan.spare_s)
    share_s = REPLICATES_S if budget.seconds is None else min(REPLICATES_S, max(0.0, budget.left_s))
    stop = Stop()
    rules = replace(session.rules, deadline=budget.end, grace_s=budget.grace_s, stop=stop,
                    indifference=max(session.rules.indifference, SIMPLER), precision=0.05,
                    replicates=plan.replicates, further=(MOST_REPLICATES,),
                    is_enough=lambda trials: _is_enough(session, trials), replicate_s=share_s,
                    rows=session.facts.row_counts)  # fmt: skip
    trials = session.run([Recipe(), *again, *cheap], rules, session.held, once=cheap)
    session.held.close()
    if leader.recipe not in {trial.recipe for trial in trials}:
        return earlier if earlier.trials else _too_small(session, [baseline, leader])
    is_kept = True
    try:
        if kept:
            session.study.set_note(f"again in race {kept[0].race}", [trial.to_json() for trial in kept])
        session.study.set_note("final race", [trial.to_json() for trial in trials])
        for trial in trials:
            if trial.recipe in cheap:
                session.remember(trial)
    except UsageError as error:  # what it found is announced all the same
        session.remark(f"the final race is not kept: {error}")
        is_kept = False
    trials = session.standings.confirmed(trials)
    expensive = [recipe for recipe in rungs if recipe not in session.standings.known and recipe not in cheap]
    # For the ladder alone, and only where there is time for all of them and for the leader's new process beside them.
    field = [leader.recipe, *expensive]
    if expensive and is_kept and not stop.asked and session.costs.how_many_fit(field, budget.left_s) == len(field):
        with contextlib.suppress(KeyboardInterrupt):  # what is announced is known
            session.race_unknown(expensive, budget.end)
    return FinalRace(trials, interrupted=stop.asked)


def _is_enough(session: Session, trials: Sequence[Trial]) -> bool:
    """Whether what would be announced is known well enough: with the spread that the whole study has shown, as two
    processes a side may show hardly any or far too much. How wide the intervals are decides, not what they say; what
    they are wide by for drift, more processes would not tell."""
    told = [one for one in session.standings.confirmed(trials, drifts=False) if one.ok and one.processes > 1]
    return not any(trial.speedup is not None and is_vague(trial.speedup) for trial in told)


def _is_settled(session: Session, last: FinalRace, recipe: Recipe) -> bool:
    """Whether a final race of an earlier run told what a longer one might: else it is made again."""
    (again,) = [trial for trial in last.trials if trial.recipe == recipe]
    return session.standings.goal not in TIMES or verdict(again.speedup, session.rules.indifference) != "cannot tell"


def climb(recipe: Recipe) -> list[Recipe]:
    """The recipe's levels added one at a time, in the order of the rungs, then of the catalogue."""
    steps, levels = [], dict[str, str]()
    for name, level in sorted(recipe.levels.items(), key=lambda item: (find(item[0]).rung, find(item[0]).order)):
        levels[name] = level
        steps.append(Recipe(levels))
    return steps


def _too_small(session: Session, least: Sequence[Trial]) -> FinalRace:
    seconds, left_s = session.budget.seconds or 0.0, max(0.0, session.budget.left_s)
    reason = (
        f"Not confirmed: the budget of {seconds:.0f} s was too small to measure the best recipe again in fresh "
        f"processes, which takes about {race_s(least):.0f} s where {left_s:.0f} s were left. "
        "The same command with a larger budget goes on from here."
    )
    session.report(reason)
    return FinalRace((), reason)
