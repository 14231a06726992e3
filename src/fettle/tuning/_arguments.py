"""What `tune` is given, checked: one clear line for each thing that cannot be."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fettle.errors import UsageError
from fettle.procs.nodes import Nodes, address_of
from fettle.recipe import Recipe
from fettle.result import Goal, Limits
from fettle.search import DESIGNS
from fettle.techniques import check_names
from fettle.workload import Target, Workload, as_batches, check_mode, find_target, target_from_objects

GOALS: tuple[Goal, ...] = ("throughput", "latency", "memory", "energy", "startup")


def target_of(
    model: Any,
    inputs: Any,
    call: Callable[..., Any] | None,
    metric: Callable[[Callable[..., Any]], float] | None,
    folder: Path,
    mode: str = "inference",
) -> Target:
    from fettle.train import TrainingWorkload

    check_mode(mode)
    if isinstance(model, TrainingWorkload):
        if mode != "training":
            raise UsageError("a TrainingWorkload is tuned with mode='training'")
        return replace(target_from_objects(model, folder / "cache"), mode=mode)
    if mode == "training" and not isinstance(model, (str, Target)):
        raise UsageError("training needs a fettle.TrainingWorkload(model, optimizer, loss, data), or 'file.py:factory'")
    if isinstance(model, Target):
        return replace(model, mode=mode)
    if isinstance(model, str):
        if inputs is not None:
            raise UsageError("inputs belong to a live model; the factory of a target gives its own")
        return replace(find_target(model), mode=mode)
    if not isinstance(model, Workload):
        if inputs is None:
            raise UsageError("give sample inputs: fettle.tune(model, [batch])")
        model = Workload(model, as_batches(inputs), call, metric)
    return target_from_objects(model, folder / "cache")


def check_limits(limits: Limits, goal: str, budget_s: float | None, design: str) -> None:
    if goal not in GOALS:
        raise UsageError(f"unknown goal {goal!r}: there are {', '.join(GOALS)}")
    if design not in DESIGNS:
        raise UsageError(f"unknown design {design!r}: there are {', '.join(DESIGNS)}")
    checks = {
        "max error": limits.max_error, "max latency": limits.max_latency_ms, "max memory": limits.max_memory_bytes,
        "budget": budget_s, "min throughput": limits.min_throughput,
    }  # fmt: skip
    for name, value in checks.items():
        if value is not None and not value > 0:
            raise UsageError(f"an impossible limit: {name} must be above 0, and is {value:g}")
    if limits.min_agreement is not None and not 0 <= limits.min_agreement <= 1:
        raise UsageError(f"an impossible limit: min agreement is a share between 0 and 1, not {limits.min_agreement:g}")
    if limits.max_metric_drop is not None and not limits.max_metric_drop >= 0:
        raise UsageError(f"an impossible limit: max metric drop must not be below 0, and is {limits.max_metric_drop:g}")


def check_ranks(nproc: int, nodes: int, listen: str, device_memory_bytes: int | None, mode: str) -> None:
    if isinstance(nproc, bool) or not 1 <= nproc <= 1024:
        raise UsageError(f"--nproc {nproc}: give the number of ranks on this machine, 1 to 1024")
    if nproc > 1 and mode != "training":
        raise UsageError("--nproc is for training: add --mode training")
    if isinstance(nodes, bool) or not 1 <= nodes <= 1024:
        raise UsageError(f"--nodes {nodes}: give the number of machines, 1 to 1024")
    if nodes > 1 and mode != "training":
        raise UsageError("--nodes is for training: add --mode training")
    if (nodes > 1) != bool(listen):
        raise UsageError(
            "--nodes and --listen go together: --nodes 2 --listen HOST:PORT, where the others reach this one"
        )
    if device_memory_bytes is not None and device_memory_bytes <= 0:
        raise UsageError("an impossible limit: device memory must be above 0")


def open_nodes(nodes: int, listen: str, target: Target) -> Nodes | None:
    """Listen for the other nodes; None where there are none."""
    if nodes == 1:
        return None
    if target.is_live:
        raise UsageError("other nodes cannot have live objects: give a factory that each can import, 'file.py:factory'")
    return Nodes(nodes, *address_of(listen, "--listen"))


def check_techniques(allowed: Mapping[str, str | Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """The user's choice of levels, one or several each; raises `UsageError` for what the catalogue does not have."""
    if not isinstance(allowed, Mapping):
        raise UsageError('techniques is a mapping of names to levels, for example techniques={"precision": ["bf16"]}')
    found = {name: [levels] if isinstance(levels, str) else list(levels) for name, levels in allowed.items()}
    for name, levels in found.items():
        if not levels:
            raise UsageError(f"no level of {name} is allowed: name one at least, or leave {name} out")
        for level in levels:
            check_names(Recipe({name: level}))
    return found


def check_measuring(confidence: float, trial_timeout_s: float) -> None:
    if not 0.5 <= confidence < 1:
        raise UsageError(f"the confidence is a share from 0.5 to below 1, not {confidence:g}")
    if not trial_timeout_s >= 1:
        raise UsageError(f"an impossible limit: the trial timeout must be 1 s or more, and is {trial_timeout_s:g} s")


def writable(folder: Path) -> Path:
    """The folder, made if need be, as a full path. Raises `UsageError` when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to the output folder {folder}: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"cannot write to the output folder {folder}: permission denied")
    return folder.resolve()
