"""The catalogue of techniques: one file each, listed here in the order in which they are applied.

The order matters and is the only place where it is decided: weights change type before they change layout, both
before they are quantised, and whatever replaces the forward pass (compile, another runtime) comes last.
"""

from __future__ import annotations

from fettle.recipe import Recipe
from fettle.techniques import _source, _training
from fettle.techniques._base import Code, Facts, Level, Technique
from fettle.techniques._bundles import bundles
from fettle.techniques._facts import machine_facts, probe_facts, unchanged
from fettle.techniques._host import cpu_flags
from fettle.techniques._openvino import OpenvinoRequest, openvino_model
from fettle.techniques._openvino_core import openvino_core
from fettle.techniques._ranks import modules_by_size, repeated_blocks
from fettle.techniques._source import load, render
from fettle.techniques.accumulate import Accumulate
from fettle.techniques.allocator import Allocator
from fettle.techniques.attention import Attention
from fettle.techniques.batch import LARGEST, BatchSize
from fettle.techniques.channels_last import ChannelsLast
from fettle.techniques.checkpointing import Checkpointing
from fettle.techniques.compile import Compile, Freeze, Region, Shapes
from fettle.techniques.convolution import Convolution
from fettle.techniques.cuda_graphs import CudaGraphs
from fettle.techniques.cudnn_benchmark import CudnnBenchmark
from fettle.techniques.grad import Grad
from fettle.techniques.loading import Loading
from fettle.techniques.matmul import Matmul
from fettle.techniques.mode import Mode
from fettle.techniques.optimizer import OptimizerKind
from fettle.techniques.parallel import Buckets, Compress, Graph, Offload, Parallel, Policy, Wrap
from fettle.techniques.precision import Precision
from fettle.techniques.quantize import Quantize, quantize_exported
from fettle.techniques.runtime import Runtime, Streams, int8_part, openvino_precision
from fettle.techniques.sdpa_backend import SdpaBackend
from fettle.techniques.sparsity import Sparsity
from fettle.techniques.threads import Threads
from fettle.techniques.zero_grad import ZeroGrad

CATALOGUE: tuple[Technique, ...] = (
    Threads(),
    Allocator(),
    Loading(),  # the loader itself, before batches of it are joined
    BatchSize(),
    Matmul(),
    CudnnBenchmark(),
    Mode(),
    Grad(),
    Attention(),  # traced in the type and layout that the sample batches have
    SdpaBackend(),
    Precision(),
    ChannelsLast(),
    Sparsity(),
    Quantize(),
    Convolution(),
    Checkpointing(),  # inside what is compiled, as torchtitan has it
    Compile(),
    Freeze(),
    Shapes(),
    Region(),
    Runtime(),
    Streams(),
    CudaGraphs(),  # records whatever the others made of the model
    OptimizerKind(),
    Parallel(),  # around whatever the model has become; its settings are in its own lines
    Wrap(),
    Policy(),
    Offload(),
    Buckets(),
    Graph(),
    Compress(),
    Accumulate(),
    ZeroGrad(),
)

__all__ = [
    "CATALOGUE", "LARGEST", "Code", "Facts", "Level", "OpenvinoRequest", "Technique", "bundles", "check_names",
    "conflict", "cpu_flags", "find", "int8_part", "known_levels", "load", "machine_facts", "modules_by_size", "normal",
    "openvino_core", "openvino_model", "openvino_precision", "probe_facts", "quantize_exported", "render",
    "repeated_blocks", "source", "unchanged",
]  # fmt: skip


def find(name: str) -> Technique:
    """The technique of that name; KeyError when there is none."""
    return next(technique for technique in CATALOGUE if technique.name == name)


def normal(recipe: Recipe) -> Recipe:
    """The same recipe without levels that say 'as given', so that equal recipes compare equal."""
    return Recipe({name: level for name, level in recipe.levels.items() if level != find(name).given})


def idle(recipe: Recipe) -> list[str]:
    """Techniques whose levels work and change nothing beside the recipe's others."""
    return [name for name, level in recipe.levels.items() if level != find(name).given and find(name).is_idle(recipe)]


def known_levels() -> dict[str, list[str]]:
    """Every level that any technique has on any machine, by technique."""
    known = {technique.name: [level.name for level in technique.levels(Facts())] for technique in CATALOGUE}
    known["threads"] = [Threads.given, *(str(count) for count in range(1, 257))]
    known["batch"] = [BatchSize.given, *(f"x{factor}" for factor in range(2, LARGEST + 1))]
    return known


def check_names(recipe: Recipe) -> None:
    """Raise `UsageError` for a technique or level that is not in the catalogue on any machine."""
    _source.check_levels(recipe, CATALOGUE, known_levels())


def conflict(recipe: Recipe, facts: Facts) -> str:
    """Why `recipe` cannot work on this workload and machine, naming the level at fault; empty when it can."""
    for technique in CATALOGUE:
        name = recipe.levels.get(technique.name, technique.given)
        if facts.mode not in technique.modes:
            if name != technique.given:
                return f"{technique.name}={name}: it is for {' and '.join(sorted(technique.modes))} only"
            continue
        levels = {level.name: level for level in technique.levels(facts)}
        why_not = levels[name].why_not if name in levels else f"there is no such level: {', '.join(levels)}"
        if technique.name == "threads" and name.isdigit():
            why_not = ""
        why_not = why_not or technique.conflict(name, recipe, facts)
        if why_not:
            return f"{technique.name}={name}: {why_not}"
    return ""


def source(recipe: Recipe, facts: Facts, **options: object) -> str:
    """The plain PyTorch source of a recipe: `render` over the whole catalogue, or the training loop."""
    if facts.mode == "training":
        return _training.render_training(recipe, facts, CATALOGUE, **options)  # type: ignore[arg-type]
    return render(recipe, facts, CATALOGUE, **options)  # type: ignore[arg-type]
