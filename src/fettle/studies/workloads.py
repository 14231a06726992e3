"""The workloads of a study: each target with each combination of its factory's arguments, with its own reference and
its own trials in the storage; and the environments that it has as a factor."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from fettle.errors import UsageError
from fettle.machine import Machine, installed
from fettle.measure import Trial
from fettle.procs.interpreter import Interpreter, find_interpreters, look
from fettle.procs.limits import allow_open_files
from fettle.recipe import Recipe, technique_and_part
from fettle.search import Guide, Space, Step, is_sampled
from fettle.studies import designs
from fettle.studies.batches import Grown, check_growth
from fettle.studies.settings import Settings
from fettle.studies.table import MACHINE
from fettle.study import OtherWorkload
from fettle.techniques import CATALOGUE, PYTHON, Facts, check_names, factors
from fettle.tuning import Event, OnProgress, Options, Session, check_options, check_techniques, space_for, writable
from fettle.workload import Target, check_mode, find_target

REPLICATES = 2
"""Processes of each recipe where a design has no repeats hidden in it."""
_MOST = 10_000
"""Workloads of one study."""
_PACKAGES = {"torch", "numpy", "transformers", *(name for one in CATALOGUE for name in one.packages)}
"""Whose versions tell environments apart."""


@dataclass
class Workload:
    """One target with its arguments, opened."""

    group: str
    arguments: Mapping[str, str]
    session: Session
    space: Space = field(default_factory=lambda: Space({}, lambda recipe: ""))
    cells: Sequence[Recipe] = ()
    failure: str = ""
    steps: list[Step] = field(default_factory=list)
    grown: dict[Recipe, Grown] = field(default_factory=dict)
    guide: Guide | None = None
    environments: Mapping[str, Interpreter] = field(default_factory=dict)
    """Those that are levels of a factor, by name, with what is installed in each."""

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
        """Trials of recipes in the space."""
        allowed = {(name, level) for name, levels in self.space.choices.items() for level in levels}
        return [trial for trial in trials if trial.recipe.levels.items() <= allowed]

    def unknown(self) -> list[Recipe]:
        """Cells that are not measured."""
        return [recipe for recipe in self.cells if recipe not in self.known]


@dataclass
class PlanProgress:
    """Passes events on with the plan's seconds, so that a bar shows how much is left."""

    on_progress: OnProgress
    began: float
    seconds: float | None = None

    def __call__(self, event: Event) -> None:
        self.on_progress(replace(event, elapsed_s=time.monotonic() - self.began, budget_s=self.seconds))


def _check(settings: Settings) -> None:
    designs.check(settings.design, settings.cells)
    check_mode(settings.mode)
    check_options(_options(settings))
    check_techniques(settings.techniques)
    if settings.only and not (settings.techniques or settings.order or settings.pythons or settings.arguments):
        raise UsageError("`only`: name the techniques that are varied, `technique='NAME=LEVEL,LEVEL'`")
    if settings.start is not None:
        check_names(settings.start.without(PYTHON.name))
        if settings.design not in (*designs.STEPS, "sensitivity"):
            raise UsageError(f"`recipe` is for a ladder, an ablation or a sensitivity, not `design={settings.design}`")
    known = {PYTHON.name, *(technique.name for technique in CATALOGUE)}
    if unknown := [name for name in settings.order if technique_and_part(name)[0] not in known]:
        raise UsageError(f"`order`: there is no technique {unknown[0]!r}")
    if settings.grow_batch is not None and settings.design != "ladder":
        raise UsageError("`grow_batch` is for a ladder: `design=ladder`")
    if settings.rounds < 3:
        raise UsageError(f"`rounds={settings.rounds}`: a time needs at least three")
    if MACHINE in settings.arguments:
        raise UsageError(f"`factor={MACHINE}`: that is what kinds of machines are called: rename the argument")
    for name, values in settings.arguments.items():
        if len(set(values)) < 2 or not name.isidentifier():
            raise UsageError(f"`factor={name}`: write NAME=VALUE,VALUE with an argument of the factory and two values")


def _targets(texts: Sequence[str], settings: Settings) -> list[tuple[str, Mapping[str, str], Target]]:
    """Every target with every combination of arguments: the group, the arguments, and the target that has them."""
    if not texts:
        raise UsageError("name a target, path/to/file.py:factory, or a table with `from_csv`")
    targets = {text: replace(find_target(text), mode=settings.mode) for text in texts}
    labels = labelled([target.name for target in targets.values()], settings.arguments)
    each = [target for target in targets.values() for _ in product(*settings.arguments.values())]
    return [
        (group, values, replace(target, name=name, arguments={key: _typed(text) for key, text in values.items()}))
        for (group, values, name), target in zip(labels, each, strict=True)
    ]


def labelled(names: Sequence[str], arguments: Mapping[str, Sequence[str]]) -> list[tuple[str, dict[str, str], str]]:
    """Every target with every combination of arguments: the group, the arguments, and the name of its study. Raises
    `UsageError` for more of them than anybody measures."""
    if len(names) * math.prod(map(len, arguments.values())) > _MOST:
        raise UsageError(
            f"the targets with the values of their factories' arguments make more than {_MOST:,} workloads: vary "
            "fewer arguments, or give fewer values of each"
        )
    rows = []
    groups: list[str] = []
    for own in names:
        alike = sum(group == own or group.startswith(f"{own}#") for group in groups)
        groups.append(f"{own}#{alike + 1}" if alike else own)
        for values in product(*arguments.values()):
            chosen = dict(zip(arguments, values, strict=True))
            name = "-".join([groups[-1], *(f"{key}{value}" for key, value in chosen.items())])
            rows.append((groups[-1], chosen, name))
    return rows


def _typed(text: str) -> bool | int | float | str | None:
    """As Python would read it: the text ``False`` would be true."""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def workloads_of(targets: Sequence[str], settings: Settings, progress: PlanProgress) -> list[Workload]:
    """The workloads of a study, not yet opened. Raises `UsageError` for bad input."""
    _check(settings)
    interpreters, wanted = find_interpreters(settings.pythons), _targets(targets, settings)
    named = settings.start.levels.get(PYTHON.name, PYTHON.default) if settings.start is not None else PYTHON.default
    if named not in (PYTHON.default, *(one.name for one in interpreters)):
        raise UsageError(f"`recipe`: there is no environment {named!r}: name it, `python='{named}=PATH'`")
    allow_open_files()  # each workload has its storage and its lock open
    folder = writable(settings.output)
    link = folder / "cache" / "source"
    link.mkdir(parents=True, exist_ok=True)
    environments = {one.name: look(one, _PACKAGES, link) for one in interpreters}
    return [
        Workload(group, arguments, _session(target, folder, settings, progress), environments=environments)
        for group, arguments, target in wanted
    ]


def differences(environments: Iterable[Interpreter]) -> list[str]:
    """What each has that ours has not, for people."""
    lines = []
    ours = {"python": platform.python_version(), **installed(sorted(_PACKAGES))}
    for one in environments:
        other = [f"{name} {version}" for name, version in one.versions.items() if version != ours.get(name)]
        other += [f"no {name}" for name in ours if name not in one.versions]
        what = one.problem or ", ".join(other) or "the same versions as here"
        lines.append(f"{PYTHON.name}={one.name} is {one.path}: {what}")
    return lines


def _check_same(session: Session) -> None:
    """Raise `UsageError` where the study knows one of the names as another environment: its trials count for it."""
    for name, one in session.environments.items():
        now = {"path": one.path, "versions": dict(one.versions), "problem": one.problem}
        before = session.study.note(f"{PYTHON.name} {name}")
        if before is None:
            session.study.set_note(f"{PYTHON.name} {name}", now)
        elif before != now:
            raise UsageError(
                f"`python={name}`: {one.path} is not what was measured under that name in {session.folder}: give it "
                "another name, NAME=PATH, or choose another `output`"
            )


def _options(settings: Settings) -> Options:
    return Options(
        limits=settings.limits, output=settings.output, storage=settings.storage, confidence=settings.confidence,
        budget_s=settings.budget_s, trial_timeout_s=settings.trial_timeout_s, under_load=settings.under_load,
        polite=settings.polite,
    )  # fmt: skip


def _session(target: Target, folder: Path, settings: Settings, on_progress: PlanProgress) -> Session:
    name = f"{settings.name}/{target.name}" if settings.name else None
    options = replace(_options(settings), output=folder, study=name)
    session = Session(target, options, on_progress, started=on_progress.began)
    session.costs = replace(session.costs, confirms=False)
    return session


def _only(space: Space, named: set[str]) -> Space:
    """The space in which no technique varies but those that are named, by part or for all parts. What every recipe must
    have stays in it."""
    required = space.required.levels
    kept = {
        name: levels if named & {name, technique_and_part(name)[0]}
        else tuple(level for level in levels if level in (levels[0], required.get(name)))
        for name, levels in space.choices.items()
    }  # fmt: skip
    bundles = [one for one in space.bundles if all(level in kept[name] for name, level in one.levels.items())]
    return replace(space, choices=kept, bundles=bundles)


def _place(name: str, order: Sequence[str]) -> int:
    """Where a factor stands in an order that names it, or its technique for all parts; after all that do."""
    return next((place for place, one in enumerate(order) if one in (name, technique_and_part(name)[0])), len(order))


def _not_varied(settings: Settings, space: Space, facts: Facts) -> Iterator[str]:
    """What was asked for by name and cannot be had here, for people."""
    for asked, levels in check_techniques(settings.techniques).items():
        own = [(technique, one) for name, technique, one in factors(facts) if asked in (name, technique.name)]
        for level in levels:
            reasons = [technique.why_not(level, one) for technique, one in own]
            if reasons and all(reasons):
                yield f"{asked}={level} cannot be used here: {reasons[0]}"
    for asked in settings.order:
        if not any(len(space.choices[name]) > 1 for name in space.choices if _place(name, [asked]) == 0):
            yield f"{asked} has no level that could be varied here"


def open_workload(workload: Workload, settings: Settings, machine: Machine) -> None:
    """Probe the workload, and say which recipes are to be measured."""
    session = workload.session
    try:
        session.report(f"building {workload.name} and its reference")
        session.environments = workload.environments
        session.open(machine)
        _check_same(session)
        if settings.grow_batch is not None:
            check_growth(session, settings.grow_batch)
        workload.space = _space(workload, settings)
        if settings.design == "ladder" or (settings.design in designs.STEPS and settings.start is not None):
            designs.beginning(workload.space, settings.start or Recipe())
        if settings.design not in designs.STEPS:
            workload.cells = designs.cells(
                settings.design, workload.space, settings.start or Recipe(), settings.cells,
                least=1 if settings.arguments else 2,
            )  # fmt: skip
        if settings.design == "factorial" and is_sampled(workload.space):
            drawn = len(workload.cells)
            session.remark(f"{workload.name}: too many combinations to list; {drawn} drawn at random stand for all")
    except OtherWorkload:
        raise
    except UsageError as error:
        workload.failure = str(error)
        return
    replicates = REPLICATES if settings.design in designs.STEPS else 1
    session.rules = replace(session.rules, equal_rounds=settings.rounds, replicates=replicates)
    if clash := [name for name in settings.arguments if len(workload.space.choices.get(name, ())) > 1]:
        raise UsageError(
            f"`factor={clash[0]}`: a technique of that name is varied too: pin it, `technique='{clash[0]}=LEVEL'`, or "
            "rename the argument"
        )


def _space(workload: Workload, settings: Settings) -> Space:
    """What varies here, in the order of the ladder; what was asked for and does not is said."""
    session, allowed = workload.session, check_techniques(settings.techniques)
    space, _ = space_for(session.facts, allowed, session.plan.rules_out, session.costs.of)
    if settings.only:
        space = _only(space, {*allowed, *settings.order})
    choices = {PYTHON.name: (PYTHON.default, *workload.environments), **space.choices}
    for name, level in settings.start.levels.items() if settings.start is not None else ():
        if level not in choices.get(name, (level,)):  # it was not named, or is one that nobody offers
            choices[name] = (*choices[name], level)
    names = sorted(choices, key=lambda name: _place(name, settings.order))
    space = replace(space, choices={name: choices[name] for name in names})
    for text in _not_varied(settings, space, session.facts):
        session.remark(f"{workload.name}: {text}")
    return space
