"""A study of one's own: open the workloads, plan, measure. Read `study` and you know the order of things.

Each target with each combination of its factory's arguments is a workload of its own, with its own reference and its
own trials in the storage: so a study that is killed goes on where it stopped, and what an earlier design measured
counts too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from fettle.atlas import read_atlas
from fettle.errors import UsageError
from fettle.machine import Machine, this_machine
from fettle.measure import Interval, Trial, close_all
from fettle.procs.interpreter import Interpreter, find_interpreters
from fettle.recipe import Recipe
from fettle.result import Limits
from fettle.search import Guide, Space, Step, auto, removals, steps
from fettle.studies import designs
from fettle.studies.batches import Grown, check_growth, grown
from fettle.studies.designs import Part, Plan
from fettle.studies.environments import check_same, differences, environments_of
from fettle.studies.orders import agree, announce
from fettle.studies.settings import Settings
from fettle.studies.sharing import MACHINE, elsewhere, labels, measure_shares, shares, this_one
from fettle.studies.table import Table
from fettle.studies.trials import Measured, table_of
from fettle.study import OtherWorkload
from fettle.techniques import CATALOGUE, PYTHON, check_names
from fettle.tuning import Event, OnProgress, Options, Session, check_techniques, guide_for, space_for, writable
from fettle.workload import Target, check_mode, find_target

TOGETHER = 6
"""Recipes of one race beside the workload as given."""
REPLICATES = 2
"""Processes of each recipe where a design has no repeats hidden in it."""


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


@dataclass
class _Workload:
    """One target with its arguments, opened."""

    group: str
    arguments: Mapping[str, str]
    session: Session
    space: Space = field(default_factory=lambda: Space({}, lambda recipe: ""))
    cells: Sequence[Recipe] = ()
    failure: str = ""
    steps: Sequence[Step] = ()
    grown: Mapping[Recipe, Grown] = field(default_factory=dict)
    guide: Guide | None = None
    environments: Mapping[str, Interpreter] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join([self.group, *(f"{name}={value}" for name, value in self.arguments.items())])

    @property
    def known(self) -> Mapping[Recipe, Trial]:
        """All that was measured, by this run or an earlier one."""
        return self.session.standings.known

    def trials(self) -> list[Trial]:
        """What is known of recipes in the space."""
        return self.within(self.known.values())

    def within(self, trials: Iterable[Trial]) -> list[Trial]:
        """Those of recipes in the space."""
        allowed = {(name, level) for name, levels in self.space.choices.items() for level in levels}
        return [trial for trial in trials if trial.recipe.levels.items() <= allowed]

    def unknown(self) -> list[Recipe]:
        """Cells that are not measured."""
        return [recipe for recipe in self.cells if recipe not in self.known]


def study(targets: Sequence[str], settings: Settings, on_progress: OnProgress, *, agreed: bool = True) -> Done | Plan:
    """Measure what the design says on each target, or what of it fits into the budget.

    The plan alone is returned where it takes more than `plan.LONG_S` and nobody has `agreed` to that. Raises
    `UsageError` for bad input; a workload that cannot be built with some of its arguments is a failed experiment,
    unless all are.
    """
    began = time.monotonic()
    telling = _Progress(on_progress, began)
    rows = read_atlas(settings.atlas) if settings.atlas is not None else ()
    workloads = _workloads(targets, settings, telling)
    machine, environments = this_machine(), workloads[0].environments
    orders = agree(targets, settings) if settings.name else None
    interrupted, plan = False, None
    try:
        for workload in workloads:
            _open(workload, settings, machine)
            _measure_as_given(workload, settings)
            if settings.atlas is not None and not workload.failure:
                others = [row for row in rows if row.fingerprint != workload.session.probed.fingerprint]
                workload.guide = guide_for(workload.session, others, settings.atlas, machine)
        if all(workload.failure for workload in workloads):
            raise UsageError(workloads[0].failure)
        plan = _plan(workloads, settings, began)
        if plan.is_long and not agreed and settings.budget_s is None:
            return plan
        if orders is not None:
            announce(orders, settings)
        telling.seconds = time.monotonic() - began + plan.seconds
        for workload in workloads:
            if not workload.failure:
                _measure(workload, settings, began)
                close_all()
                workload.session.let_go()
    except KeyboardInterrupt:
        interrupted = True  # what is done is kept, and shown
    finally:
        close_all()
    for workload in workloads:
        if workload.guide is not None:
            workload.session.notes += _told(workload.guide, workload)
    notes = (
        *(plan.notes if plan else ()),
        *differences(environments.values()),
        *(f"{w.name} was not measured: {w.failure}" for w in workloads if w.failure),
        *(n for w in workloads for n in w.session.notes),
        *(n for w in workloads if not w.failure for n in shares(w.name, w.session.study.workers())),
    )
    measured = [one for workload in workloads if workload.failure or workload.known for one in _measured(workload)]
    if not measured:
        raise KeyboardInterrupt
    outside = {**settings.arguments}
    if machines := list(dict.fromkeys(one.arguments[MACHINE] for one in measured if MACHINE in one.arguments)):
        outside[MACHINE] = machines
        measured = [replace(one, arguments={MACHINE: machines[0], **one.arguments}) for one in measured]
    return Done(
        settings.design, table_of(measured, outside),
        {workload.name: _rungs(workload) for workload in workloads if workload.steps},
        machine, time.monotonic() - began, interrupted, notes,
    )  # fmt: skip


def enqueue(targets: Sequence[str], settings: Settings, on_progress: OnProgress) -> dict[str, int]:
    """Begin a study for workers and measure nothing: how many combinations each workload has, as this machine sees it.

    The workloads are built once, so that workers with another model, other inputs or other weights can be refused.
    Raises `UsageError` for bad input.
    """
    orders = agree(targets, settings)
    workloads = _workloads(targets, settings, _Progress(on_progress, time.monotonic()))
    try:
        for workload in workloads:
            _open(workload, settings, this_machine())
    finally:
        close_all()
    if all(workload.failure for workload in workloads):
        raise UsageError(workloads[0].failure)
    announce(orders, settings)
    return {workload.name: len(workload.cells) for workload in workloads}


@dataclass(frozen=True)
class _Target:
    group: str
    arguments: Mapping[str, str]
    target: Target


def _check(settings: Settings) -> None:
    designs.check(settings.design, settings.cells)
    check_mode(settings.mode)
    check_techniques(settings.techniques)
    if settings.start is not None:
        check_names(settings.start.without(PYTHON.name))
    known = {PYTHON.name, *(technique.name for technique in CATALOGUE)}
    if unknown := [name for name in settings.order if name not in known]:
        raise UsageError(f"`order`: there is no technique {unknown[0]!r}")
    if settings.grow_batch is not None and settings.design != "ladder":
        raise UsageError("`grow_batch` is for a ladder: `design=ladder`")
    if settings.rounds < 3:
        raise UsageError(f"`rounds={settings.rounds}`: a time needs three at least")
    for name, values in settings.arguments.items():
        if len(set(values)) < 2 or not name.isidentifier():
            raise UsageError(f"`factor={name}`: write NAME=VALUE,VALUE with an argument of the factory and two values")


def _targets(texts: Sequence[str], settings: Settings) -> list[_Target]:
    """Every target with every combination of arguments."""
    if not texts:
        raise UsageError("name a target, path/to/file.py:factory, or a table with `from_csv`")
    found = []
    groups: list[str] = []
    for text in dict.fromkeys(texts):
        target = replace(find_target(text), mode=settings.mode)
        alike = sum(group == target.name or group.startswith(f"{target.name}#") for group in groups)
        groups.append(f"{target.name}#{alike + 1}" if alike else target.name)
        for values in product(*settings.arguments.values()):
            arguments = dict(zip(settings.arguments, values, strict=True))
            name = "-".join([groups[-1], *(f"{key}{value}" for key, value in arguments.items())])
            typed = {key: _typed(value) for key, value in arguments.items()}
            found.append(_Target(groups[-1], arguments, replace(target, name=name, arguments=typed)))
    return found


def _typed(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _workloads(targets: Sequence[str], settings: Settings, telling: _Progress) -> list[_Workload]:
    """The workloads of a study, not yet opened. Raises `UsageError` for bad input."""
    _check(settings)
    found, wanted = find_interpreters(settings.pythons), _targets(targets, settings)
    named = settings.start.levels.get(PYTHON.name, PYTHON.default) if settings.start is not None else PYTHON.default
    if named not in (PYTHON.default, *(one.name for one in found)):
        raise UsageError(f"`recipe`: there is no environment {named!r}: name it, `python='{named}=PATH'`")
    folder = writable(settings.output)
    environments = environments_of(found, folder)
    return [
        _Workload(target.group, target.arguments, _session(target.target, folder, settings, telling),
                  environments=environments)
        for target in wanted
    ]  # fmt: skip


def _session(target: Target, folder: Path, settings: Settings, on_progress: _Progress) -> Session:
    options = Options(
        limits=Limits(max_error=settings.max_error), output=folder, storage=settings.storage,
        study=f"{settings.name}/{target.name}" if settings.name else None, confidence=settings.confidence,
        budget_s=settings.budget_s if settings.design in designs.STEPS else None,
        trial_timeout_s=settings.trial_timeout_s, under_load=settings.under_load, polite=settings.polite,
    )  # fmt: skip
    return Session(target, options, on_progress, started=on_progress.began)


def _open(workload: _Workload, settings: Settings, machine: Machine) -> None:
    """Probe the workload, and say which recipes are to be measured."""
    session = workload.session
    try:
        session.report(f"building {workload.name} and its reference")
        session.environments = workload.environments
        session.open(machine)
        check_same(session)
        if settings.grow_batch is not None:
            check_growth(session, settings.grow_batch)
    except OtherWorkload:
        raise
    except UsageError as error:
        workload.failure = str(error)
        return
    replicates = REPLICATES if settings.design in designs.STEPS else 1
    session.rules = replace(session.rules, equal_rounds=settings.rounds, replicates=replicates)
    space, _ = space_for(session.facts, check_techniques(settings.techniques), session.plan.rules_out, session.costs.of)
    choices = {PYTHON.name: (PYTHON.default, *workload.environments), **space.choices}
    names = sorted(choices, key=lambda name: settings.order.index(name) if name in settings.order else len(choices))
    workload.space = replace(space, choices={name: choices[name] for name in names})
    if clash := [name for name in settings.arguments if len(choices.get(name, ())) > 1]:
        raise UsageError(
            f"`factor={clash[0]}`: a technique of that name is varied too: pin it, `technique='{clash[0]}=LEVEL'`, or "
            "call the argument otherwise"
        )
    if settings.design not in designs.STEPS:
        workload.cells = designs.cells(settings.design, workload.space, settings.start or Recipe(), settings.cells)


def _measure_as_given(workload: _Workload, settings: Settings) -> None:
    if workload.failure:
        return
    session = workload.session
    if settings.is_shared:
        measure_shares(session, [Recipe()], 1, math.inf)
    if not session.measure([Recipe()])[0].ok:
        workload.failure = f"as given it does not run: {workload.known[Recipe()].reason}"
    session.held.close()  # the next workload may need the memory


def _plan(workloads: Sequence[_Workload], settings: Settings, began: float) -> Plan:
    """How many recipes are to be measured and how long that takes; with a budget no more than fit."""
    running = [workload for workload in workloads if not workload.failure]
    parts = []
    notes = []
    for place, workload in enumerate(running):
        session = workload.session
        if settings.design in designs.STEPS:
            most = designs.about(settings.design, workload.space, settings.start)
            each_s = session.costs.seconds_for(Recipe(), settings.rounds)
            seconds = most * each_s if settings.budget_s is None else min(most * each_s, settings.budget_s)
            parts.append(Part(workload.name, most, len(workload.trials()), seconds))
            continue
        whole = len(workload.cells)
        if settings.budget_s is not None:
            spent_s = time.monotonic() - began + sum(part.seconds for part in parts)
            left_s = (settings.budget_s - spent_s) / (len(running) - place)
            fit = designs.fitting(_seconds(workload, settings), left_s)
            if fit < len(workload.unknown()):
                most = max(2, len(workload.cells) - len(workload.unknown()) + fit)
                workload.cells = designs.cells(settings.design, workload.space, settings.start or Recipe(), most)
                notes.append(f"{workload.name}: {len(workload.cells)} of {whole} combinations fit into the budget")
        left = workload.unknown()
        parts.append(Part(workload.name, len(workload.cells), len(workload.cells) - len(left),
                          sum(_seconds(workload, settings))))  # fmt: skip
    return Plan(settings.design, tuple(parts), tuple(notes))


def _seconds(workload: _Workload, settings: Settings) -> list[float]:
    """What each unknown cell is expected to take, its share of what runs in each race beside it in it."""
    costs, replicates = workload.session.costs, workload.session.rules.replicates
    beside_s = 2 * settings.rounds * (costs.seconds_for(Recipe(), 1) - costs.seconds_for(Recipe(), 0)) / TOGETHER
    return [replicates * costs.seconds_for(recipe, settings.rounds) + beside_s for recipe in workload.unknown()]


def _measure(workload: _Workload, settings: Settings, began: float) -> None:
    session, space = workload.session, workload.space
    if settings.design == "ladder":
        workload.steps = steps(space, session, start=settings.start)
        if settings.grow_batch is not None:
            ran = [step.trial.recipe for step in workload.steps if step.trial.status != "failed"]
            workload.grown = {recipe: grown(session, recipe, settings.grow_batch) for recipe in ran}
        return
    if settings.design == "ablation":
        start = settings.start
        if start is None:
            found = auto(space, session, guide=workload.guide)
            start = found.recipe if found else Recipe()
        workload.steps = removals(space, session, start)
        return
    if settings.is_shared:
        deadline = math.inf if settings.budget_s is None else began + settings.budget_s
        measure_shares(session, workload.cells, TOGETHER, deadline)
        return
    while left := workload.unknown():
        before = len(left)
        if settings.budget_s is not None:
            fit = designs.fitting(_seconds(workload, settings), settings.budget_s - (time.monotonic() - began))
            left = left[:fit]
        if not session.measure(left[:TOGETHER]) or len(workload.unknown()) == before:
            break


def _told(guide: Guide, workload: _Workload) -> list[str]:
    """What the atlas expected and what was found."""
    guide.look_back(trial for recipe, trial in workload.known.items()
                    if recipe not in {one.recipe for one in guide.foreseen})  # fmt: skip
    return [f"{workload.name}: {line}" for line in guide.summary()]


def _measured(workload: _Workload) -> list[Measured]:
    """What was measured of a workload: here, and where other kinds of machines share the study, on each of them."""
    if workload.failure:
        return [Measured(workload.group, workload.arguments, {}, [Trial(Recipe(), "failed", reason=workload.failure)])]
    choices = workload.space.choices
    ours = Measured(workload.group, workload.arguments, choices, workload.trials())
    others = elsewhere(workload.session)
    if not others:
        return [ours]
    here = this_one(workload.session)
    names = labels([here, *(machine for machine, _ in others)])
    return [
        replace(ours, arguments={**ours.arguments, MACHINE: names[here.id]}),
        *(Measured(ours.group, {**ours.arguments, MACHINE: names[machine.id]}, choices, workload.within(trials))
          for machine, trials in others),
    ]  # fmt: skip


def _rungs(workload: _Workload) -> list[Rung]:
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


@dataclass
class _Progress:
    """Passes events on with the plan's seconds, so that a bar shows how much is left."""

    on_progress: OnProgress
    began: float
    seconds: float | None = None

    def __call__(self, event: Event) -> None:
        self.on_progress(replace(event, elapsed_s=time.monotonic() - self.began, budget_s=self.seconds))
