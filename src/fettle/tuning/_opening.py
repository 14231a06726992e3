"""What a workload that has been built means for its study: which study it is, its limits, and what to say about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from fettle.errors import UsageError
from fettle.journal import locked
from fettle.machine import Machine
from fettle.measure import Rules, messages
from fettle.procs.limits import total_memory_bytes
from fettle.result import Goal, Limits
from fettle.storage import storage_url
from fettle.study import Study
from fettle.techniques import Facts
from fettle.tuning._probe import Probed
from fettle.tuning.options import Options
from fettle.workload import Target

_MEASURED_APART = ("ttft", "tpot", "energy", "warm-startup")
"""Goals whose trials hold what those of others lack: they have studies of their own."""
OF_A_START = ("startup", "warm-startup")
"""Goals that a whole start of a process is measured for."""
_SLOW_TO_BUILD = 0.2
"""Share of the budget."""
_SMALL_SHARE = 1 / 32
"""Share of the memory: weights of no more than that may be built in processes side by side,"""
_MOST_ABREAST = 4
"""so many at most."""
_HIDES_TEXT = (
    "the workload's call lets the model generate, as one black box: with `new_tokens` in place of `call` text is taken "
    "apart, judged as such, and can be made much faster (fettle.GenerationWorkload)"
)
_HIDES_MODULES = (
    "the model is a plain callable around modules ({names}), whose mode, weights and layers no recipe can change: give "
    "the module itself, and how it is called as the workload's `call`, call(model, *args, **kwargs)"
)


def limits_of(built: messages.Built, options: Options) -> Limits:
    """The limits that such a workload is judged by. Raises `UsageError` where others were asked for."""
    if not built.writes and options.goal in ("ttft", "tpot"):
        raise UsageError(f"the goal {options.goal} is for a fettle.GenerationWorkload: give the workload new_tokens")
    return options.limits.of("text" if built.writes else "training" if built.mode == "training" else "inference")


def check_metric(limits: Limits, probed: Probed) -> None:
    """Raise `UsageError` for a limit on a metric that is not there, and where only one on the metric could judge."""
    if limits.max_metric_drop is not None and not probed.has_metric:
        raise UsageError("`max_metric_drop` needs a metric: give the workload one, Workload(..., metric=function)")
    others = (limits.max_error, limits.min_agreement)
    if probed.reference.only_metric and (limits.max_metric_drop is None or others != (None, None)):
        raise UsageError(
            "the model's output holds no tensor, so nothing but the metric can judge it: say how far it may fall, "
            "`max_metric_drop`, without `max_error` and `min_agreement`"
        )


def remarks(built: messages.Built, budget_s: float | None) -> Iterator[str]:
    """What the user should know of the workload before minutes are spent on it."""
    if built.hides_text:
        yield _HIDES_TEXT
    if built.hidden:
        yield _HIDES_MODULES.format(names=", ".join(built.hidden[:3]))
    if budget_s is not None and built.load_s > _SLOW_TO_BUILD * budget_s:
        yield (
            f"building the workload took {built.load_s:.0f} s of the budget of {budget_s:.0f} s, and each recipe's "
            "process builds it, too: let it keep what it makes (trained weights) in a file"
        )


def side_by_side(rules: Rules, facts: Facts, goal: Goal) -> Rules:
    """The rules with how many processes are made ready side by side: some of a small workload, where there are cores.
    They compile side by side where each has two, as Python and a C++ compiler take turns there."""
    memory = total_memory_bytes()
    if facts.device == "cuda" and torch.cuda.is_available():
        memory = min(memory, torch.cuda.get_device_properties(0).total_memory)
    small = facts.parameter_bytes <= _SMALL_SHARE * memory
    cores = facts.physical_cores if facts.ranks == 1 and small else 1
    most = min(_MOST_ABREAST, max(cores // 2, min(2, cores)))
    is_call = facts.mode == "inference" and not facts.generates and facts.device == "cpu"
    judges = 1 < most <= cores // 2 and is_call and goal not in OF_A_START
    return replace(rules, abreast=max(1, most), judges_abreast="replicates" if judges else "none")


def open_study(target: Target, built: messages.Built, options: Options, machine: Machine) -> tuple[Study, str]:
    """Open or resume a workload's study, by default its own, and say where it is not the one that it would have been.

    Live objects of one class are other workloads as soon as their weights are: each has a study of its own.
    """
    own = f"-{built.fingerprint[:8]}" if target.is_live else ""
    part = f"-{options.goal}" if options.goal in _MEASURED_APART else ""
    usual = target.name + own + part + "-under-load" * options.under_load
    name = options.study and options.study + part
    study = Study.open(
        name or usual, storage_url(options.storage, options.output), built.fingerprint, machine.id,
        structure=built.structure, beside=not name,
    )  # fmt: skip
    if study.name in (name, usual):
        return study, ""
    return study, (
        f"the model, its inputs or its metric are not those of the study {usual!r}: this is the study {study.name!r} "
        "beside it"
    )


def hold(study: Study, folder: Path) -> int:
    """Keep others from measuring a study of this folder until the descriptor is closed or this process ends: they would
    number their races alike, and what has one number is taken for one race. Raises `UsageError` where another does."""
    path = folder / f"{hashlib.sha256(study.name.encode()).hexdigest()[:16]}.lock"
    try:
        return locked(path)
    except BlockingIOError:
        why = "another fettle measures this study; wait for it, or give another `output` or `study`"
        raise UsageError(why) from None
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
