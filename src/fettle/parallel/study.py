"""The memory plan as a study uses it: which strategies it asks about, and which recipes the plan rules out.

A study's ranks share the batches as given, so one rank's batch is a share of the workload's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from fettle.parallel.plan import Plan, build_fake, plan
from fettle.parallel.strategies import KINDS, Strategy, parse_strategy
from fettle.techniques import find, repeated_blocks
from fettle.units import size_text
from fettle.workload import Target


def plan_for_study(target: Target, ranks: int, device_memory_bytes: int | None, nodes: int = 1) -> tuple[Plan, str]:
    """Plan each strategy for `ranks` ranks that share the workload's batch; (plan, note of how it was built)."""
    workload, mode, note = build_fake(target)
    rows = workload.rows

    def share(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: max(1, rows // ranks)] if tensor.dim() and tensor.shape[0] == rows else tensor

    with mode:
        part = tree_map_only(torch.Tensor, share, workload.first)
    whole = dataclasses.replace(workload, name=workload.name or target.name)
    device = next(workload.model.parameters()).device.type
    options: dict[str, Any] = {"device_memory_bytes": device_memory_bytes, "device": device, "mode": mode,
                               "ranks_per_node": max(1, ranks // nodes)}  # fmt: skip
    alone = plan(whole, ranks, strategies=[Strategy()], **options)
    plans = plan(dataclasses.replace(whole, data=[part]), ranks, strategies=_strategies_for(workload.model), **options)
    return dataclasses.replace(plans, predictions=(*alone.predictions, *plans.predictions)), note


def rules_out(made: Plan, levels: Mapping[str, str]) -> str:
    """Why the plan says that a recipe cannot fit, as a phrase; empty where it may.

    Where the plan knows all that the recipe does to memory its peak decides, else what no technique takes away: the
    parameters, gradients and optimizer state.
    """
    if made.device_memory_bytes is None:
        return ""
    settings = {name: find(name).strategy(level) for name, level in levels.items()}
    wanted = str(Strategy(**{name: value for one in settings.values() for name, value in (one or {}).items()}))
    prediction = next((each for each in made.predictions if each.strategy == wanted and not each.failed), None)
    if prediction is None:
        return ""
    most = made.device_memory_bytes * (1 - made.headroom)
    known = None not in settings.values()
    needs = prediction.peak_bytes if known else sum(prediction.states.values()) - prediction.host_bytes
    if needs <= most or any(level in find(name).shrinks_states for name, level in levels.items()):
        return ""
    what = "a rank's peak" if known else "a rank's parameters, gradients and optimizer state"
    return f"the plan says {what} of {size_text(needs)}, above {size_text(round(most))}"


def _strategies_for(model: torch.nn.Module) -> list[Strategy]:
    texts = [kind for kind in KINDS if kind != "single"]
    texts += ["zero3 offload=cpu"]
    if repeated_blocks(model):
        texts += [f"{kind} checkpoint=block" for kind in ("ddp", "zero3")]
    return [parse_strategy(text) for text in texts]
