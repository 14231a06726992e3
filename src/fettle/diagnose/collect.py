"""Gathering evidence, inside a worker process: a few calls plain, a few watched, a few with one thing switched.

Each collector is a function of its own that can be called alone: `watched` (time, FLOPs and bytes of every operator),
`syncs_on`, `variants` (what switching one thing brings), `waiting` (time that is not computing), `kept_alive`,
`padding`, `weights`. `collect` runs them all, notes what each cost, and is what the worker is asked for.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from fettle.diagnose.collectors.compile_watch import is_compiled
from fettle.diagnose.collectors.memory import (
    allocator_counts,
    cost_of_fresh_memory,
    kept_alive,
    padding,
    weights,
)
from fettle.diagnose.collectors.operators import operations, watched
from fettle.diagnose.collectors.syncs import syncs_on
from fettle.diagnose.collectors.training import as_workload, device_type, facts_of, trained
from fettle.diagnose.collectors.variants import SLOW_S, timed, variants, without_anomaly_checks
from fettle.diagnose.collectors.waiting import all_threads_s, crowded, waiting
from fettle.diagnose.evidence import Batches, Cost, Evidence, Fresh
from fettle.generate import brief
from fettle.machine import measure_peaks
from fettle.measure import Load
from fettle.procs.limits import pages_fetched
from fettle.techniques import probe_facts, unchanged
from fettle.train import TrainingWorkload
from fettle.workload import Workload, again, fresh, tensors

_Found = TypeVar("_Found")
_MANY_PAGES = 64
"""Fewer a call, a quarter of a MiB, are what a program needs anyway."""


def collect(measured: Workload | TrainingWorkload, seconds: float) -> Evidence:
    """All evidence of one workload, in about `seconds` and at least a few calls each, of a slow call as few as can be;
    of a training loop its steps."""
    workload = as_workload(measured)
    model = workload.model
    owner = trained(workload)
    costs: dict[str, Cost] = {}

    def call(batch: Any = workload.inputs[0]) -> Any:
        return workload.run(model, again(batch))

    def noted(name: str, look: Callable[[], _Found]) -> _Found:
        started = time.perf_counter()
        evidence = look()
        costs[name] = Cost(time.perf_counter() - started)
        return evidence

    module = owner if isinstance(owner, torch.nn.Module) else None
    began = time.perf_counter()
    answer = call()
    first_call_s = time.perf_counter() - began
    device, records = device_type(workload, answer), any(tensor.requires_grad for tensor in tensors(answer))
    del answer
    least = 1 if first_call_s > SLOW_S else 3
    counters, pages, threads_s = allocator_counts(device), pages_fetched(), all_threads_s()
    plain = noted("plain calls", lambda: timed(call, device, 0.25 * seconds, least))
    without_core = crowded(threads_s)
    waits = (all_threads_s()[1] - threads_s[1]) / costs["plain calls"].seconds
    pages = pages_fetched() - pages
    allocator = {name: count - counters[name] for name, count in allocator_counts(device).items()}
    wall_s = statistics.median(plain)
    least = 1 if wall_s > SLOW_S else 3

    def slower(name: str, watched_s: float) -> None:
        costs[name] = replace(costs[name], slowdown=max(1.0, watched_s / wall_s))

    watch, watched_s = noted("operators", lambda: watched(workload, device, least))
    slower("operators", watched_s)
    with without_anomaly_checks():  # they would be found
        report = noted("syncs", lambda: syncs_on(device, call, [owner, workload.inputs[0]]))
    slower("syncs", report.wall_s / report.calls)
    facts = replace(facts_of(measured), device=device)
    gc_s, slept_s, loading = noted("waiting", lambda: waiting(call, wall_s, device, least))
    kept = noted("kept alive", lambda: kept_alive(call))
    fetched = pages / len(plain) if device == "cpu" and pages >= _MANY_PAGES * len(plain) else 0.0
    fresh = Fresh()
    if fetched or kept.graphs:
        page_s, byte_s = noted("fresh memory", cost_of_fresh_memory)
        fresh = Fresh(fetched, fetched * page_s, byte_s)
    switched: dict[str, tuple[float, float, float]] = {}
    if device == "cpu":
        switched = noted("switches", lambda: variants(call, wall_s, 0.5 * seconds, module if owner is model else None))
    return Evidence(
        facts=facts,
        wall_s=wall_s,
        operations=watch.rows(),
        peaks=noted("peaks", lambda: measure_peaks(device)),
        settings={**_settings(), "records": str(records)},
        variants=switched,
        crowded=without_core,
        first_call_s=first_call_s,
        gc_s=gc_s,
        slept_s=slept_s,
        pauses=watch.pauses(),
        syncs=report.syncs,
        compiled=is_compiled(owner),
        batches=Batches(watch.batches_run, watch.batches_seen_before),
        built=dict(watch.built),
        padding=noted("padding", lambda: padding(workload)),
        weights=noted("weights", lambda: weights(module)),
        loading=loading,
        kept=kept,
        fresh=fresh,
        allocator={**allocator, "calls": len(plain)} if allocator else {},
        costs=costs,
        load=Load(waits=waits),
    )


def glance(workload: Workload, seconds: float) -> Evidence:
    """What a search needs to know where to begin: operators, settings and peaks, in about four calls.

    The model is left as it was: the reference of the search is computed from it.
    """
    del seconds
    device = device_type(workload)
    module = workload.model if isinstance(workload.model, torch.nn.Module) else torch.nn.Module()
    # A model may write into what it is given, and the reference is computed from these inputs afterwards.
    own = brief(replace(workload, inputs=[fresh(workload.inputs[0])]))
    with unchanged(workload, module), torch.no_grad():
        plain = timed(lambda: own.run(own.model, again(own.inputs[0])), device, 0.0, least=2)
        ops = operations(own, device, calls=1)
    return Evidence(
        facts=probe_facts(workload),
        wall_s=min(plain),
        operations=ops,
        peaks=measure_peaks(device),
        settings=_settings(),
    )


def _settings() -> dict[str, str]:
    return {
        "anomaly": str(torch.is_anomaly_enabled()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul": _matmul_precision(),
        "cudnn_benchmark": str(torch.backends.cudnn.benchmark),
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "profiler": str(torch.autograd.profiler._is_profiler_enabled),
    }


def _matmul_precision() -> str:
    """As `torch.get_float32_matmul_precision` calls it, which raises where a program has set it by the new names."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        own = torch.backends.cuda.matmul.fp32_precision
        chosen = torch.backends.fp32_precision if own == "none" else own  # type: ignore[attr-defined]
        return {"tf32": "high", "bf16": "medium"}.get(str(chosen), "highest")
