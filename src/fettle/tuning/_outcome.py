"""What a study comes to: the winner, the verdict, the ladder, the code."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import msgspec

from fettle.machine import Machine, this_machine
from fettle.measure import Trial, verdict
from fettle.recipe import Recipe
from fettle.result import LeftOut, Result, Rung, Verdict
from fettle.techniques import source
from fettle.tuning._last_race import LastRace, climb
from fettle.tuning._limits import distance
from fettle.tuning.session import Session


def outcome(
    session: Session,
    last: LastRace,
    left_out: Sequence[LeftOut],
    machine: Machine,
    command: str,
    interrupted: bool,
) -> Result:
    """Everything that was found, the winner judged by the `last` race alone."""
    from fettle.diagnose import brought

    winner, said = _winner(session, last.trials)
    again = _beside(winner, last.trials)
    session.study.set_note("seconds", session.seconds)
    trials = list(session.known.values())
    return Result(
        name=session.target.name,
        target=session.target.reference,
        fingerprint=session.probed.fingerprint,
        facts=session.facts,
        machine=msgspec.to_builtins(machine),
        goal=session.goal,
        limits=session.limits,
        reference=session.probed.reference,
        trials=trials,
        winner=winner,
        verdict=said,
        baseline_again=again,
        ladder=_ladder(session, winner, again) if winner else (),
        advice=brought(session.probed.advice, trials),
        left_out=left_out,
        nearest=() if winner else _nearest(session),
        seconds=session.seconds,
        command=command,
        code=_code(session, winner) if winner else "",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        interrupted=interrupted,
        unconfirmed=last.unconfirmed,
        notes=tuple(note for note in (*session.notes, session.plan.note) if note),
        plan=session.plan.rows(),
    )


def _winner(session: Session, last: Sequence[Trial]) -> tuple[Trial | None, Verdict]:
    """Who won the last race, and what that race says of it against the workload as given."""
    winner = leader = session.best()
    said: Verdict = "cannot tell"
    if leader is not None and not leader.recipe.levels:
        said = "same"
    elif leader is not None:
        best = {trial.recipe for trial in session.finalists()}
        again = [trial for trial in last if trial.recipe in best]
        able = [trial for trial in again if math.isfinite(session.score(trial))]
        if able:
            winner = min(able, key=session.rank)
            said = cast(Verdict, verdict(winner.speedup, session.rules.indifference))
            if said == "cannot tell" and leader.speedup is not None and leader.speedup.low > 1:
                return winner, said  # its own race had told: that is neither "no difference" nor a promise
        elif again:
            winner = None  # they held once and not again: nothing to hand out with a good conscience
    if winner is not None and said != "faster" and session.goal in ("throughput", "latency") and last:
        # Nothing was gained that can be shown: change nothing, or no more than the answers need.
        plain = [session.known.get(recipe) for recipe in (Recipe(), Recipe({"mode": "eval"}))]
        winner = next((trial for trial in plain if trial and math.isfinite(session.score(trial))), winner)
        said = "same" if leader is None or winner.recipe != leader.recipe else said
    return winner, said


def _beside(winner: Trial | None, last: Sequence[Trial]) -> Trial | None:
    """The workload as given in the last race, if that is where the winner's figures are from and it ran there too."""
    if not any(trial is winner for trial in last):
        return None
    return next((trial for trial in last if not trial.recipe.levels and math.isfinite(trial.time_ms)), None)


def _nearest(session: Session) -> list[Trial]:
    """The trials that miss the limits by least, at most three."""
    ran = [trial for trial in session.known.values() if trial.status != "failed" and trial.recipe.levels]
    limits = session.limits.above(session.probed.reference.noise)
    return sorted(ran, key=lambda trial: (distance(trial, limits), trial.time_ms))[:3]


def _ladder(session: Session, winner: Trial, again: Trial | None) -> tuple[Rung, ...]:
    """The rungs from the baseline to the winner that were measured."""
    baseline = again or session.known.get(Recipe())
    if baseline is None:
        return ()
    rungs, last = [Rung("as given", baseline)], Recipe()
    for recipe in climb(winner.recipe):
        trial = winner if recipe == winner.recipe else session.known.get(recipe)
        if trial is None or trial.status == "failed":
            continue
        added = {name: level for name, level in recipe.levels.items() if last.levels.get(name) != level}
        rungs.append(Rung(" ".join(f"{name}={level}" for name, level in added.items()), trial))
        last = recipe
    return tuple(rungs)


def _code(session: Session, winner: Trial) -> str:
    """``optimized.py`` of the winner."""
    target, facts = session.target, session.facts
    if winner.int8_layers:  # of two that chose in one race, each has its own
        facts = replace(facts, int8_layers=tuple(winner.int8_layers))
    location, _, factory = target.reference.rpartition(":")
    heading = f"{target.name}, optimised for {facts.mode}: {winner.recipe}."
    if winner.speedup is not None:
        off = f"relative error {winner.accuracy.error:.2g}"
        if facts.mode == "training":
            off = f"losses off by {winner.accuracy.error:.2g} of what two seeds are apart"
        heading += f"\n\nMeasured {winner.speedup.estimate:.2f}x as given on {this_machine().summary}, {off}.\n"
    return source(
        winner.recipe,
        facts,
        heading=heading,
        target=None if target.is_live else (location, factory),
        calibration=max(1, facts.calibration_batches),
    )
