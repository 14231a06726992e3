"""What a study came to: the table of all experiments, and the steps of a ladder or an ablation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fettle.estimates import student
from fettle.machine import Machine
from fettle.measure import Interval, Trial, by_round
from fettle.recipe import Recipe
from fettle.result import ALONE
from fettle.studies.batches import Grown
from fettle.studies.sharing import elsewhere, labels, this_one
from fettle.studies.table import MACHINE, Experiment, Response, Table
from fettle.studies.workloads import Workload

TIME, MEMORY, ERROR = "ms_per_sample", "peak_mib", "error"
RESPONSES = (
    Response(TIME, better="faster"),
    Response(MEMORY, better="less memory"),
    Response(ERROR, better="less error"),
)
_LEAST_ERROR = 1e-7
"""Relative errors below this are the rounding of float32, and as good as none."""


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


@dataclass(frozen=True)
class Measured:
    """What one workload's session measured."""

    group: str
    """The model: the target without its arguments."""
    arguments: Mapping[str, str]
    """What its factory was called with: levels of factors outside of the recipe."""
    choices: Mapping[str, Sequence[str]]
    """Levels by technique, the given one first."""
    trials: Sequence[Trial]
    machine: str = ""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """By recipe: the name of the very machine."""
    confidence: float = 0.95
    """The level of its trials' intervals."""


def table_of(measured: Sequence[Measured], arguments: Mapping[str, Sequence[str]]) -> Table:
    """What several sessions measured; `arguments` are the factors outside of the recipe, with their levels, and where
    kinds of machines differ, those are the levels of one more.

    Times are those of each session's workload as given over each recipe's speed-up, which all its races say together.
    """
    outside = {**arguments}
    machines = list(dict.fromkeys(one.machine for one in measured if one.machine))
    if len(machines) > 1:
        outside[MACHINE] = machines
        measured = [replace(one, arguments={MACHINE: one.machine or machines[0], **one.arguments}) for one in measured]
    choices: dict[str, list[str]] = {}
    for one in measured:
        for name, levels in one.choices.items():
            known = choices.setdefault(name, [])
            known += [level for level in levels if level not in known]
    factors = {name: tuple(levels) for name, levels in choices.items() if len(levels) > 1}
    factors |= {name: tuple(levels) for name, levels in outside.items()}
    rows = [_row(one, trial, choices, factors) for one in measured for trial in one.trials]
    ran = [trial for one in measured for trial in one.trials if trial.status != "failed"]
    busy = sum(not trial.is_quiet for trial in ran)
    note = f"{busy} of {len(ran)} experiments were made while others used the machine: a quiet one has other figures"
    return Table(factors, RESPONSES, tuple(rows), notes=(note,) if busy else (), apart=frozenset(outside))


def _row(
    one: Measured, trial: Trial, choices: Mapping[str, Sequence[str]], factors: Mapping[str, Sequence[str]]
) -> Experiment:
    levels = {
        name: one.arguments[name] if name in one.arguments else trial.recipe.levels.get(name, choices[name][0])
        for name in factors
    }
    host = one.hosts.get(str(trial.recipe), "")
    if trial.status == "failed":
        return Experiment(
            levels, {}, one.group, reason=trial.reason or "it was not measured", machine=one.machine, host=host
        )
    given_ms = next((other.time_ms / other.samples for other in one.trials if not other.recipe.levels), math.nan)
    ratio = trial.speedup if trial.recipe.levels else ALONE  # each speed-up is against it, and has its error
    values = dict[str, float]()
    reason = trial.reason or "others had the machine: its time beside the workload as given is not known"
    if ratio is not None and ratio.estimate > 0:
        values[TIME], reason = given_ms / ratio.estimate, trial.reason
    if trial.peak_bytes:
        values[MEMORY] = trial.peak_bytes / 2**20
    if math.isfinite(trial.accuracy.error):
        values[ERROR] = max(trial.accuracy.error, _LEAST_ERROR)
    errors = {}
    if ratio is not None and 0 < ratio.low <= ratio.high < math.inf:
        errors[TIME] = (math.log(ratio.high) - math.log(ratio.low)) / 2 / student(math.inf, 1 - one.confidence)
    times = {abs(number): ms for number, ms in by_round(trial.slices).items()}
    rounds = tuple((number, ms / trial.samples) for number, ms in sorted(times.items()))
    return Experiment(levels, values, one.group, errors, reason, rounds, one.machine, host)


def measured_by(workload: Workload) -> list[Measured]:
    """What was measured of a workload: here, and where other kinds of machines share the study, on each of them."""
    if workload.failure:
        return [Measured(workload.group, workload.arguments, {}, [Trial(Recipe(), "failed", reason=workload.failure)])]
    session, choices = workload.session, workload.space.choices
    here, others = this_one(session), elsewhere(session)
    names = labels([here, *(machine for machine, _ in others)])
    every = [(here, workload.trials()), *((machine, workload.within(trials)) for machine, trials in others)]
    return [
        Measured(workload.group, workload.arguments, choices, trials, names[machine.id],
                 session.study.on(machine.id).hosts(), session.standings.confidence)
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
