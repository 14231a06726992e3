"""Training over several ranks: which parallel strategy, and its settings.

The batches stay as given: each rank takes its rows of every batch, and ranks that hold slices of the same layers take
the same rows, so that all ranks together make the same steps as one process would. A baseline and a strategy are then
the same training, and are compared by time per row.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fettle.techniques._base import TRAINING, Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._ranks import (
    ROWS,
    SPLIT,
    endless,
    join_ranks,
    modules_by_size,
    own_rows,
    repeated_blocks,
    shard,
    split_state,
)
from fettle.techniques.precision import autocast, no_bf16

REPLICATED, TENSOR = ("ddp", "zero1"), ("tensor", "zero3-tensor")
SHARDED: tuple[str, ...] = ("zero2", "zero3", "hsdp", "zero3-tensor")
_AS_GIVEN = {"channels_last": "off", "optimizer": "as-given", "cudnn_benchmark": "off"}


def _alone(facts: Facts) -> str:
    return "" if facts.ranks > 1 else "there is one rank: give `nproc`"


def _inner(facts: Facts) -> int:
    """Ranks in the inner dimension of a mesh of two: those of a node, or half of them where there is one node."""
    return max(1, facts.ranks // max(2, facts.nodes))


def _no_mesh(facts: Facts) -> str:
    if facts.nodes > 1:
        return "" if facts.ranks > facts.nodes else "a node has one rank: there is nothing to shard inside it"
    return "" if facts.ranks % 2 == 0 else f"{facts.ranks} ranks cannot form a mesh of two dimensions"


def _tensor_mesh(facts: Facts) -> str:
    """Why there is no mesh of shards and of slices, each over two ranks or more."""
    few = f"{facts.ranks} ranks on {facts.nodes} nodes" if facts.nodes > 1 else f"{facts.ranks} ranks"
    problem = _no_mesh(facts) or ("" if _inner(facts) > 1 else f"{few} cannot form a mesh of two dimensions")
    return problem or facts.tensor.why_not_over(_inner(facts)) or facts.uneven(facts.ranks // _inner(facts))


@register
class Parallel(Technique):
    name = "parallel"
    order = 800
    modes = TRAINING
    rung = 4
    title = "parallel strategy"
    default = "single"
    cost = 2

    def levels(self, facts: Facts) -> list[Level]:
        alone = _alone(facts)
        rows = alone or facts.uneven(facts.ranks)
        groups = "" if facts.groups_shards else "the optimizer factory makes other groups of shards"
        return [
            Level("single", "one process, as given"),
            Level("ddp", "DistributedDataParallel: every rank holds all", rows),
            Level("zero1", "DDP with the optimizer's state split over the ranks", rows),
            Level("zero2", "FSDP2, parameters gathered once a step (reshard_after_forward=False)", rows or groups),
            Level("zero3", "FSDP2, parameters gathered for each use (reshard_after_forward=True)", rows or groups),
            Level("hsdp", "FSDP2 on a mesh: shards inside a group of ranks, copies between groups",
                  rows or _no_mesh(facts) or groups),
            Level("tensor", "tensor parallelism: slices of the same layers on all ranks, which see the same rows",
                  alone or facts.tensor.why_not_over(facts.ranks) or groups),
            Level("zero3-tensor", "FSDP2 between groups of ranks, tensor parallelism inside each",
                  alone or _tensor_mesh(facts) or groups),
        ]  # fmt: skip

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        precision = recipe.levels.get("precision", "fp32")
        if level == "ddp" or precision not in ("bf16-master", "autocast-fp16"):
            return ""
        if level == "zero1":
            return f"precision={precision} changes the optimizer's step, which is split over ranks here"
        return f"precision={precision} keeps copies of its own, which shards do not have"

    def uses_ranks(self, level: str) -> bool:
        return level != self.default

    def strategy(self, level: str) -> dict[str, str]:
        return {"kind": level}

    def bundles(self, facts: Facts) -> list[Bundle]:
        """Each strategy as it is, then the usual first choice with what makes a step fast."""
        kinds = enumerate(dict.fromkeys((*REPLICATED, *SHARDED, *TENSOR)))
        replicated = {**autocast(facts), "parallel": "ddp"}
        return [
            *(Bundle(10 + number, {"parallel": kind, **_AS_GIVEN}) for number, kind in kinds),
            Bundle(60, replicated),
            Bundle(70, {**replicated, "compile": "default"}),
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        if level in (*SHARDED, *TENSOR):
            return _on_mesh(level, recipe, facts)
        lines = [f'rank, world = join_ranks("{facts.device}")', "data = own_rows(data, rank, world)"]
        view = recipe.levels.get("ddp_buckets", "view") == "view"
        static = recipe.levels.get("static_graph") == "on"
        lines.append(
            "model = torch.nn.parallel.DistributedDataParallel("
            f"model, gradient_as_bucket_view={view}, static_graph={static})"
        )
        lines += _HOOKS[recipe.levels.get("ddp_compress", "none")]
        zero1 = level == "zero1"
        return Code(
            helpers=(join_ranks, *ROWS, endless, own_rows, *((split_state,) if zero1 else ())),
            prepare=tuple(lines),
            optimizer=("optimizer = split_state(optimizer)",) if zero1 else (),
        )


def _on_mesh(level: str, recipe: Recipe, facts: Facts) -> Code:
    """The lines of a strategy whose parameters lie on a mesh of ranks: split over one dimension, sharded over the other
    (which may be the only one), the rows spread over all but the split."""
    dimensions = {"hsdp": ("replicate", "shard"), "tensor": ("tensor",), "zero3-tensor": ("shard", "tensor")}
    names = dimensions.get(level, ("shard",))
    shape = f"(world // {_inner(facts)}, {_inner(facts)})" if len(names) == 2 else "(world,)"
    offloaded = ", offloaded=True" if recipe.levels.get("offload") == "cpu" and facts.device != "cpu" else ""
    lines = [
        "from torch.distributed.device_mesh import init_device_mesh",
        f'rank, world = join_ranks("{facts.device}"{offloaded})',
        f'mesh = init_device_mesh("{facts.device}", {shape}, mesh_dim_names={_tuple(names)})',
    ]
    helpers: list[Callable[..., Any]] = [join_ranks]
    if level in TENSOR:
        plan = facts.tensor
        more = f"{_tuple(plan.attentions)}, {_tuple(plan.per_head)}"
        lines += [*listed("columns", plan.columns), *listed("rows", plan.rows),
                  f'split_over(model, mesh["tensor"], columns, rows, {more})']  # fmt: skip
        helpers += SPLIT
    if level in SHARDED:
        rows = 'mesh["shard"].get_local_rank(), mesh["shard"].size()' if level in TENSOR else "rank, world"
        over = 'mesh["shard"]' if level in TENSOR else "mesh"
        sharded, used = _sharded(level, recipe, facts, over)
        lines += [f"data = own_rows(data, {rows})", *sharded]
        helpers += [*ROWS, endless, own_rows, *used]
    lines.append("parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]")
    return Code(helpers=tuple(helpers), prepare=tuple(lines))


def _tuple(names: tuple[str, ...]) -> str:
    return repr(names).replace("'", '"')


def listed(name: str, values: tuple[str, ...]) -> list[str]:
    """The lines that name a tuple of texts."""
    return [f"{name} = (", *(f'    "{value}",' for value in values), ")"]


def _sharded(level: str, recipe: Recipe, facts: Facts, mesh: str) -> tuple[list[str], list[Callable[..., Any]]]:
    """Lines that shard the model by FSDP2 over `mesh`, and their helpers."""
    by_size = recipe.levels.get("auto_wrap") == "size"
    units = "modules_by_size(model)" if by_size else "repeated_blocks(model) or modules_by_size(model)"
    lines, options = [], [f"reshard_after_forward={level != 'zero2'}"]
    if recipe.levels.get("mixed_precision") == "bf16":
        lines.append("from torch.distributed.fsdp import MixedPrecisionPolicy")
        options.append("mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)")
    if recipe.levels.get("offload") == "cpu":
        lines.append("from torch.distributed.fsdp import CPUOffloadPolicy")
        options.append(f"offload_policy=CPUOffloadPolicy(pin_memory={facts.device == 'cuda'})")
    lines.append(f"shard(model, {units}, {mesh}, {', '.join(options)})")
    finders = [modules_by_size] if by_size else [repeated_blocks, modules_by_size]
    return lines, [*finders, shard]


_HOOKS = {
    "none": [],
    "fp16": [
        "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook",
        "model.register_comm_hook(None, fp16_compress_hook)",
    ],
    "powersgd": [
        "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd",
        "state = powersgd.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)",
        "model.register_comm_hook(state, powersgd.powerSGD_hook)",
    ],
}


class _Setting(Technique):
    """A setting of the strategies in `kinds`, for the memory plan called `setting`; `Parallel.code` has its lines."""

    modes = TRAINING
    rung = 4
    cost = 2
    kinds: ClassVar[tuple[str, ...]]
    means: ClassVar[Mapping[str, str]]
    setting: ClassVar[str] = ""

    def levels(self, facts: Facts) -> list[Level]:
        alone = _alone(facts)
        return [Level(name, text, "" if name == self.default else alone) for name, text in self.means.items()]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        fits = recipe.levels.get("parallel", "single") in self.kinds
        return "" if fits else f"needs parallel={' or '.join(self.kinds)}"

    def strategy(self, level: str) -> Mapping[str, str] | None:
        return {self.setting: level} if self.setting else super().strategy(level)


class _Sharded(_Setting):
    kinds = SHARDED
    needs: ClassVar[Mapping[str, str]] = {"parallel": "zero3"}


@register
class AutoWrap(_Sharded):
    name = "auto_wrap"
    old_name = "wrap"
    setting = "wrap"
    order = 810
    title = "FSDP units"
    default = "block"
    means: ClassVar[Mapping[str, str]] = {
        "block": "each repeated block is a unit",
        "size": "modules above a twentieth of the parameters are units",
    }


@register
class MixedPrecision(_Sharded):
    name = "mixed_precision"
    old_name = "policy"
    order = 820
    title = "FSDP mixed precision"
    default = "fp32"
    means: ClassVar[Mapping[str, str]] = {
        "fp32": "as given",
        "bf16": "parameters gathered and used in bfloat16, gradients reduced in float32",
    }

    def levels(self, facts: Facts) -> list[Level]:
        as_given, bf16 = super().levels(facts)
        return [as_given, replace(bf16, why_not=bf16.why_not or no_bf16(facts))]

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if recipe.levels.get("precision", "fp32") != "fp32":
            return "the policy converts already what precision would"
        return super().conflict(level, recipe, facts)

    def bundles(self, facts: Facts) -> list[Bundle]:
        return [Bundle(80, {"parallel": "zero3", "mixed_precision": "bf16"})]


@register
class Offload(_Sharded):
    name = "offload"
    setting = "offload"
    kinds = tuple(kind for kind in SHARDED if kind not in TENSOR)
    order = 830
    title = "FSDP offloading"
    default = "none"
    means: ClassVar[Mapping[str, str]] = {
        "none": "as given",
        "cpu": "shards, gradients and optimizer state in host memory",
    }


class _Replicated(_Setting):
    kinds = REPLICATED
    needs: ClassVar[Mapping[str, str]] = {"parallel": "ddp"}


@register
class Buckets(_Replicated):
    name = "ddp_buckets"
    setting = "buckets"
    order = 840
    title = "DDP buckets"
    default = "view"
    means: ClassVar[Mapping[str, str]] = {
        "view": "gradients live inside the buckets",
        "copy": "gradients are copied into buckets",
    }


@register
class StaticGraph(_Replicated):
    name = "static_graph"
    old_name = "ddp_graph"
    old_levels: ClassVar[Mapping[str, str]] = {"dynamic": "off", "static": "on"}
    changes_memory = False
    order = 850
    title = "DDP static graph"
    default = "off"
    means: ClassVar[Mapping[str, str]] = {
        "off": "the parameters in use are found out in each step",
        "on": "the same parameters are used in each step",
    }


@register
class Compress(_Replicated):
    name = "ddp_compress"
    setting = "compress"
    order = 860
    title = "DDP gradient compression"
    default = "none"
    means: ClassVar[Mapping[str, str]] = {
        "none": "gradients are sent as they are",
        "fp16": "gradients are sent in float16",
        "powersgd": "gradients are sent as products of rank 1 with error feedback",
    }
