"""Gathering evidence, inside a worker process: a few calls plain, a few watched, a few with one thing switched.

Each collector stands alone: `operators` (time, FLOPs and bytes of every operator), `variants` (what switching one thing
brings), `waiting` (time that is not computing), and here `padding`, `subnormal`, `duplicates`, `kept_alive`. `collect`
runs them all and is what the worker is asked for.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fettle.diagnose._timing import held, timed
from fettle.diagnose.compile_watch import is_compiled
from fettle.diagnose.evidence import Evidence
from fettle.diagnose.operators import operations, watched
from fettle.diagnose.syncs import find_syncs
from fettle.diagnose.training import TrainingSteps, as_workload, device_type, trained
from fettle.diagnose.variants import variants
from fettle.diagnose.waiting import CoreClock, at_hand, waiting
from fettle.machine import measure_peaks
from fettle.techniques import probe_facts, unchanged
from fettle.train import TrainingWorkload
from fettle.workload import Workload, leaves, map_tensors, tensors


def collect(given: Workload | TrainingWorkload, seconds: float) -> Evidence:
    """All evidence of one workload, in about `seconds` and at least a few calls each; of a training loop its steps."""
    workload = as_workload(given)
    model = workload.model
    owner = trained(workload)
    device = device_type(workload)

    def call(batch: Any = workload.inputs[0]) -> Any:
        return workload.run(model, batch)

    module = owner if isinstance(owner, torch.nn.Module) else None
    began = time.perf_counter()
    call()
    first_call_s = time.perf_counter() - began
    with CoreClock() as clock:
        plain = timed(call, device, 0.25 * seconds)
    wall_s = statistics.median(plain)
    watch, watched_s = watched(workload, device)
    found = watch.rows()
    with held(torch.autograd, "set_detect_anomaly", False, torch.is_anomaly_enabled()):  # its own checks would be found
        syncs = find_syncs(call, on_device=[owner, workload.inputs[0]]).syncs
    facts = probe_facts(workload)
    if isinstance(model, TrainingSteps):
        facts = replace(facts, mode="training", training=True)
    gc_s, slept_s, loading = waiting(call)
    loader_s = loading.seconds / loading.calls
    waits = loader_s > 0.02 * wall_s
    tensors_kept, graphs_kept, bytes_kept = kept_alive(call)
    padded, padded_where = padding(workload)
    return Evidence(
        facts=facts,
        wall_s=wall_s,
        operations=found,
        watched_s=watched_s,
        peaks=measure_peaks(device),
        settings={**_settings(), "records": str(_records(call()))},
        variants=variants(call, wall_s, 0.5 * seconds, module if owner is model else None) if device == "cpu" else {},
        threads=torch.get_num_threads(),
        cores=facts.physical_cores,
        crowded=clock.crowded,
        rows=facts.samples,
        padding=padded,
        padding_where=padded_where,
        subnormal_weights=subnormal(module),
        weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters()) if module is not None else 0,
        duplicate_bytes=duplicates(module),
        first_call_s=first_call_s,
        syncs=syncs,
        batches_run=watch.batches_run,
        batches_seen_before=watch.batches_seen_before,
        compiled=is_compiled(model),
        loader_s=loader_s,
        loader_rows=loading.rows,
        loader_batches=loading.batches // loading.calls,
        at_hand_s=at_hand(call, loading) if waits else 0.0,
        fresh_s_per_byte=fresh_s_per_byte() if graphs_kept else 0.0,
        tensors_kept=tensors_kept,
        graphs_kept=graphs_kept,
        bytes_kept=bytes_kept,
        gc_s=gc_s,
        slept_s=slept_s,
    )


def glance(workload: Workload, seconds: float) -> Evidence:
    """What a search needs to know where to begin: operators, settings and peaks, in about four calls.

    The model is left as it was: the reference of the search is computed from it.
    """
    del seconds
    device = device_type(workload)
    module = workload.model if isinstance(workload.model, torch.nn.Module) else torch.nn.Module()
    # A model may write into what it is given, and the reference is computed from these inputs afterwards.
    fresh = replace(workload, inputs=[map_tensors(torch.clone, workload.inputs[0])])
    with unchanged(workload, module), torch.no_grad():
        plain = timed(lambda: fresh.run(fresh.model, fresh.inputs[0]), device, 0.0, least=2)
        found, watched_s = operations(fresh, device, calls=1)
    facts = probe_facts(workload)
    return Evidence(
        facts=facts,
        wall_s=min(plain),
        operations=found,
        watched_s=watched_s,
        peaks=measure_peaks(device),
        settings={**_settings(), "grad": "False"},
        threads=torch.get_num_threads(),
        cores=facts.physical_cores,
        rows=facts.samples,
    )


def padding(workload: Workload) -> tuple[float, str]:
    """Share of padded positions in the inputs, and where that is seen: a mask's zeros, else a repeated last token."""
    padded = positions = 0
    where = ""
    for batch in workload.inputs:
        given = {path: leaf for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() == 2}
        mask = next((t for path, t in given.items() if path.endswith("attention_mask")), None)
        if mask is not None:
            padded += int((mask == 0).sum())
            positions += mask.numel()
            where = "attention_mask"
            continue
        ids = next((t for t in given.values() if t.dtype in (torch.int32, torch.int64) and t.shape[1] > 4), None)
        if ids is not None:
            last = ids[:, -1:]
            run = (ids.flip(1) == last).long().cumprod(1).sum(1)
            alike = int((last == last.mode(0).values).sum())
            if alike > 1 or len(ids) == 1:  # one token at the end of several rows: the filler
                padded += int(run[run > 1].sum())
            positions += ids.numel()
            where = "a repeated last token"
    return (padded / positions if positions else 0.0), where


def subnormal(module: torch.nn.Module | None) -> float:
    """Share of nonzero float32 weights below the smallest normal number."""
    small = total = 0
    for parameter in module.parameters() if module is not None else ():
        if parameter.dtype == torch.float32 and parameter.device.type == "cpu":
            magnitude = parameter.detach().abs()
            small += int(((magnitude > 0) & (magnitude < torch.finfo(torch.float32).tiny)).sum())
            total += int((magnitude > 0).sum())
    return small / total if total else 0.0


def duplicates(module: torch.nn.Module | None) -> int:
    """Bytes of large parameters that equal another one, value for value, in memory of their own."""
    groups: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in module.parameters() if module is not None else ():
        if parameter.numel() >= 1 << 16:
            key = (tuple(parameter.shape), parameter.dtype, float(parameter.detach().flatten()[:64].double().sum()))
            groups[key].append(parameter.detach())
    wasted = 0
    for same in groups.values():
        kept: list[torch.Tensor] = []
        for tensor in same:
            if any(tensor.data_ptr() != other.data_ptr() and torch.equal(tensor, other) for other in kept):
                wasted += tensor.numel() * tensor.element_size()
            else:
                kept.append(tensor)
    return wasted


def kept_alive(call: Callable[[], Any], calls: int = 3) -> tuple[float, float, float]:
    """Tensors a call that stay alive after it, how many of them hold an autograd graph, and their bytes.

    Counted over `calls` calls after one that settles caches; 0 unless every call left some behind.
    """
    counts = []
    for _ in range(calls + 1):
        call()
        gc.collect()
        # By type, not isinstance: lazy proxies among all objects would be woken.
        alive = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in alive)
        counts.append((len(alive), sum(tensor.grad_fn is not None for tensor in alive), size))
        del alive  # it would keep them for the next count
    if min(after[0] - before[0] for before, after in itertools.pairwise(counts)) < 1:
        return 0.0, 0.0, 0.0
    kept, graphs, size = (max(0.0, (last - first) / calls) for first, last in zip(counts[0], counts[-1], strict=True))
    return kept, graphs, size


def fresh_s_per_byte(size: int = 32 << 20) -> float:
    """Seconds a byte that writing memory for the first time costs over writing it again."""
    costs = []
    for _ in range(3):
        tensor = torch.empty(size, dtype=torch.uint8)  # large enough that it comes from the system each time
        times = []
        for _ in range(3):
            began = time.perf_counter()
            tensor.fill_(1)
            times.append(time.perf_counter() - began)
        costs.append(times[0] - min(times[1:]))
        del tensor
    return max(0.0, statistics.median(costs)) / size


def _settings() -> dict[str, str]:
    return {
        "anomaly": str(torch.is_anomaly_enabled()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "profiler": str(torch.autograd.profiler._is_profiler_enabled),
        "grad": str(torch.is_grad_enabled()),
    }


def _records(output: Any) -> bool:
    """Whether autograd keeps a graph for the output."""
    return any(tensor.requires_grad for tensor in tensors(output))
