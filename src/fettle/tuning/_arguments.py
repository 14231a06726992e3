"""What `tune` is given, checked: one clear line for each thing that cannot be.

Arguments are named in back-quotes, as a caller in Python writes them; the command line shows them as its own options.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import psutil

from fettle.errors import UsageError, refusing
from fettle.measure import Worker
from fettle.procs.nodes import Nodes, address_of
from fettle.recipe import Recipe
from fettle.result import Goal, Limits
from fettle.search import DESIGNS
from fettle.techniques import CATALOGUE, check_names, respelled
from fettle.tuning.options import Options
from fettle.workload import AUTO, Target

GOALS: tuple[Goal, ...] = get_args(Goal)


def live_folder(cache: Path) -> Path:
    """A new folder for live objects: other studies may have theirs beside it at the same time. What processes of this
    machine that were killed have left there is deleted."""
    ours = f"live-{platform.node()}-"
    for left in cache.glob("live-*"):
        pid = left.name.removeprefix(ours).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    return cache / f"{ours}{os.getpid()}-{secrets.token_hex(4)}"


def check_options(options: Options) -> None:
    """Raise `UsageError` for what cannot be, whatever the workload is."""
    for given in (options, options.limits, options.effort):
        _check_types(given)
    if options.goal not in GOALS:
        raise UsageError(f"unknown goal {options.goal!r}: there are {', '.join(GOALS)}")
    if options.design not in DESIGNS:
        raise UsageError(f"unknown design {options.design!r}: there are {', '.join(DESIGNS)}")
    known = [technique.name for technique in CATALOGUE]
    if unknown := [name for name in options.first if name not in known]:
        raise UsageError(f"`first`: there is no technique {unknown[0]!r}")
    if options.atlas is not None and options.design != "auto":
        raise UsageError(f"`atlas` tells the design auto where to begin, and this is `design='{options.design}'`")
    _check_limits(options.limits)
    if options.budget_s is not None and not options.budget_s >= 0:
        raise UsageError(f"an impossible limit: budget must be above 0, or 0 for none, and is {options.budget_s:g}")
    if not 0.5 <= options.confidence < 1:
        raise UsageError(f"`confidence` is a share from 0.5 to below 1, not {options.confidence:g}")
    effort = options.effort
    if effort.rounds < 3:
        raise UsageError("`rounds` must be 3 or more: an interval needs them")
    if not 0.001 <= effort.slice_s <= 600 or effort.replicates < 1:
        raise UsageError(f"an impossible {effort}: a slice takes 1 ms to 600 s, and one process is the least")
    if not options.trial_timeout_s >= 1:
        raise UsageError(
            f"an impossible limit: the trial timeout must be 1 s or more, and is {options.trial_timeout_s:g} s"
        )


_NUMBERS = {int: Real, float: Real, bool: Integral}
"""What may stand for these, such as NumPy's."""


def _check_types(given: Any) -> None:
    """Raise `UsageError` for a field of a data class that is of another type than it says."""
    for name, kind in get_type_hints(type(given)).items():
        each = get_args(kind) if isinstance(kind, UnionType) else (kind,)
        types = [_NUMBERS.get(one, get_origin(one) or one) for one in each]
        value = getattr(given, name)
        if Literal not in types and not isinstance(value, tuple(types)):
            raise UsageError(f"`{name}` takes {type(given).__annotations__[name]}, not {value!r:.80}")


def _check_limits(limits: Limits) -> None:
    """Raise `UsageError` for limits that nothing could keep."""
    checks = {
        "max error": limits.max_error, "max kl": limits.max_kl, "max spread": limits.max_spread,
        "max latency": limits.max_latency_ms, "max memory": limits.max_memory_bytes,
        "min throughput": limits.min_throughput, "max ttft": limits.max_ttft_ms, "max tpot": limits.max_tpot_ms,
    }  # fmt: skip
    for name, value in checks.items():
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"an impossible limit: {name} must be above 0 and finite, and is {value:g}")
    if limits.min_agreement is not None and not 0 <= limits.min_agreement <= 1:
        raise UsageError(f"an impossible limit: min agreement is a share between 0 and 1, not {limits.min_agreement:g}")
    if limits.max_metric_drop is not None and not 0 <= limits.max_metric_drop < math.inf:
        raise UsageError(f"an impossible limit: max metric drop must not be below 0, and is {limits.max_metric_drop:g}")


def check_ranks(options: Options, target: Target) -> Target:
    """The target, for training where several machines are asked for: only that can use them."""
    nproc, nodes = options.nproc, options.nodes
    if isinstance(nproc, bool) or not 1 <= nproc <= 1024:
        raise UsageError(f"`nproc={nproc}`: give the number of ranks on this machine, 1 to 1024")
    if isinstance(nodes, bool) or not 1 <= nodes <= 1024:
        raise UsageError(f"`nodes={nodes}`: give the number of machines, 1 to 1024")
    if (nodes > 1) != bool(options.listen):
        raise UsageError(
            "`nodes` and `listen` go together: `nodes=2` and `listen='HOST:PORT'`, where the others reach this one"
        )
    if options.device_memory_bytes is not None and options.device_memory_bytes <= 0:
        raise UsageError("an impossible limit: device memory must be above 0")
    if options.device_memory_bytes is not None and nproc * nodes == 1:
        raise UsageError("`device_memory_bytes` is that of one of several ranks: say how many, `nproc=2`")
    if nodes == 1:
        return target
    if target.mode == AUTO:
        with Worker() as worker:
            target = replace(target, mode=worker.build(target, options.trial_timeout_s).mode)
    if target.mode != "training":
        raise UsageError(f"`nodes={nodes}` is for training, and this is a workload for inference")
    return target


def open_nodes(options: Options, target: Target) -> Nodes | None:
    """Listen for the other nodes; None where there are none."""
    if options.nodes == 1:
        return None
    if target.is_live:
        raise UsageError("other nodes cannot have live objects: give a factory that each can import, 'file.py:factory'")
    return Nodes(options.nodes, *address_of(options.listen, "`listen`"))


def check_techniques(allowed: Mapping[str, str | Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """The user's choice of levels, one or several each; raises `UsageError` for what the catalogue does not have."""
    if not isinstance(allowed, Mapping):
        raise UsageError('techniques is a mapping of names to levels, for example techniques={"precision": ["bf16"]}')
    chosen: dict[str, list[str]] = {}
    for name, levels in allowed.items():
        if not levels:
            raise UsageError(f"no level of {name} is allowed: name one at least, or leave {name} out")
        for level in [levels] if isinstance(levels, (str, int)) else levels:  # threads=2
            recipe = Recipe(respelled({name: str(level)}))
            check_names(recipe)
            for today, spelled in recipe.levels.items():
                chosen.setdefault(today, []).append(spelled)
    return chosen


def writable(folder: Path) -> Path:
    """The folder, made if need be, as a full path. Raises `UsageError` when nothing can be written there."""
    with refusing(f"cannot write to the output folder {folder}:", OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write to the output folder {folder}: permission denied")
    return folder.resolve()
