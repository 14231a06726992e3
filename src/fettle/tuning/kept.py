"""Studies in a storage, read by who took no part: for their page, and to be put into an atlas."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import optuna

from fettle.atlas import Row, rows_of, subject
from fettle.errors import UsageError, refusing
from fettle.machine import Machine
from fettle.measure import Judge, Trial
from fettle.result import Limits
from fettle.storage import check_there, open_storage, opening
from fettle.study import Study
from fettle.techniques import Facts
from fettle.tuning.model import Races
from fettle.tuning.standings import Standings

T = TypeVar("T")


def atlas_rows(storage: str, *, family: str = "") -> list[Row]:
    """The trials of all studies in an Optuna storage, on every machine that took part, as rows of an atlas.

    Speed-ups are what all races of a study say together; those of a first token alone, of the further ones, or under
    load are left out. Raises `UsageError` where there is no study of fettle's.
    """
    rows = [row for study, machine in studies_in(storage) for row in _rows(study, machine, family)]
    if not rows:
        raise UsageError("there is no study of fettle's with trials in it, or it was made by an earlier version")
    return rows


def studies_in(storage: str, names: Collection[str] | None = None) -> Iterator[tuple[Study, Machine]]:
    """The studies of these names in a storage, by default all, as each machine that took part sees them."""
    check_there(storage)
    with opening(storage):
        kept = open_storage(storage)
        studies = [Study(optuna.load_study(study_name=name, storage=kept), "")
                   for name in optuna.get_all_study_names(kept) if names is None or name in names]  # fmt: skip
    for study in studies:
        for machine_id, value in study.machines().items():
            seen = study.on(machine_id)
            yield seen, _read(value, Machine, seen)


def _rows(study: Study, machine: Machine, family: str) -> list[Row]:
    probed = study.note("probe")
    apart = study.note("under load") or study.note("goal") in ("ttft", "tpot")
    if not isinstance(probed, Mapping) or "facts" not in probed or apart:
        return []
    trials = recalled(study)
    with refusing(f"the study {study.name!r} cannot be read:", (TypeError, AttributeError)):  # of another version
        about = subject(study.name, study.version, _read(_without_padding(probed["facts"]), Facts, study),
                        probed.get("features", {}), machine, probed.get("peaks", {}), family)  # fmt: skip
    return rows_of(about, trials)


def _without_padding(facts: Any) -> Any:
    """Facts of any version: that part was kept in another form, and an atlas does not go by it."""
    if not isinstance(facts, Mapping):
        return facts
    parts = {name: _without_padding(own) for name, own in (facts.get("parts") or {}).items()}
    return {**facts, "padding": None, "parts": parts}


def _read(value: Any, kind: type[T], study: Study) -> T:
    with refusing(f"the study {study.name!r} cannot be read:", msgspec.ValidationError):
        return msgspec.convert(value, kind)


def recalled(
    study: Study, environments: Collection[str] | None = (), judge: Judge | None = None, confidence: float = 0.95
) -> list[Trial]:  # fmt: skip
    """What a study knows of one machine, with what all races there say together; None for all environments. Answers
    stay as they were judged, unless there is a `judge` of today's."""
    races = Races(elapsed=bool(study.note("under load")))
    standings = Standings("throughput", Limits(), races, confidence, judge or Judge())
    kept = standings.recall(study, environments, anew=False)
    known = [standings.known[trial.recipe] for trial in kept]
    if judge is not None:
        return known
    return [replace(now, status=then.status, reason=then.reason) for now, then in zip(known, kept, strict=True)]
