"""What an atlas says of the workload of a session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fettle.atlas import Predictor, Row, subject
from fettle.machine import Machine
from fettle.search import Guide
from fettle.tuning.session import Session

_ROUNDS = 6
"""Rounds that a trial typically takes part in."""
_TIMES = ("throughput", "latency")


def guide_for(session: Session, rows: Sequence[Row], atlas: Path | str, machine: Machine) -> Guide | None:
    """A guide for the search from the rows of an atlas. None, with a note, where it has nothing to say.

    The workload as given must have been measured.
    """
    if session.standings.goal not in _TIMES:
        session.notes.append(f"The atlas {atlas} was not used: it foresees times, and the goal is another.")
        return None
    predictor = _predictor(session, rows, machine)
    if not len(predictor):
        session.notes.append(f"The atlas {atlas} has no trial of such a workload ({predictor.about.mode} on "
                             f"{predictor.about.device}).")  # fmt: skip
        return None
    session.note(f"atlas: {len(predictor)} trials of {predictor.models} models")
    return Guide(predictor, session.note)


def _predictor(session: Session, rows: Sequence[Row], machine: Machine) -> Predictor:
    """What the rows foresee for the workload of a session, on which the workload as given was measured."""
    probed, target = session.probed, session.target
    about = subject(target.name, probed.fingerprint, probed.facts, probed.features, machine, probed.peaks)
    return Predictor(rows, about, max_error=session.facts.max_error if session.facts.mode == "inference" else None,
                     guess_s=lambda recipe: session.seconds_for(recipe, _ROUNDS))  # fmt: skip
