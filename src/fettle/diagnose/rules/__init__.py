"""The rules for a workload, one file each: `look` sees the evidence and says one thing, or nothing.

A bound is the most that mending the cause could take off the wall time: what is spent there now, less what the machine
would need at its measured peak where that is known. It is a ceiling, not a forecast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fettle.diagnose.evidence import Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules import (
    attention,
    batch_norm,
    built_in_call,
    casts,
    channels_first,
    churn,
    compile_cache,
    constants,
    copies,
    cudnn_benchmark,
    data_wait,
    debugging,
    duplicate_data,
    duplicate_weights,
    first_call,
    float32,
    float64,
    fresh_memory,
    garbage_collection,
    grad_recorded,
    graph_breaks,
    host_bound,
    indexing,
    int8,
    leak,
    loading,
    no_tf32,
    not_fused,
    onednn_off,
    optimizer,
    padding,
    parametrised,
    python_loop,
    random,
    recompiles,
    recomputation,
    recurrent,
    small_batch,
    small_products,
    sorting,
    spike,
    subnormal,
    syncs,
    threads,
    train_mode,
    waiting,
    weight_bound,
    weight_memory,
)
from fettle.diagnose.rules._common import CROWDED
from fettle.recipe import Recipe
from fettle.techniques import conflict

__all__ = ["CROWDED", "RULES", "Rule", "findings"]

Rule = Callable[[Evidence], Finding | None]

_MODULES = (
    train_mode,
    grad_recorded,
    float32,
    float64,
    casts,
    copies,
    channels_first,
    not_fused,
    host_bound,
    python_loop,
    small_batch,
    optimizer,
    attention,
    threads,
    padding,
    weight_bound,
    batch_norm,
    small_products,
    int8,
    indexing,
    sorting,
    recomputation,
    duplicate_data,
    built_in_call,
    random,
    constants,
    parametrised,
    recurrent,
    data_wait,
    spike,
    leak,
    churn,
    waiting,
    fresh_memory,
    garbage_collection,
    subnormal,
    debugging,
    onednn_off,
    cudnn_benchmark,
    no_tf32,
    graph_breaks,
    recompiles,
    syncs,
    compile_cache,
    first_call,
    loading,
    weight_memory,
    duplicate_weights,
)
_INFERENCE = (train_mode, grad_recorded, batch_norm, random, weight_bound, int8, weight_memory, first_call)
"""What is no fault of a training loop, or could not be mended in one."""
RULES: Mapping[str, Rule] = {module.__name__.rpartition(".")[2].replace("_", "-"): module.look for module in _MODULES}
"""By the name that `Finding.rule` has. Of two with the same bound the earlier one comes first."""


def findings(seen: Evidence) -> list[Finding]:
    """What all rules say of the evidence: faults, the costliest first, then opportunities."""
    silent = {module.look for module in _INFERENCE} if seen.facts.mode == "training" else set()
    found = [finding for look in RULES.values() if look not in silent and (finding := look(seen)) is not None]
    if seen.facts.mode == "training":  # levels are named for inference: those that a training loop has not are dropped
        found = [replace(item, levels={}) if conflict(Recipe(item.levels), seen.facts) else item for item in found]
    return sorted(found, key=lambda finding: finding.weight, reverse=True)
