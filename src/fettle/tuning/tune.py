"""The main job, from a workload to a verified recipe. Read `tune` and you know the system.

probe (facts, reference) -> space of recipes -> design -> races -> trials in the study -> a last, fresh race -> result
"""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fettle.atlas import Row, read_atlas, subject
from fettle.machine import Machine, this_machine
from fettle.measure import close_all, fetching
from fettle.recipe import Recipe
from fettle.search import DESIGNS, Guide, auto, holds
from fettle.techniques import factors, keeps_memory
from fettle.train import target_of, workload_of
from fettle.tuning._arguments import check_options, check_ranks, check_techniques, live_folder, open_nodes, writable
from fettle.tuning._budget import ROUNDS
from fettle.tuning._events import OnProgress
from fettle.tuning._final_race import FinalRace, final_race
from fettle.tuning._outcome import outcome
from fettle.tuning.options import Keywords, Options, options_of
from fettle.tuning.session import Session
from fettle.tuning.space import space_for
from fettle.units import count_text

if TYPE_CHECKING:
    from fettle.report import Result


def tune(
    model: Any,
    inputs: Any = None,
    *,
    call: Callable[..., Any] | None = None,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    options: Options | None = None,
    on_progress: OnProgress | None = None,
    command: str = "",
    **keywords: Unpack[Keywords],
) -> Result:
    """Find the fastest recipe for a workload that keeps its answers and the user's limits.

    ```python
    result = fettle.tune(model, batches, max_error=0.02, budget_s=60)
    fast = result.apply(model)
    ```

    `model` is a module (or any callable) with `inputs`: a list of batches, one batch (a tensor, a tuple of positional
    arguments, a dict of keyword arguments) or a DataLoader. `call` and `metric` are those of `fettle.Workload`. Or it
    is a `Workload`, a `TrainingWorkload`, or the text ``"file.py:factory"``, which brings its own.

    Goal, limits, budget and what may be tried are keywords, the fields of `fettle.Options` and of `fettle.Limits`; they
    stand above those of an `options` object. Trials are kept in the study under ``output`` (or at ``storage``), so the
    same call goes on after an interrupt; where model or inputs were edited meanwhile it begins a study beside the old
    one. `on_progress` is called with each `fettle.Event`; without it progress is shown on a terminal or in a notebook.

    Where the workload is a `fettle.TrainingWorkload` one call is one optimizer step, and the guard is on its losses
    (`Limits.max_spread`). With ``nproc`` parallel strategies over so many ranks of this machine are tried as well, for
    inference tensor parallelism. With ``nodes`` so many machines train with ``nproc`` ranks each: this one, which the
    others reach at ``listen``, and those on which ``fettle join HOST:PORT`` runs; the target must lie at the same place
    on all.

    Returns a `Result`; ``result.apply(model)`` gives the tuned callable. Raises `UsageError` for bad input.
    """
    from fettle.report import progress  # brings the charts' library, which other users of this room do not need

    started = time.monotonic()
    options = options_of(options, keywords)
    allowed = check_techniques(options.techniques)
    check_options(options)
    rows = read_atlas(options.atlas) if options.atlas is not None else ()
    folder = writable(options.output)
    options = replace(options, output=folder)
    subject = workload_of(model, inputs, call, metric, options.mode)
    machine = this_machine()
    with ExitStack() as ends:
        live = live_folder(folder / "cache")
        ends.callback(lambda: shutil.rmtree(live, ignore_errors=True))
        target = check_ranks(options, target_of(subject, live))
        others = open_nodes(options, target)
        if others is not None:
            ends.callback(others.close)
        on_progress = on_progress or ends.enter_context(progress(lines=False))
        session = Session(target, options, on_progress, nodes=others, started=started)
        ends.callback(session.let_go)
        ends.callback(close_all)
        if others is not None:
            others.gather(session.report)
        session.report("building the workload and its reference")
        session.search_in_forks()
        session.open(machine)
        memory_counts = options.goal == "memory" or options.limits.max_memory_bytes is not None
        space, left_out = space_for(
            session.facts, allowed, session.plan.rules_out, session.costs.of, memory_counts=memory_counts
        )
        session.standings.allowed = functools.partial(holds, space)
        interrupted, last = False, FinalRace()
        try:
            session.measure([Recipe()])
            session.look_at_baseline()
            if options.design == "auto":
                guide = guide_for(session, rows, options.atlas, machine) if options.atlas is not None else None
                auto(space, session, first=_advised(session, options.first), guide=guide)
                session.notes += guide.summary() if guide is not None else ()
            else:
                DESIGNS[options.design](space, session)
            last = final_race(session, space)
            interrupted = last.interrupted
        except KeyboardInterrupt:
            interrupted = True  # what is done is kept, and shown
        machine = replace(machine, peaks=session.probed.peaks)
        result = outcome(session, last, left_out, machine, command, interrupted)
    object.__setattr__(result, "workload", subject)
    return result


def _advised(session: Session, first: Sequence[str]) -> list[str]:
    """The techniques that were named, then those that the first look advised, the most promising first."""
    baseline = session.standings.known.get(Recipe())
    memory = keeps_memory(session.facts) if baseline is not None and fetching(baseline.slices) else ()
    wanted = dict.fromkeys([*first, *memory, *(name for item in session.probed.advice for name in item.levels)])
    known = [(name, technique.name) for name, technique, _ in factors(session.facts)]  # a part's bear the same advice
    return [name for one in wanted for name, technique in known if one in (name, technique)]


_TIMES = ("throughput", "latency")


def guide_for(session: Session, rows: Sequence[Row], atlas: Path | str, machine: Machine) -> Guide | None:
    """A guide for the search from the rows of an atlas. None, with a note, where it has nothing to say.

    The workload as given must have been measured.
    """
    if session.standings.goal not in _TIMES:
        session.notes.append(f"The atlas {atlas} was not used: it foresees times, and the goal is another.")
        return None
    probed, facts = session.probed, session.facts
    from fettle.atlas.prediction import Predictor  # brings SciPy's linear algebra, and few have an atlas

    about = subject(session.target.name, session.study.version, probed.facts, probed.features, machine, probed.peaks)
    judged = facts.mode == "inference" and not facts.by_metric
    predictor = Predictor(rows, about, max_error=facts.max_error if judged else None,
                          guess_s=lambda recipe: session.costs.seconds_for(recipe, ROUNDS))  # fmt: skip
    if not len(predictor):
        session.notes.append(f"The atlas {atlas} has no trial of such a workload ({predictor.about.mode} on "
                             f"{predictor.about.device}).")  # fmt: skip
        return None
    session.note(f"atlas: {count_text(len(predictor), 'trial')} of {count_text(predictor.models, 'model')}")
    return Guide(predictor, session.note)
