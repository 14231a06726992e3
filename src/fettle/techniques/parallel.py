"""Training over several ranks: which parallel strategy, and its settings.

The batches stay as given: each rank takes its rows of every batch, so that all ranks together make the same steps as
one process would. A baseline and a strategy are then the same training, and are compared by time per row.
"""

from collections.abc import Mapping
from typing import ClassVar

from fettle.techniques._base import TRAINING, Bundle, Code, Facts, Level, Recipe, Technique, register
from fettle.techniques._ranks import (
    join_ranks,
    mesh_of,
    modules_by_size,
    own_rows,
    repeated_blocks,
    shard,
    split_state,
)
from fettle.techniques.precision import autocast

REPLICATED, SHARDED = ("ddp", "zero1"), ("zero2", "zero3", "hsdp")
_AS_GIVEN = {"channels_last": "off", "optimizer": "as-given", "cudnn_benchmark": "off"}


def _alone(facts: Facts) -> str:
    return "" if facts.ranks > 1 else "there is one rank: give `nproc`"


def _no_mesh(facts: Facts) -> str:
    if facts.nodes > 1:
        return "" if facts.ranks > facts.nodes else "a node has one rank: there is nothing to shard inside it"
    return "" if facts.ranks % 2 == 0 else f"{facts.ranks} ranks cannot form a mesh of two dimensions"


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
        if not alone and facts.samples % facts.ranks:
            alone = f"a batch of {facts.samples} rows cannot be cut into {facts.ranks} equal parts"
        return [
            Level("single", "one process, as given"),
            Level("ddp", "DistributedDataParallel: every rank holds all", alone),
            Level("zero1", "DDP with the optimizer's state split over the ranks", alone),
            Level("zero2", "FSDP2, parameters gathered once a step (reshard_after_forward=False)", alone),
            Level("zero3", "FSDP2, parameters gathered for each use (reshard_after_forward=True)", alone),
            Level("hsdp", "FSDP2 on a mesh: shards inside a group of ranks, copies between groups",
                  alone or _no_mesh(facts)),
        ]  # fmt: skip

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        precision = recipe.levels.get("precision", "fp32")
        if level in SHARDED and precision in ("bf16-master", "autocast-fp16"):
            return f"precision={precision} keeps copies of its own, which shards do not have"
        if level == "zero1" and precision in ("bf16-master", "autocast-fp16"):
            return f"precision={precision} changes the optimizer's step, which is split over ranks here"
        return ""

    def uses_ranks(self, level: str) -> bool:
        return level != self.default

    def strategy(self, level: str) -> dict[str, str]:
        return {"kind": level}

    def bundles(self, facts: Facts) -> list[Bundle]:
        """Each strategy as it is, then the usual first choice with what makes a step fast."""
        kinds = enumerate((*REPLICATED, *SHARDED))
        replicated = {**autocast(facts), "parallel": "ddp"}
        return [
            *(Bundle(10 + number, {"parallel": kind, **_AS_GIVEN}) for number, kind in kinds),
            Bundle(60, replicated),
            Bundle(70, {**replicated, "compile": "default"}),
        ]

    def code(self, level: str, recipe: Recipe, facts: Facts) -> Code:
        lines = [f'rank, world = join_ranks("{facts.device}")', "data = own_rows(data, rank, world)"]
        if level in SHARDED:
            return _sharded(level, recipe, facts, lines)
        view = recipe.levels.get("ddp_buckets", "view") == "view"
        static = recipe.levels.get("static_graph") == "on"
        lines.append(
            "model = torch.nn.parallel.DistributedDataParallel("
            f"model, gradient_as_bucket_view={view}, static_graph={static})"
        )
        lines += _HOOKS[recipe.levels.get("ddp_compress", "none")]
        zero1 = level == "zero1"
        return Code(
            helpers=(join_ranks, own_rows, *((split_state,) if zero1 else ())),
            prepare=tuple(lines),
            optimizer=("optimizer = split_state(optimizer)",) if zero1 else (),
        )


def _sharded(level: str, recipe: Recipe, facts: Facts, lines: list[str]) -> Code:
    by_size = recipe.levels.get("auto_wrap") == "size"
    units = "modules_by_size(model)" if by_size else "repeated_blocks(model) or modules_by_size(model)"
    options = [f"reshard_after_forward={level != 'zero2'}"]
    if recipe.levels.get("mixed_precision") == "bf16":
        lines.append("from torch.distributed.fsdp import MixedPrecisionPolicy")
        options.append("mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)")
    if recipe.levels.get("offload") == "cpu":
        lines.append("from torch.distributed.fsdp import CPUOffloadPolicy")
        options.append(f"offload_policy=CPUOffloadPolicy(pin_memory={facts.device == 'cuda'})")
    inner = f", {max(1, facts.ranks // max(2, facts.nodes))}" if level == "hsdp" else ""
    lines += [
        f'mesh = mesh_of("{facts.device}", world{inner})',
        f"shard(model, {units}, mesh, {', '.join(options)})",
        "parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]",
    ]
    finders = (modules_by_size,) if by_size else (repeated_blocks, modules_by_size)
    return Code(helpers=(join_ranks, own_rows, *finders, mesh_of, shard), prepare=tuple(lines))


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
        if level != self.default and recipe.levels.get("parallel", "single") not in self.kinds:
            return f"needs parallel={' or '.join(self.kinds)}"
        return ""

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

    def conflict(self, level: str, recipe: Recipe, facts: Facts) -> str:
        if level == "bf16" and recipe.levels.get("precision", "fp32") != "fp32":
            return "the policy converts already what precision would"
        return super().conflict(level, recipe, facts)

    def bundles(self, facts: Facts) -> list[Bundle]:
        return [Bundle(80, {"parallel": "zero3", "mixed_precision": "bf16"})]


@register
class Offload(_Sharded):
    name = "offload"
    setting = "offload"
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
