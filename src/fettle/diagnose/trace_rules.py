"""Findings from a profiler trace: where its steps wait, by the trace room's time account."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from fettle.diagnose.finding import Finding
from fettle.trace import Trace, kernel_table, steps, time_account

LEAST = 0.03

_IDLE = {
    "data_loading": ("data-wait", "The step waits for data.", "more loader workers, or cheaper transforms", {}),
    "blocking_call": (
        "syncs",
        "The device idles while the host waits in a blocking call.",
        "keep values on the device; copy from pinned memory without blocking",
        {},
    ),
    "python": (
        "python-bound",
        "The device idles while the host runs Python.",
        "compile the model, or record CUDA graphs",
        {"cuda_graphs": "on"},
    ),
    "operator": (
        "launch-bound",
        "The device idles while the host is inside operators: many small kernels.",
        "compile the model, or record CUDA graphs",
        {"cuda_graphs": "on"},
    ),
    "runtime_call": ("runtime-calls", "The device idles in other calls to its runtime.", "see fettle trace idle", {}),
    "launch_call": (
        "launch-bound-calls",
        "The device idles while kernels are being launched.",
        "record CUDA graphs",
        {"cuda_graphs": "on"},
    ),
    "launch_latency": (
        "launch-latency",
        "The device idles between a launch and its start.",
        "record CUDA graphs, or keep more work queued",
        {"cuda_graphs": "on"},
    ),
    "allocator": (
        "allocator",
        "The device idles while memory is allocated or freed.",
        "stop calling empty_cache(); expandable segments; fixed shapes",
        {},
    ),
    "compile_or_load": (
        "compiling",
        "Steps contain compilation or lazy loading.",
        "warm up, and keep the compile cache",
        {},
    ),
    "garbage_collection": (
        "garbage-collection",
        "The device idles during Python's garbage collection.",
        "gc.freeze(), and collect at a time of your own",
        {},
    ),
    "stream_event": ("stream-event", "Work waits for an event of another stream.", "look at the streams' order", {}),
    "between_kernels": (
        "between-kernels",
        "The usual gap between many short kernels adds up.",
        "compile: fewer, larger kernels",
        {"compile": "default"},
    ),
}
"""By cause of idle time: rule, sentence, advice, levels."""


def trace_findings(trace: Trace) -> tuple[list[Finding], dict[str, float]]:
    """Findings of one rank's trace, costliest first; and its time budget as shares of the wall time."""
    account = time_account(trace)
    wall = int(account["wall_ns"].sum())
    if wall <= 0:
        return [], {}
    share = {
        column.removesuffix("_ns"): int(account[column].sum()) / wall
        for column in account.columns
        if column.endswith("_ns") and column not in ("start_ns", "wall_ns", "idle_ns")
    }
    on_device = bool(trace.device_keys)
    found = []
    for cause, (rule, says, advice, levels) in _IDLE.items():
        idle = share.get(f"idle_{cause}", 0.0)
        lines = [f"{idle:.1%} of the wall time of {account['step'].n_unique()} steps"]
        if cause == "data_loading":
            # The main thread may wait while the device still works: only the device's idle time can be won.
            lines = [f"the main thread waits {data_waits(trace):.1%} of a step for the next batch", *lines]
        if idle >= LEAST:
            found.append(Finding(rule, says, idle, evidence=tuple(lines), advice=advice, levels=levels))
    for key, rule, says, advice in (
        (
            "exposed_communication",
            "communication",
            "Communication is not hidden behind computing.",
            "larger buckets, overlap, or fewer bytes",
        ),
        (
            "exposed_copy",
            "copies",
            "The device copies while nothing computes.",
            "pinned memory and non_blocking copies",
        ),
    ):
        if share.get(key, 0.0) >= LEAST:
            found.append(Finding(rule, says, share[key], evidence=(f"{share[key]:.1%} of the time",), advice=advice))
    if on_device:
        found += _small_kernels(trace, share.get("compute", 0.0))
    budget = {name: value for name, value in share.items() if value > 0}
    return sorted(found, key=lambda finding: finding.weight, reverse=True), budget


def data_waits(trace: Trace) -> float:
    """Median over steps of the share in which the main thread waits for the next batch (the loader's own range)."""
    windows = steps(trace)
    codes = [code for code, name in enumerate(trace.names) if name.startswith("enumerate(DataLoader)")]
    rows = np.flatnonzero(np.isin(trace.column("name"), codes) & trace.is_host)
    if not len(rows) or not windows.height:
        return 0.0
    begins, ends = trace.ts[rows], trace.end[rows]
    shares = []
    for start, end in zip(windows["start_ns"].to_list(), windows["end_ns"].to_list(), strict=True):
        inside = np.clip(np.minimum(ends, end) - np.maximum(begins, start), 0, None).sum()
        shares.append(float(inside) / max(end - start, 1))
    return float(np.median(shares))


def _small_kernels(trace: Trace, compute: float) -> Sequence[Finding]:
    table = kernel_table(trace)
    column = next((name for name in ("total_ns", "sum_ns", "duration_ns") if name in table.columns), "")
    if not column or "count" not in table.columns or not table.height:
        return []
    short = table.filter(pl.col(column) / pl.col("count") < 5_000)
    share = float(short[column].sum()) / max(float(table[column].sum()), 1.0) * compute
    if share < LEAST:
        return []
    return [
        Finding(
            "small-kernels",
            "Kernels shorter than their launch take much of the device's time.",
            share,
            evidence=(f"{int(short['count'].sum())} kernels below 5 us on average",),
            levels={"compile": "default"},
            advice="compile: fuse them",
        )
    ]
