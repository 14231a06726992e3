"""A study of one's own: open the workloads, plan, measure. Read `study` and you know the order of things.

Each target with each combination of its factory's arguments is a workload of its own, with its own reference and its
own trials in the storage: so a study that is killed goes on where it stopped, and what an earlier design measured
counts too.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fettle.atlas import read_atlas, weights_of
from fettle.errors import UsageError
from fettle.machine import this_machine
from fettle.measure import close_all
from fettle.recipe import Recipe
from fettle.search import Guide, auto, removals, steps
from fettle.studies import designs
from fettle.studies.batches import about_tries, grown
from fettle.studies.designs import Part, Plan
from fettle.studies.orders import agree, announce
from fettle.studies.outcome import Done, measured_by, rungs_of, table_of
from fettle.studies.settings import Settings
from fettle.studies.sharing import measure_shares, one_at_a_time, shares
from fettle.studies.workloads import PlanProgress, Workload, differences, open_workload, workloads_of
from fettle.techniques import batch_factor
from fettle.tuning import Event, OnProgress, Session, guide_for

TOGETHER = 6
"""Recipes of one race beside the workload as given."""


def study(targets: Sequence[str], settings: Settings, on_progress: OnProgress, *, agreed: bool = True) -> Done | Plan:
    """Measure what the design says on each target, or what of it fits into the budget.

    The plan alone is returned where it takes more than `plan.LONG_S` and nobody has `agreed` to that. Raises
    `UsageError` for bad input; a workload that cannot be built with some of its arguments is a failed experiment,
    unless all are.
    """
    began = time.monotonic()
    progress = PlanProgress(on_progress, began)
    rows = read_atlas(settings.atlas) if settings.atlas is not None else ()
    workloads = workloads_of(targets, settings, progress)
    machine, environments = this_machine(), workloads[0].environments
    orders = agree(targets, settings) if settings.name else None
    interrupted, plan = False, None
    try:
        for workload in workloads:
            open_workload(workload, settings, machine)
            _measure_as_given(workload, settings)
            if settings.atlas is not None and not workload.failure:
                own = workload.session.probed.fingerprint
                others = [row for row in rows if weights_of(row.fingerprint) != own]  # also with other code
                workload.guide = guide_for(workload.session, others, settings.atlas, machine)
        if all(workload.failure for workload in workloads):
            raise UsageError(workloads[0].failure)
        plan = _plan(workloads, settings, began)
        if plan.is_long and not agreed and settings.budget_s is None:
            return plan
        progress(Event(str(plan), note=str(plan)))
        if orders is not None:
            announce(orders, settings)
        progress.seconds = time.monotonic() - began + plan.seconds
        running = [workload for workload in workloads if not workload.failure]
        for place, workload in enumerate(running):
            _leave(workload.session, 1 / (len(running) - place))
            with _in_turn(workload.session, settings):
                _measure(workload, settings)
            close_all()
            workload.session.let_go()
    except KeyboardInterrupt:
        interrupted = True  # what is done is kept, and shown
    finally:
        close_all()
        for workload in workloads:
            workload.session.let_go()
    for workload in workloads:
        if workload.guide is not None:
            workload.session.notes += _foreseen(workload.guide, workload)
    notes = (
        *(plan.notes if plan else ()),
        *differences(environments.values()),
        *(f"{w.name} was not measured: {w.failure}" for w in workloads if w.failure),
        *(n for w in workloads for n in w.session.notes),
        *(n for w in workloads if w.known and not w.failure for n in shares(w.name, w.session.study.workers())),
    )
    measured = [one for workload in workloads if workload.failure or workload.known for one in measured_by(workload)]
    if not measured:
        raise KeyboardInterrupt
    return Done(
        settings.design, table_of(measured, settings.arguments),
        {workload.name: rungs_of(workload) for workload in workloads if workload.steps},
        machine, time.monotonic() - began, interrupted, notes,
    )  # fmt: skip


def enqueue(targets: Sequence[str], settings: Settings, on_progress: OnProgress) -> dict[str, int]:
    """Begin a study for workers and measure nothing: how many combinations each workload has, as this machine sees it.

    The workloads are built once, so that workers with another model, other inputs or other weights can be refused.
    Raises `UsageError` for bad input.
    """
    orders = agree(targets, settings)
    workloads = workloads_of(targets, settings, PlanProgress(on_progress, time.monotonic()))
    try:
        for workload in workloads:
            open_workload(workload, settings, this_machine())
    finally:
        close_all()
    if all(workload.failure for workload in workloads):
        raise UsageError(workloads[0].failure)
    for workload in workloads:
        if workload.failure:
            workload.session.note(f"{workload.name} has no combinations: {workload.failure}")
    announce(orders, settings)
    return {workload.name: len(workload.cells) for workload in workloads}


def _measure_as_given(workload: Workload, settings: Settings) -> None:
    if workload.failure:
        return
    session = workload.session
    if settings.is_shared:
        if any(trial.status == "failed" for trial in session.study.trials() if not trial.recipe.levels):
            with one_at_a_time(session):  # a failed trial cannot be claimed: each worker tries again by itself
                session.measure([Recipe()])
        else:
            measure_shares(session, [Recipe()], 1, math.inf)
    with _in_turn(session, settings):
        if not session.measure([Recipe()])[0].ok:
            workload.failure = f"as given it does not run: {workload.known[Recipe()].reason}"
    session.held.close()  # the next workload may need the memory


@contextlib.contextmanager
def _in_turn(session: Session, settings: Settings) -> Iterator[None]:
    """In a storage that others have, too: a ladder has its device to itself, and knows what others have measured."""
    if settings.storage is None or settings.is_shared:
        yield
        return
    asked = time.monotonic()
    with one_at_a_time(session):
        budget = session.costs.budget
        if budget.seconds is not None:  # waiting for another worker is not counted
            budget = replace(budget, seconds=budget.seconds + time.monotonic() - asked)
            session.costs = replace(session.costs, budget=budget)
        session.refresh()
        yield


def _leave(session: Session, share: float) -> None:
    """Leave a workload, or a search, this share of the time that is left."""
    budget = session.costs.budget
    if budget.seconds is not None:
        session.costs = replace(session.costs, budget=replace(budget, seconds=budget.elapsed_s + share * budget.left_s))


def _plan(workloads: Sequence[Workload], settings: Settings, began: float) -> Plan:
    """How many recipes are to be measured and how long that takes; with a budget no more than fit."""
    running = [workload for workload in workloads if not workload.failure]
    parts: list[Part] = []
    notes = []
    for place, workload in enumerate(running):
        session, left_s = workload.session, math.inf
        if settings.budget_s is not None:
            spent_s = time.monotonic() - began + sum(part.seconds for part in parts)
            left_s = max(0.0, settings.budget_s - spent_s) / (len(running) - place)
        if settings.design in designs.STEPS:
            most = designs.about(settings.design, workload.space, settings.start)
            known = min(most, len(workload.trials()))
            each_s = session.rules.replicates * session.costs.seconds_for(Recipe(), settings.rounds)
            larger = 0 if settings.grow_batch is None else most * about_tries(settings.grow_batch)
            grew = min(larger, sum(batch_factor(recipe) > 1 for recipe in workload.known))
            # The workload as given is started anew beside each larger batch.
            seconds = (most - known + 2 * (larger - grew)) * each_s
            parts.append(Part(workload.name, most + larger, known + grew, min(seconds, left_s)))
            continue
        whole = len(workload.cells)
        if settings.budget_s is not None:
            fit = designs.fitting(_seconds(workload, settings), left_s)
            if fit < len(workload.unknown()):
                measured = [cell for cell in workload.cells if cell in workload.known]
                unknown = [Recipe(), *workload.unknown()]
                more = designs.fewer(settings.design, workload.space, unknown, fit + 1)
                workload.cells = list(dict.fromkeys([*measured, *more]))
                notes.append(f"{workload.name}: {len(workload.cells)} of {whole} combinations fit into the budget")
        left = workload.unknown()
        parts.append(Part(workload.name, len(workload.cells), len(workload.cells) - len(left),
                          sum(_seconds(workload, settings))))  # fmt: skip
    return Plan(settings.design, tuple(parts), tuple(notes))


def _seconds(workload: Workload, settings: Settings) -> list[float]:
    """What each unknown cell is expected to take, its share of what runs in each race beside it in it."""
    costs, replicates = workload.session.costs, workload.session.rules.replicates
    beside_s = 2 * settings.rounds * (costs.seconds_for(Recipe(), 1) - costs.seconds_for(Recipe(), 0)) / TOGETHER
    return [replicates * each_s + beside_s for each_s in costs.seconds_for_each(workload.unknown(), settings.rounds)]


def _measure(workload: Workload, settings: Settings) -> None:
    session, space = workload.session, workload.space
    if settings.design == "ladder":
        for step in steps(space, session, start=settings.start):
            workload.steps.append(step)  # one by one: an interrupt leaves those before it
        if settings.grow_batch is not None:
            for recipe in [step.trial.recipe for step in workload.steps if step.trial.status != "failed"]:
                workload.grown[recipe] = grown(session, recipe, settings.grow_batch)
        return
    if settings.design == "ablation":
        start = settings.start
        if start is None:
            whole = session.costs.budget
            _leave(session, 0.5)
            searched = auto(space, session, guide=workload.guide)
            start = searched.recipe if searched else Recipe()
            session.costs = replace(session.costs, budget=whole)
        try:
            workload.steps = removals(space, session, start)
        except KeyboardInterrupt:  # its trials are kept: without time left the answer is made of those
            session.costs = replace(session.costs, budget=replace(session.budget, seconds=0.0))
            workload.steps = removals(space, session, start)
            raise
        return
    if settings.is_shared:
        measure_shares(session, workload.cells, TOGETHER, session.costs.budget.end)
    while not settings.is_shared and (left := workload.unknown()):
        before = len(left)
        if settings.budget_s is not None:
            left = left[: designs.fitting(_seconds(workload, settings), session.costs.budget.left_s)]
        if not session.measure(left[:TOGETHER]) or len(workload.unknown()) == before:
            break
    if settings.budget_s is not None and (left := workload.unknown()):
        count = f"{len(left)} of {len(workload.cells)} combinations"
        session.remark(f"{workload.name}: the budget was used up before {count} could be measured")


def _foreseen(guide: Guide, workload: Workload) -> list[str]:
    """What the atlas expected and what was found."""
    foreseen = {one.recipe for one in guide.foreseen}
    guide.look_back(trial for recipe, trial in workload.known.items() if recipe not in foreseen)
    return [f"{workload.name}: {line}" for line in guide.summary()]
