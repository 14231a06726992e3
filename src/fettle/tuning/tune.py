"""The main job, from a workload to a verified recipe. Read `tune` and you know the system.

probe (facts, reference) -> space of recipes -> design -> races -> trials in the study -> a last, fresh race -> result
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fettle.machine import this_machine
from fettle.measure import close_all
from fettle.recipe import Recipe
from fettle.result import Goal, Limits, Result
from fettle.search import DESIGNS, auto
from fettle.study import storage_url
from fettle.tuning._arguments import (
    check_limits,
    check_measuring,
    check_ranks,
    check_techniques,
    open_nodes,
    target_of,
    writable,
)
from fettle.tuning._last_race import LastRace, last_race
from fettle.tuning._outcome import outcome
from fettle.tuning.session import Session, Tell
from fettle.tuning.space import space_for


def tune(
    model: Any,
    inputs: Any = None,
    *,
    call: Callable[..., Any] | None = None,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    goal: Goal = "throughput",
    max_error: float | None = 0.02,
    min_agreement: float | None = None,
    max_metric_drop: float | None = None,
    max_latency_ms: float | None = None,
    max_memory_bytes: int | None = None,
    min_throughput: float | None = None,
    budget_s: float | None = 900.0,
    techniques: Mapping[str, str | Sequence[str]] | None = None,
    allow_batch: bool = False,
    mode: str = "inference",
    max_spread: float = 1.0,
    nproc: int = 1,
    nodes: int = 1,
    listen: str = "",
    device_memory_bytes: int | None = None,
    design: str = "auto",
    output: str | Path = "fettle-out",
    storage: str | None = None,
    study: str | None = None,
    confidence: float = 0.95,
    trial_timeout_s: float = 900.0,
    under_load: bool = False,
    tell: Tell | None = None,
    command: str = "",
) -> Result:
    """Find the fastest recipe for a workload that keeps its answers and the user's limits.

    `model` is a module (or any callable) with `inputs`, a `Workload`, or the text ``"file.py:factory"``. The limits
    are those of `fettle.result.Limits`; `techniques` allows levels by technique, one level pins it. Trials are kept in
    the study under `output` (or at `storage`), so the same call goes on after an interrupt. `tell` is called with each
    `Event`; without it the progress is shown on a terminal or in a notebook.

    With ``mode="training"`` the workload is a `fettle.TrainingWorkload` and one call is one optimizer step. The
    guard is then on its losses: their mean distance from the baseline's may be `max_spread` times the typical
    distance of two seeds; with `max_metric_drop` the workload's metric after these steps decides instead. With `nproc`
    parallel strategies over so many ranks of this machine are tried as well; the memory plan leaves out what does not
    fit into `device_memory_bytes` (a GPU's own memory, or a rank's share of this machine's, unless given). With `nodes`
    so many machines have `nproc` ranks each: this one, which the others reach at `listen` (``"host:port"``), and those
    on which ``fettle join host:port`` runs; the target must lie at the same place on all.

    The recipe is the one for a quiet machine. With `under_load` it is the fastest beside whatever else this machine
    does: time elapsed decides.

    Returns a `Result`; ``result.apply(model, inputs)`` gives the tuned callable. Raises `UsageError` for bad input.
    """
    from fettle.report import progress  # brings the charts' library, which other users of this room do not need

    started = time.monotonic()
    folder = writable(Path(output))
    target = target_of(model, inputs, call, metric, folder, mode)
    if mode == "training":
        max_error = max_spread if max_metric_drop is None else None
    limits = Limits(max_error, min_agreement, max_metric_drop, max_latency_ms, max_memory_bytes, min_throughput)
    check_limits(limits, goal, budget_s, design)
    check_measuring(confidence, trial_timeout_s)
    check_ranks(nproc, nodes, listen, device_memory_bytes, mode)
    allowed = check_techniques(techniques or {})
    machine = this_machine()

    watched = ExitStack()
    tell = tell or watched.enter_context(progress(lines=False))
    others = open_nodes(nodes, listen, target)
    session = Session(target, folder, limits, goal, budget_s, started, tell, confidence, trial_timeout_s,
                      nproc=nproc, nodes=others, device_memory_bytes=device_memory_bytes,
                      under_load=under_load)  # fmt: skip
    try:
        if others is not None:
            others.gather(session.tell)
        session.tell("building the workload and its reference")
        session.open(study or "", storage_url(storage, folder), machine, allow_batch)
        space, left_out = space_for(session.facts, allowed, session.plan.rules_out, session.cost)
        interrupted = False
        try:
            session.measure([Recipe()])
            session.look_at_baseline()
            if design == "auto":
                auto(space, session, first=_advised(session))
            else:
                DESIGNS[design](space, session)
        except KeyboardInterrupt:
            interrupted = True  # what is done is kept, and shown
        last = LastRace() if interrupted else last_race(session, space)
        machine = replace(machine, peaks=session.probed.peaks)
        result = outcome(session, last, left_out, machine, command, interrupted)
    finally:
        close_all()
        if others is not None:
            others.close()
        watched.close()
    return result


def _advised(session: Session) -> list[str]:
    """The techniques that the first look advised, the most promising first."""
    return list(dict.fromkeys(name for item in session.probed.advice for name in item.levels))
