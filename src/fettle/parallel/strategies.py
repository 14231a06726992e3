"""Parallel strategies: what a training step can be spread over many ranks with, and how each one is applied.

A strategy is written as its kind and settings, ``zero3 wrap=block precision=bf16 checkpoint=block``. The model stays
the user's own; `apply` changes it from outside in the order that PyTorch needs: splitting matrices, checkpointing,
then sharding. It compiles nothing: a plan is of the uncompiled model. ZeRO-1 is DDP with `ZeroRedundancyOptimizer`;
ZeRO-2 and ZeRO-3 are FSDP2's `fully_shard` with ``reshard_after_forward`` off and on; hybrid sharding is ZeRO-3 on a
mesh of two dimensions. Tensor parallelism is `parallelize_module`, alone or inside each rank of ZeRO-3.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from fettle.errors import UsageError
from fettle.techniques import modules_by_size, repeated_blocks, shard, split_over, tensor_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

KINDS = ("single", "ddp", "zero1", "zero2", "zero3", "hsdp", "tensor", "zero3-tensor")
_SHARDED = ("zero2", "zero3", "hsdp", "zero3-tensor")
_CHOICES = {
    "wrap": ("block", "size", "root"),
    "precision": ("fp32", "bf16"),
    "checkpoint": ("none", "block"),
    "compress": ("none", "fp16", "powersgd"),
    "buckets": ("view", "copy"),
    "graph": ("dynamic", "static"),
    "offload": ("none", "cpu"),
    "compile": ("off", "block"),
}
_ONLY_FOR = {
    "wrap": _SHARDED,
    "offload": ("zero2", "zero3", "hsdp"),
    "compress": ("ddp", "zero1"),
    "buckets": ("ddp", "zero1"),
    "graph": ("ddp", "zero1"),
}


@dataclass(frozen=True)
class Strategy:
    """One way to spread a training step over ranks. The defaults are what PyTorch's own documentation suggests."""

    kind: str = "single"
    wrap: str = "block"
    """What FSDP shards as one unit: each repeated block, modules above a size, or only the root (a mistake: the whole
    model is gathered at once)."""
    precision: str = "fp32"
    """``bf16``: FSDP's mixed-precision policy (parameters gathered in bfloat16, gradients reduced in float32); for the
    other kinds autocast."""
    checkpoint: str = "none"
    """``block``: activations of each repeated block are computed again in backward."""
    compress: str = "none"
    """A DDP communication hook."""
    buckets: str = "view"
    """``view``: gradients live inside DDP's buckets; ``copy``: they are held twice."""
    graph: str = "dynamic"
    offload: str = "none"
    """``cpu``: FSDP keeps shards, gradients and optimizer state in host memory."""
    compile: str = "off"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"{self.kind!r} is not a parallel strategy: use one of {', '.join(KINDS)}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise UsageError(f"strategy {self.kind}: {name}={value} is not among {', '.join(choices)}")
            if value != choices[0] and self.kind not in _ONLY_FOR.get(name, KINDS):
                raise UsageError(f"strategy {self.kind} has no {name}: it belongs to {', '.join(_ONLY_FOR[name])}")

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 does it."""
        return self.kind in _SHARDED

    @property
    def split(self) -> bool:
        """Whether ranks hold slices of the same layers, and see the same rows."""
        return self.kind in ("tensor", "zero3-tensor")

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return " ".join([self.kind, *changed])


def parse_strategy(text: str) -> Strategy:
    """A strategy from its text, ``"zero3 wrap=size precision=bf16"``. Raises `UsageError` for another form."""
    kind, *settings = text.split() or [""]
    values: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or name not in _CHOICES or name in values:
            raise UsageError(
                f"strategy {text!r}: {setting!r} is not a setting: write one of {', '.join(_CHOICES)}=VALUE"
            )
        values[name] = value
    return Strategy(kind, **values)


def usual_strategies() -> list[Strategy]:
    """What `fettle plan` compares when nothing else is asked for, the simplest first."""
    combined = (
        "zero3 checkpoint=block", "hsdp precision=bf16 checkpoint=block", "zero3 precision=bf16 checkpoint=block",
        "zero3 checkpoint=block offload=cpu", "zero3 wrap=root",
    )  # fmt: skip
    return [parse_strategy(text) for text in (*KINDS, *combined)]


def units_of(model: torch.nn.Module, strategy: Strategy) -> list[torch.nn.Module]:
    """The modules that FSDP shards one by one, before the root. Without repeated blocks, by size."""
    if strategy.wrap == "root":
        return []
    blocks = repeated_blocks(model) if strategy.wrap == "block" else []
    return blocks or modules_by_size(model)


def mesh_shape(strategy: Strategy, world_size: int, ranks_per_node: int) -> dict[str, int]:
    """Ranks by dimension of the mesh: what replicates first, what splits layers last."""
    names = {"hsdp": ("replicate", "shard"), "tensor": ("tensor",), "zero3-tensor": ("shard", "tensor")}
    dimensions = names.get(strategy.kind, ("shard",))
    if len(dimensions) == 1:
        return {dimensions[0]: world_size}
    inner = ranks_per_node if world_size > ranks_per_node else max(1, world_size // 2)
    if world_size % inner:
        raise UsageError(
            f"{strategy.kind}: {world_size} ranks cannot be split into nodes of {inner}; set `ranks_per_node`"
        )
    if strategy.split and inner == 1:
        raise UsageError(
            f"{strategy.kind}: {world_size} ranks, each a group of its own, cannot form a mesh of two dimensions"
        )
    return {dimensions[0]: world_size // inner, dimensions[1]: inner}


def row_shares(strategy: Strategy, world_size: int, ranks_per_node: int) -> int:
    """Over how many ranks, or groups of those that hold slices, the rows of a step are spread."""
    if strategy.split:
        return world_size // mesh_shape(strategy, world_size, ranks_per_node)["tensor"]
    return 1 if strategy.kind == "single" else world_size


def mesh_of(strategy: Strategy, shape: dict[str, int]) -> DeviceMesh | None:
    """The mesh that `apply` needs, of CPU ranks; none for the kinds that need none."""
    from torch.distributed.device_mesh import init_device_mesh

    if not strategy.sharded and not strategy.split:
        return None
    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


def apply(model: torch.nn.Module, strategy: Strategy, mesh: DeviceMesh | None) -> torch.nn.Module:
    """Apply `strategy` to `model`, in place where PyTorch works in place, and return what is to be called.

    `mesh` is that of `mesh_of`. The DDP wrapper is left out: its reducer works outside Python and cannot be given fake
    tensors. Raises `UsageError` where the model cannot be split as the strategy says.
    """
    if mesh is not None and strategy.split:
        plan, over = tensor_plan(model), mesh["tensor"]
        if why_not := plan.why_not_over(over.size()):
            raise UsageError(f"{strategy.kind}: {why_not}")
        split_over(model, over, plan.columns, plan.rows, plan.attentions, plan.per_head)
    if strategy.checkpoint == "block":
        blocks = repeated_blocks(model)
        if not blocks:
            raise UsageError("checkpoint=block: the model has no repeated blocks to compute again")
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    if mesh is not None and strategy.sharded:
        _shard(model, strategy, mesh["shard"] if strategy.split else mesh)
    return model


def _shard(model: torch.nn.Module, strategy: Strategy, mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    options: dict[str, Any] = {"reshard_after_forward": strategy.kind != "zero2"}
    if strategy.precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if strategy.offload == "cpu":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)  # fake tensors have no memory to pin
    shard(model, units_of(model, strategy), mesh, **options)


def precision_context(strategy: Strategy) -> AbstractContextManager[Any]:
    """Autocast, on the CPU, for the kinds that have no policy of their own."""
    if strategy.precision == "bf16" and not strategy.sharded:
        return torch.autocast("cpu", torch.bfloat16)
    return nullcontext()
