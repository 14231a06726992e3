"""A study as its storage has it, for a machine that took no part: nothing is built, run or written there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fettle.errors import UsageError
from fettle.measure import Trial
from fettle.storage import check_there, hidden, storage_url
from fettle.studies.orders import begun, orders_of
from fettle.studies.outcome import Done, Measured, table_of
from fettle.studies.settings import Settings
from fettle.studies.sharing import labels, shares
from fettle.studies.workloads import labelled
from fettle.techniques import PYTHON, find, known_levels
from fettle.tuning import recalled, studies_in
from fettle.units import count_text


def stored(settings: Settings) -> Done:
    """What the study of that name and storage has measured by now, on all machines, by all workers.

    The name is that of a study for workers, or of one workload's study. Raises `UsageError` where there is none.
    """
    name, url = settings.name, storage_url(settings.storage, settings.output)
    check_there(url)
    orders = orders_of(name, url) if name in begun(url) else None
    wanted = {name: (name, dict[str, str]())}
    if orders is not None:
        wanted = {f"{name}/{own}": (group, values) for group, values, own in labelled(orders.names, orders.arguments)}
    studies = [(study, machine) for study, machine in studies_in(url, wanted) if study.trials()]
    if not studies:
        there = sorted({*begun(url), *(study.name for study, _ in studies_in(url) if "/" not in study.name)})
        if name in there:
            raise UsageError(f"the study {name!r} in {hidden(url)} has no results yet")
        raise UsageError(
            f"there is no study {name!r} in {hidden(url)}; there are: {', '.join(map(repr, there)) or 'none'}"
        )
    names = labels([machine for _, machine in studies])
    measured, notes, going = [], [], 0
    for study, machine in studies:
        trials = recalled(study, None)
        group, arguments = wanted[study.name]
        measured.append(Measured(group, arguments, _choices(trials), trials, names[machine.id], study.hosts()))
        notes += shares(f"{study.name} on {names[machine.id]}", study.workers())
        going += study.claimed()
    count = sum(len(one.trials) for one in measured)
    measuring = f", {going} being measured" if going else ""
    notes.insert(0, f"read from {hidden(url)}: {count_text(count, 'experiment')}{measuring}")
    seconds = sum(study.seconds for study, _ in studies)
    return Done(
        orders.design if orders is not None else "study", table_of(measured, orders.arguments if orders else {}), {},
        studies[0][1], seconds, False, tuple(notes),
    )  # fmt: skip


def _choices(trials: Iterable[Trial]) -> Mapping[str, Sequence[str]]:
    """Levels by technique, the default first, as far as they were tried. One that was pinned is a factor too: the
    workload as given is without it."""
    tried: dict[str, set[str]] = {}
    for trial in trials:
        for name, level in trial.recipe.levels.items():
            tried.setdefault(name, set()).add(level)
    order = {**known_levels(), PYTHON.name: sorted(tried.get(PYTHON.name, ()))}
    choices = {}
    for name in sorted(tried, key=lambda one: list(order).index(find(one).name)):
        levels = [level for level in order[find(name).name] if level in tried[name]]
        levels += sorted(tried[name].difference(levels))
        choices[name] = [find(name).default, *levels]
    return choices
