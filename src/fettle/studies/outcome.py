"""What a study came to: the table of all experiments, and the steps of a ladder or an ablation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fettle.machine import Machine
from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.studies.batches import Grown
from fettle.studies.sharing import elsewhere, labels, this_one
from fettle.studies.table import MACHINE, Table
from fettle.studies.trials import Measured, table_of
from fettle.studies.workloads import Workload


@dataclass(frozen=True)
class Rung:
    """A step of a ladder or of an ablation."""

    label: str
    recipe: str
    kept: bool
    """It helped, and is part of what comes next; of an ablation: the recipe is worse without it."""
    status: str
    reason: str
    speedup: Interval | None
    per_second: float
    peak_bytes: int | None
    error: float
    grown: Grown | None = None
    """The largest batch that fits at it, where that was asked for and it runs at all."""


@dataclass(frozen=True)
class Done:
    """What was measured."""

    design: str
    table: Table
    steps: Mapping[str, Sequence[Rung]]
    """By workload; of a ladder or an ablation only."""
    machine: Machine
    seconds: float
    interrupted: bool
    notes: tuple[str, ...] = ()


def table_for(workloads: Sequence[Workload], arguments: Mapping[str, Sequence[str]]) -> Table | None:
    """One table of all that was measured, `arguments` the factors outside of the recipe; None where nothing was."""
    measured = [one for workload in workloads if workload.failure or workload.known for one in _measured(workload)]
    return together(measured, arguments) if measured else None


def together(measured: Sequence[Measured], arguments: Mapping[str, Sequence[str]]) -> Table:
    """What several sessions measured; where kinds of machines differ, they are the levels of a factor."""
    outside = {**arguments}
    machines = list(dict.fromkeys(one.machine for one in measured if one.machine))
    if len(machines) > 1:
        outside[MACHINE] = machines
        measured = [replace(one, arguments={MACHINE: one.machine or machines[0], **one.arguments}) for one in measured]
    return table_of(measured, outside)


def _measured(workload: Workload) -> list[Measured]:
    """What was measured of a workload: here, and where other kinds of machines share the study, on each of them."""
    if workload.failure:
        return [Measured(workload.group, workload.arguments, {}, [Trial(Recipe(), "failed", reason=workload.failure)])]
    session, choices = workload.session, workload.space.choices
    here, others = this_one(session), elsewhere(session)
    names = labels([here, *(machine for machine, _ in others)])
    every = [(here, workload.trials()), *((machine, workload.within(trials)) for machine, trials in others)]
    return [
        Measured(workload.group, workload.arguments, choices, trials, names[machine.id],
                 session.study.on(machine.id).hosts())
        for machine, trials in every
    ]  # fmt: skip


def rungs_of(workload: Workload) -> list[Rung]:
    """The steps with what all races say of them together."""
    known = workload.known
    baseline = known[Recipe()]
    rungs = []
    for step in workload.steps:
        trial = known.get(step.trial.recipe, step.trial)
        ratio = trial.speedup if trial.recipe.levels else Interval(1.0, 1.0, 1.0)
        rate = baseline.throughput * ratio.estimate if ratio is not None else math.nan
        rungs.append(Rung(
            step.label, str(trial.recipe), step.kept, trial.status, trial.reason,
            None if trial.status == "failed" else ratio, rate, trial.peak_bytes, trial.accuracy.error,
            workload.grown.get(trial.recipe),
        ))  # fmt: skip
    return rungs
