"""The memory plan: what each parallel strategy would hold at its peak on one rank, before anything is launched.

One training step runs under fake tensors, which have shapes and lifetimes and no memory, in this one process, as
rank 0 of a process group that only pretends to communicate. FSDP2 runs its real code there. DDP's reducer is C++ and
takes no fake tensors, so its buckets and ZeRO-1's partition are laid out here by the rules that PyTorch documents.

Not counted: the CUDA context, NCCL's buffers, fragmentation, and what a kernel allocates inside itself (but for
convolutions on a CPU, each of which is tried once). That is what the headroom is for.
"""

from __future__ import annotations

import gc
import os
from collections import Counter, UserDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor

from fettle.errors import UsageError, first_line
from fettle.parallel import formulas
from fettle.parallel.fake import converting, fake_model, fake_tensors, fake_world, fsdp_marks, unpacked
from fettle.parallel.formulas import collectives_of_ddp, ddp_buckets
from fettle.parallel.strategies import (
    Strategy,
    apply,
    mesh_of,
    mesh_shape,
    precision_context,
    row_shares,
    units_of,
    usual_strategies,
)
from fettle.parallel.timeline import Timeline, peak_of
from fettle.parallel.workspace import Workspaces
from fettle.techniques import split_bytes, tensor_plan
from fettle.train.workload import TrainingWorkload, load_training
from fettle.workload import Target, tensors

HEADROOM = 0.1
"""Share of the device left free for what is not counted: a choice, the margin that accelerate's batch finder uses."""


@dataclass(frozen=True)
class Prediction:
    """One strategy on one rank, the fullest one. Sizes in bytes."""

    strategy: str
    ranks: int
    peak_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    """The peak taken apart: parameters, gradients, optimizer state, activations, transients."""
    peak_phase: str = ""
    """When the peak is: forward, backward or optimizer."""
    states: dict[str, int] = field(default_factory=dict)
    """All parameters (with buffers), gradients and optimizer state of the rank, wherever the peak is."""
    formula_bytes: int | None = None
    """The closed formula for the sum of `states`; None where there is none for the optimizer."""
    host_bytes: int = 0
    """Held in host memory by offloading."""
    collectives: dict[str, int] = field(default_factory=dict)
    """Collective operations in one step, by name."""
    sent_bytes: int = 0
    """What one rank sends in a step."""
    between_nodes_bytes: int = 0
    """What leaves one node in a step."""
    fits: bool | None = None
    note: str = ""
    failed: str = ""
    """Why nothing could be predicted, one line."""
    rows: int = 1
    """Of one step of all ranks together."""


@dataclass(frozen=True)
class Plan:
    """All strategies for one workload and a number of ranks."""

    name: str
    world_size: int
    ranks_per_node: int
    device: str
    device_memory_bytes: int | None
    headroom: float
    parameters: int
    optimizer: str
    predictions: tuple[Prediction, ...]
    cheapest: str = ""
    """The one of those that fit and use all ranks that sends least between nodes for a row, then in all. Empty: none
    fits."""


def plan(
    workload: TrainingWorkload,
    world_size: int,
    *,
    device_memory_bytes: int | None = None,
    strategies: Sequence[Strategy] = (),
    ranks_per_node: int = 8,
    device: str = "cuda",
    headroom: float = HEADROOM,
    mode: FakeTensorMode | None = None,
    on_progress: Callable[[str, int, int], None] = lambda doing, done, of: None,
) -> Plan:
    """Predict the peak of each strategy. The workload's model is left as it is; none of its weights is read.

    Args:
        workload: What is trained; its first batch is one rank's batch.
        device: ``cuda`` or ``cpu``: which defaults the optimizer has there (foreach on CUDA), how sizes are rounded,
            and whether gloo's copies are counted, which NCCL does not make.
        mode: The fake mode that the workload was built under, if it was.
        on_progress: Called with (the next strategy, how many are done, of how many).

    Raises:
        UsageError: A wrong number, a process group that exists already, or a step that fake tensors cannot take.
    """
    _check(world_size, ranks_per_node, headroom)
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    workload = replace(workload, data=[_batch(workload)])  # a loader that shuffles needs values, which fakes have not
    chosen = list(strategies) or usual_strategies()
    plans: list[Prediction] = []
    # Compiled code would not run on tensors without memory; beside `Timeline` torch would run it eagerly ever after.
    with fake_world(world_size), torch.compiler.set_stance("force_eager"):
        for number, strategy in enumerate(chosen):
            on_progress(str(strategy), number, len(chosen))
            ranks = 1 if strategy.kind == "single" else world_size
            try:
                plans.append(_predict(workload, strategy, ranks, ranks_per_node, device, mode))
            except Exception as error:  # one strategy that cannot be had costs one row
                plans.append(Prediction(str(strategy), ranks, failed=_reason(error)))
    if all(item.failed for item in plans):
        raise UsageError(f"no strategy could be planned: {plans[0].failed}")
    if device_memory_bytes is not None:
        most = device_memory_bytes * (1 - headroom)
        plans = [item if item.failed else replace(item, fits=item.peak_bytes <= most) for item in plans]
    optimizer = workload.make_optimizer(workload.trained)
    return Plan(
        name=workload.name or type(workload.model).__name__,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        device=device,
        device_memory_bytes=device_memory_bytes,
        headroom=headroom,
        parameters=sum(p.numel() for p in workload.model.parameters()),
        optimizer=type(optimizer).__name__,
        predictions=tuple(plans),
        cheapest=cheapest(plans, world_size),
    )


def build_fake(target: Target) -> tuple[TrainingWorkload, FakeTensorMode, str]:
    """Build the workload of `target` without memory for its weights, or for real where its factory needs values.

    Returns the workload, the mode and a note, empty when all went without memory.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, converting():
            workload = load_training(target)
            workload = replace(workload, data=[_batch(workload)])
        return workload, mode, ""
    except Exception as error:
        reason = first_line(error)
    workload = load_training(target)  # raises what is really wrong with it
    workload = replace(workload, data=[_batch(workload)])
    return workload, mode, f"built with real weights, as its factory needs values ({reason[:120]})"


def _predict(
    workload: TrainingWorkload, strategy: Strategy, ranks: int, ranks_per_node: int, device: str, mode: FakeTensorMode
) -> Prediction:
    shape = mesh_shape(strategy, ranks, ranks_per_node)
    mesh = mesh_of(strategy, shape)
    with mode:
        model = fake_model(workload.model)
        batch = fake_tensors(_batch(workload))
        all_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        trained_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        units = [sum(p.numel() * p.element_size() for p in unit.parameters()) for unit in units_of(model, strategy)]
        rest = all_bytes - sum(units)
        if strategy.split:
            split, split_trained = split_bytes(model, tensor_plan(model))
            all_bytes -= split - split // shape["tensor"]
            trained_bytes -= split_trained - split_trained // shape["tensor"]
        called = apply(model, strategy, mesh)
        own_positions = isinstance(batch, dict) and "position_ids" in batch
        with nullcontext() if own_positions else unpacked():
            timeline, states, optimizer = _step(called, workload, batch, strategy, ranks, ranks_per_node, device)
    host = extra = 0
    peak = peak_of(timeline)
    if strategy.offload == "cpu":
        away = ("parameters", "gradients", "optimizer state")
        peak = peak_of(timeline, without=away, phases=("forward", "backward"))
        host = sum(states.values())
        extra = -(-max([*units, rest]) // shape["shard"])  # the shard of one unit on its way to the device
        peak.parts["transients"] += extra
    collectives = [*timeline.collectives, *collectives_of_ddp(model, strategy)]
    sent, between = formulas.sent_bytes(collectives, shape, ranks_per_node) if ranks > 1 else (0, 0)
    count = formulas.state_tensors(type(optimizer).__name__, optimizer.defaults)
    sharing = shape.get("shard", 1)
    return Prediction(
        strategy=str(strategy),
        ranks=ranks,
        peak_bytes=peak.bytes + extra,
        parts=peak.parts,
        peak_phase=peak.phase,
        states=states,
        formula_bytes=formulas.states_bytes(strategy.kind, sharing, all_bytes, trained_bytes, count),
        host_bytes=host,
        collectives=dict(Counter(item.name for item in collectives)) if ranks > 1 else {},
        sent_bytes=sent,
        between_nodes_bytes=between,
        note=_note(strategy, units, rest),
        rows=workload.rows * row_shares(strategy, ranks, ranks_per_node),
    )


def _step(
    model: torch.nn.Module,
    workload: TrainingWorkload,
    batch: Any,
    strategy: Strategy,
    ranks: int,
    ranks_per_node: int,
    device: str,
) -> tuple[Timeline, dict[str, int], torch.optim.Optimizer]:
    """One training step after the optimizer's state exists, watched from its first allocation to `zero_grad`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    mine = trained
    if strategy.kind == "zero1":
        mine = [trained[i] for i in formulas.largest_partition([p.numel() for p in trained], ranks)]
    # The optimizer is given plain shards and not FSDP's DTensors: it allocates the same, and need not work out how each
    # tensor lies on the ranks, which took most of the time of planning a large model.
    updated = [_shard(p) for p in mine]
    optimizer = _optimizer_with_state(workload, updated, device)
    here = max(1, (os.cpu_count() or 1) // min(ranks, ranks_per_node))
    timeline = Timeline(device, Workspaces(here) if device == "cpu" else None)
    with fsdp_marks(timeline), timeline:
        timeline.see([list(model.parameters()), list(model.buffers())], "parameters", final=True)
        timeline.see([list(state.values()) for state in optimizer.state.values()], "optimizer state", final=True)
        timeline.see(tensors(batch), "activations", final=True)
        states = {"parameters": _live_bytes(timeline, "parameters"), "gradients": 0}
        states["optimizer state"] = _live_bytes(timeline, "optimizer state")
        if strategy.kind in ("ddp", "zero1"):
            ddp_buckets(trained, strategy, timeline)
        with timeline.phase("forward"), precision_context(strategy):
            loss = workload.loss(model, batch)
        with timeline.phase("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        timeline.see([p.grad for p in model.parameters() if p.grad is not None], "gradients", final=True)
        states["gradients"] = _live_bytes(timeline, "gradients")
        del loss
        with timeline.phase("optimizer"):
            if workload.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(trained, workload.max_grad_norm)
            for parameter, shard in zip(mine, updated, strict=True):
                shard.grad = _local(parameter.grad)
            optimizer.step()
        for parameter in (*mine, *updated):
            parameter.grad = None
    return timeline, states, optimizer


def _optimizer_with_state(
    workload: TrainingWorkload, parameters: Sequence[torch.nn.Parameter], device: str
) -> torch.optim.Optimizer:
    """The workload's optimizer after a first step, which makes its state."""
    optimizer = workload.make_optimizer(parameters)
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if held.isdisjoint(map(id, parameters)):
        raise UsageError(
            "the optimizer factory takes its parameters from the model: let it make its groups of those it is given"
        )
    for group in optimizer.param_groups:
        if device == "cuda" and "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True  # what torch chooses for CUDA tensors
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    gc.collect()
    return optimizer


def _shard(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """The part of a parameter that this rank holds, in the same memory."""
    return torch.nn.Parameter(_local(parameter.detach())) if isinstance(parameter, DTensor) else parameter


def _local(tensor: torch.Tensor | None) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _live_bytes(timeline: Timeline, part: str) -> int:
    return sum(life.size for life in timeline.lives if life.part == part and not life.died)


def _batch(workload: TrainingWorkload) -> Any:
    batch = workload.first
    return dict(batch) if isinstance(batch, UserDict) else batch


def _note(strategy: Strategy, units: list[int], rest: int) -> str:
    if strategy.sharded and not units:
        return "one unit holds the whole model: it is gathered at once, and no communication hides behind computing"
    if strategy.compress == "powersgd":
        return "what PowerSGD sends is not predicted: counted as without compression"
    if strategy.compile == "block":
        return "predicted without compiling, which fuses and so usually needs less"
    if strategy.offload == "cpu":
        return "parameters, gradients and optimizer state are in host memory"
    if strategy.sharded and rest > max(units):
        return "the largest unit is the root: what no block holds (embeddings, head) is gathered together"
    return ""


def cheapest(made: Sequence[Prediction], world_size: int) -> str:
    """Which of the strategies is `Plan.cheapest`."""
    able = [item for item in made if item.fits and item.ranks == world_size]
    # Offloading and root-only wrapping send as little as their plain forms and lose on the step instead.
    plain = [item for item in able if "wrap=root" not in item.strategy and "offload" not in item.strategy]

    def order(item: Prediction) -> tuple[float, ...]:
        sent = (item.between_nodes_bytes, item.sent_bytes, sum(item.collectives.values()))
        return (*(amount / item.rows for amount in sent), item.peak_bytes)

    chosen = min(plain or able, key=order, default=None)
    return chosen.strategy if chosen else ""


def _reason(error: Exception) -> str:
    text = str(error) if isinstance(error, UsageError) else first_line(error)
    if "DataDependent" in text or "DynamicOutputShape" in text:
        return f"the step needs values of tensors, which a plan has not ({text[:120]})"
    return text[:200]


def _check(world_size: int, ranks_per_node: int, headroom: float) -> None:
    if not 1 <= world_size <= 1_000_000:
        raise UsageError(f"a world of {world_size} ranks cannot be planned: give a number from 1 to 1000000")
    if ranks_per_node < 1:
        raise UsageError(f"{ranks_per_node} ranks per node: give at least 1")
    if not 0 <= headroom < 1:
        raise UsageError(f"a headroom of {headroom}: give a share from 0 to less than 1")
