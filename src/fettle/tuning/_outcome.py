"""What a study comes to: the winner, the verdict, the ladder, the code."""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import msgspec

from fettle.diagnose import with_gains
from fettle.errors import UsageError
from fettle.machine import Machine, this_machine
from fettle.measure import Interval, Trial, verdict
from fettle.recipe import Recipe
from fettle.result import TIMES, LeftOut, Rung, Verdict, needs_less
from fettle.techniques import changed, find, preconditions, source
from fettle.tuning._baseline import depends_on_memory
from fettle.tuning._final_race import FinalRace, climb
from fettle.tuning._probe import judged_against
from fettle.tuning.session import Session
from fettle.tuning.standings import distance

if TYPE_CHECKING:
    from fettle.report import Result


def outcome(
    session: Session,
    last: FinalRace,
    left_out: Sequence[LeftOut],
    machine: Machine,
    command: str,
    interrupted: bool,
) -> Result:
    """Everything that was found, the winner judged by the `last` race alone."""
    from fettle.report import Result

    winner, claim = pick_winner(session, last.trials)
    known, races = session.standings.known, session.standings.races.trials
    again = _beside(winner, [*last.trials, *known.values(), *(one for race in races.values() for one in race.values())])
    with contextlib.suppress(UsageError):  # the study cannot be written: that is no reason to keep its result back
        session.study.set_note("seconds", session.seconds)
    trials = [trial for trial in known.values() if session.standings.allowed(trial.recipe)]
    baseline = again or known.get(Recipe())
    notes = [
        *session.notes, session.plan.note, _whose_figure(session, winner, last.trials),
        _threads_under_load(session, winner), *_remarks(session, winner),
        depends_on_memory(baseline, winner, session.facts),
    ]  # fmt: skip
    return Result(
        name=session.target.name,
        target=session.target.reference,
        fingerprint=session.probed.fingerprint,
        facts=session.facts,
        machine=msgspec.to_builtins(machine),
        goal=session.standings.goal,
        limits=session.standings.limits,
        reference=judged_against(session.probed.reference),
        trials=trials,
        winner=winner,
        verdict=claim,
        baseline_again=again,
        ladder=_ladder(session, winner, baseline) if winner and baseline else (),
        advice=with_gains(session.probed.advice, trials),
        left_out=left_out,
        nearest=() if winner else _nearest(session),
        seconds=session.seconds,
        command=command,
        code=_code(session, winner) if winner else "",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        interrupted=interrupted,
        unconfirmed=last.unconfirmed,
        notes=tuple(filter(None, notes)),
        plan=session.plan.rows(),
        under_load=session.rules.under_load,
        confidence=session.rules.confidence,
    )


def pick_winner(session: Session, last: Sequence[Trial]) -> tuple[Trial | None, Verdict]:
    """Who won the final race, and what is said of it against the workload as given: what that race says or, where it is
    surer, what all races together do."""

    def said(speedup: Interval | None) -> Verdict:
        return cast(Verdict, verdict(speedup, session.rules.indifference))

    winner = leader = session.standings.best()
    claim: Verdict = "cannot tell"
    if leader is not None and not leader.recipe.levels:
        claim = "same"
    elif leader is not None:
        again = [trial for trial in last if trial.recipe.levels]
        able = [trial for trial in again if math.isfinite(session.score(trial))]
        if able:
            winner = session.standings.pick(able)
            claim = said(winner.speedup)
        elif again and not any(trial.ok and not trial.is_compared for trial in again):
            winner = None  # they held once and not again: nothing to hand out with a good conscience
        together = _together(session, winner) if winner is not None else None
        if winner is not None and together is not None:
            settles = claim == "cannot tell" and (together.low > 1 or not last)
            if settles or (claim == said(together) == "faster" and _is_surer(together, winner.speedup)):
                winner, claim = replace(winner, speedup=together), said(together)
                if claim == "cannot tell":
                    return winner, claim  # what earlier races say is neither "no difference" nor a promise
    if winner is None or not last:
        return winner, claim
    goal = session.standings.goal
    given = [trial for trial in last if not trial.recipe.levels and math.isfinite(session.score(trial))]
    gained = claim == "faster" if goal in TIMES else all(needs_less(winner, trial, goal) for trial in given)
    if gained:
        return winner, claim
    winner = _as_given(session, given, last) or winner  # nothing was gained that can be shown
    if leader is None or winner.recipe != leader.recipe:  # nobody picked it for its speed
        claim = said(winner.speedup) if winner.recipe.levels else "same"
    return winner, claim


def _as_given(session: Session, given: Sequence[Trial], last: Sequence[Trial]) -> Trial | None:
    """The workload as given, or with no more changes than right answers need; None where both miss the limits."""
    known = [session.standings.known.get(recipe) for recipe in (Recipe(), preconditions(session.facts))]
    trial = next((one for one in (*given, *known) if one and math.isfinite(session.score(one))), None)
    raced = [one for one in last if one.processes > 1] or last  # not the rungs of the ladder beside them
    busy = next((one for one in raced if not one.is_quiet), None)
    if trial is not None and busy is not None and not trial.recipe.levels:
        return replace(trial, is_quiet=False, load=busy.load)  # this is worth what the final race's comparison is
    return trial


def _is_surer(one: Interval, other: Interval | None) -> bool:
    """Whether an interval is narrower, on the log scale."""
    return other is None or one.high * other.low < other.high * one.low


def _together(session: Session, winner: Trial) -> Interval | None:
    """What all races together say of the winner. It was picked from many, so the error rate is shared between them
    (Bonferroni)."""
    if session.standings.fit is None or session.standings.goal not in TIMES:
        return None
    picked_from = max(
        1, sum(trial.speedup is not None and bool(trial.recipe.levels) for trial in session.standings.known.values())
    )
    return session.standings.fit.speedup(winner.recipe, confidence=1 - (1 - session.rules.confidence) / picked_from)


def _beside(winner: Trial | None, trials: Iterable[Trial]) -> Trial | None:
    """The workload as given in the race that the winner's figures are from, if it ran there too."""
    ran = [trial for trial in trials if not trial.recipe.levels and math.isfinite(trial.time_ms)]
    return next((trial for trial in ran if winner is not None and trial.race == winner.race), None)


def _nearest(session: Session) -> list[Trial]:
    """The trials that miss the limits by least, at most three."""
    ran = [
        trial for trial in session.standings.known.values()
        if trial.status != "failed" and trial.recipe.levels and session.standings.allowed(trial.recipe)
    ]  # fmt: skip
    limits, goal = session.standings.limits.above(session.probed.reference.noise), session.standings.goal
    return sorted(ran, key=lambda trial: (distance(trial, limits, goal), trial.time_ms))[:3]


def _ladder(session: Session, winner: Trial, baseline: Trial) -> tuple[Rung, ...]:
    """The rungs from the baseline to the winner that were measured."""
    rungs, last = [Rung("as given", baseline)], Recipe()
    for recipe in climb(winner.recipe):
        trial = winner if recipe == winner.recipe else session.standings.known.get(recipe)
        if trial is None or trial.status == "failed":
            continue
        added = {name: level for name, level in recipe.levels.items() if last.levels.get(name) != level}
        rungs.append(Rung(" ".join(f"{name}={level}" for name, level in added.items()), trial))
        last = recipe
    return tuple(rungs)


def _whose_figure(session: Session, winner: Trial | None, last: Sequence[Trial]) -> str:
    """What the final race alone said, where the figure is that of all races."""
    where = (winner.recipe, winner.race) if winner is not None else None
    alone = next((trial.speedup for trial in last if (trial.recipe, trial.race) == where), None)
    if winner is None or alone is None or alone == winner.speedup:
        return ""
    return (
        f"The figure is that of all {len(session.standings.races.trials)} races together, its interval that of the "
        f"best of all recipes tried. The final race alone, in fresh processes: {alone.text}."
    )


def _remarks(session: Session, winner: Trial | None) -> list[str]:
    """What whoever uses the winner should know of its levels; of a text's none is about another shape."""
    if winner is None or session.facts.generates:
        return []
    return list(dict.fromkeys(technique.remarks.get(level, "") for technique, level in changed(winner.recipe)))


def _threads_under_load(session: Session, winner: Trial | None) -> str:
    """Where fewer threads are faster only beside a neighbour, the advice for a machine that always has one."""
    for trial in session.standings.known.values():
        beside = trial.elapsed_speedup
        changed = set(trial.recipe.levels) - set(preconditions(session.facts).levels)
        helps = len(changed) == 1 and all(find(name).helps_when_shared for name in changed)
        if helps and beside is not None and beside.is_known and beside.low > 1.2:
            alone = trial.speedup.estimate if trial.speedup is not None else math.nan
            if not alone > 1.05 and (winner is None or not changed & winner.recipe.levels.keys()):
                without = "it is not known how much" if math.isnan(alone) else f"{1 / alone:.0%}"
                return (
                    f"Beside the neighbours of this study {trial.recipe} took {1 / beside.estimate:.0%} of the time, "
                    f"but {without} without them, so no {', '.join(changed)} are set. --under-load (in Python "
                    "under_load=True) tunes for a machine that is always shared."
                )
    return ""


def _code(session: Session, winner: Trial) -> str:
    """``optimized.py`` of the winner."""
    target, facts = session.target, session.facts
    facts = replace(facts, learned={**facts.learned, **winner.learned})  # of two in one race each has its own
    heading = f"{target.name}, optimised for {facts.mode}: {winner.recipe}."
    if (ratio := winner.known_speedup) is not None:
        off = f", with {winner.accuracy.distance}" if winner.accuracy.distance else ""
        if not off and math.isfinite(winner.accuracy.metric):
            off = f", with a metric of {winner.accuracy.metric:.4g}"
        heading += f"\n\nMeasured {ratio.estimate:.2f}x as given on {this_machine().summary}{off}.\n"
    return source(
        winner.recipe,
        facts,
        heading=heading,
        target=None if target.is_live else target,
        calibration=max(1, facts.calibration_batches),
    )
