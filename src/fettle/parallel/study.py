"""The memory plan as a study uses it: which strategies it asks about, and which recipes the plan rules out.

A study's ranks share the batches as given, so one rank's batch is a share of the workload's: all of it where all ranks
hold slices of the same layers.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from fettle.errors import UsageError
from fettle.parallel.plan import Plan, build_fake, cheapest, plan
from fettle.parallel.strategies import KINDS, Strategy, mesh_shape, parse_strategy, row_shares
from fettle.techniques import find, repeated_blocks, tensor_plan
from fettle.units import size_text
from fettle.workload import Target, map_tensors, rows_of


def plan_for_study(target: Target, ranks: int, device_memory_bytes: int | None, nodes: int = 1) -> tuple[Plan, str]:
    """Plan each strategy for `ranks` ranks that share the workload's batch; (plan, note of how it was built)."""
    workload, mode, note = build_fake(target)
    rows, per_node = rows_of(workload.first), max(1, ranks // nodes)
    whole = dataclasses.replace(workload, name=workload.name or target.name)
    device = next(workload.model.parameters()).device.type
    options: dict[str, Any] = {"device_memory_bytes": device_memory_bytes, "device": device, "mode": mode,
                               "ranks_per_node": per_node}  # fmt: skip
    strategies = _strategies_for(workload.model, ranks, per_node)
    by_shares: dict[int, list[Strategy]] = defaultdict(list)
    for strategy in strategies:
        by_shares[row_shares(strategy, ranks, per_node)].append(strategy)

    def planned(shares: int, alike: list[Strategy]) -> Plan:
        def share(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[: max(1, rows // shares)] if tensor.dim() and tensor.shape[0] == rows else tensor

        with mode:
            part = map_tensors(share, workload.first)
        return plan(dataclasses.replace(whole, data=[part], samples=None), ranks, strategies=alike, **options)

    plans = [planned(shares, alike) for shares, alike in by_shares.items()]
    found = {each.strategy: each for made in plans for each in made.predictions}
    predictions = tuple(found[str(strategy)] for strategy in strategies)
    return dataclasses.replace(plans[0], predictions=predictions, cheapest=cheapest(predictions, ranks)), note


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


def _strategies_for(model: torch.nn.Module, ranks: int, ranks_per_node: int) -> list[Strategy]:
    texts = [*KINDS, "zero3 offload=cpu"]
    if repeated_blocks(model):
        texts += [f"{kind} checkpoint=block" for kind in ("ddp", "zero3")]
    split = tensor_plan(model)

    def can_split(strategy: Strategy) -> bool:
        try:
            return not split.why_not_over(mesh_shape(strategy, ranks, ranks_per_node)["tensor"])
        except UsageError:  # no mesh of so many ranks
            return False

    strategies = [parse_strategy(text) for text in texts]
    return [strategy for strategy in strategies if not strategy.split or can_split(strategy)]
