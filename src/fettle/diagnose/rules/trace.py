"""Findings from a profiler trace: where its steps wait, by the trace room's time account.

A bound is the time that the cause holds over the wall time of the steps. The profiler itself makes the rest of a step
longer, which would make that share too small: what its events cost is taken off the wall time first. On a trace without
a device, what operators took longer than the fastest of the same name and shapes is taken off as well (a core that
waited is slow at first, and others use it, too), and time that no event explains may belong to any cause: it counts in
bounds, and does not make one of them.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import polars as pl

from fettle.diagnose.finding import Finding
from fettle.diagnose.rules._rule import GRAPHS, LEAST
from fettle.trace import (
    CAUSES_OF_HOST,
    Kind,
    Trace,
    host_stacks,
    idle_summary,
    kernel_table,
    loader_waits,
    outermost_operators,
    small_operators,
    steps,
    time_account,
)
from fettle.units import count_text

_LEAST_PYTHON = 0.25
"""On a trace of the host alone: Python around operators below this share is the rule, not a fault."""
_FEWEST_OPERATORS = 50
"""For each step, likewise."""
_EVENT_NS = 3_000
"""More than recording one event on the host costs: 0.9 us as `bench/trace_bounds.py --event-cost` found it, shapes
included; Python's stacks cost more, and have events of their own."""


_CAUSES = {
    "idle_data_loading": Finding(
        "data-wait",
        "The step waits for data.",
        advice="more loader workers, or cheaper transforms: fettle data finds the setting",
        before="DataLoader(dataset, batch_size=32)",
        after="DataLoader(dataset, batch_size=32, num_workers=N, persistent_workers=True)",
    ),
    "idle_blocking_call": Finding(
        "syncs",
        "The device idles while the host waits in a blocking call.",
        advice="keep values on the device; copy from pinned memory without blocking",
        before="total += loss.item()",
        after="total += loss.detach()  # .item() once, at the end",
    ),
    "idle_python": Finding(
        "python-bound",
        "The device idles while the host runs Python.",
        advice="compile the model, or record CUDA graphs",
        after="model = torch.compile(model)\ny = model(x)",
        levels=GRAPHS,
    ),
    "idle_operator": Finding(
        "launch-bound",
        "The device idles while the host is inside operators: many small kernels.",
        advice="compile the model, or record CUDA graphs",
        after="model = torch.compile(model, mode='reduce-overhead')\ny = model(x)",
        levels=GRAPHS,
    ),
    "idle_runtime_call": Finding(
        "runtime-calls",
        "The device idles in other calls to its runtime.",
        advice="fettle trace idle names the calls: fewer events, streams and queries in the step",
        before="event = torch.cuda.Event()  # every step",
        after="event = torch.cuda.Event()  # once",
    ),
    "idle_launch_call": Finding(
        "launch-bound-calls",
        "The device idles while kernels are being launched.",
        advice="record CUDA graphs",
        after="graph.replay()",
        levels=GRAPHS,
    ),
    "idle_launch_latency": Finding(
        "launch-latency",
        "The device idles between a launch and its start.",
        advice="record CUDA graphs, or keep more work queued",
        after="graph.replay()",
        levels=GRAPHS,
    ),
    "idle_other_rank": Finding(
        "other-rank",
        "The step waits for another rank.",
        advice="find the late rank (fettle trace comm) and divide the work evenly",
        before="sampler = None  # ranks with longer rows are late",
        after="sampler = rows_of_like_length(rank)",
    ),
    "idle_allocator": Finding(
        "allocator",
        "The device idles while memory is allocated or freed.",
        advice="stop calling empty_cache(); expandable segments; fixed shapes",
        before="torch.cuda.empty_cache()  # every step",
        after="# let the cache work",
    ),
    "idle_compile_or_load": Finding(
        "compiling",
        "Steps contain compilation or lazy loading.",
        advice="warm up, keep the compile cache, and mark sizes that change dynamic: fettle diagnose FILE.py names the "
        "guard that failed",
        before="for batch in loader:\n    step(batch)",
        after="step(example)  # warm up\nfor batch in loader:\n    step(batch)",
    ),
    "idle_garbage_collection": Finding(
        "garbage-collection",
        "The device idles during Python's garbage collection.",
        advice="gc.freeze(), and collect at a time of your own",
        before="train(model)",
        after="gc.collect()\ngc.freeze()\ntrain(model)",
    ),
    "idle_stream_event": Finding(
        "stream-event",
        "Work waits for an event of another stream.",
        advice="look at the streams' order: fettle trace critical",
        before="stream.wait_event(event)  # before all work",
        after="stream.wait_event(event)  # before the work that needs it",
    ),
    "idle_between_kernels": Finding(
        "between-kernels",
        "The usual gap between many short kernels adds up.",
        advice="compile: fewer, larger kernels",
        after="model = torch.compile(model)\ny = model(x)",
        levels={"compile": "default"},
    ),
    "exposed_communication": Finding(
        "communication",
        "Communication is not hidden behind computing.",
        advice="larger buckets, overlap, or fewer bytes",
        before="DistributedDataParallel(model, bucket_cap_mb=1)",
        after="DistributedDataParallel(model, gradient_as_bucket_view=True)",
    ),
    "exposed_copy": Finding(
        "transfers",
        "The device copies while nothing computes.",
        advice="pinned memory and non_blocking copies",
        before="x = x.cuda()",
        after="x = x.cuda(non_blocking=True)  # DataLoader(..., pin_memory=True)",
    ),
}
"""By column of the time account: what is said of time that was lost in this way, without its numbers."""
_CROSSING = re.compile(r"HtoD|DtoH|H2D|D2H|M2D|D2M|HostToDevice|DeviceToHost", re.IGNORECASE)
_VERSION = re.compile(r"Torch-Compiled Region: (\d+)/(\d{1,9})")
"""What ran: the number of a function, and of its version, from 0."""
_ON_HOST = {
    "python-bound": "The main thread runs Python between many small operators.",
    "garbage-collection": "Python's garbage collector runs during steps.",
}
"""By rule: what is said instead where there is no device."""
_MOSTLY = 0.9
"""Where less of the wall time than this counts in the bounds, a finding says so: it may be far above its share."""


def trace_findings(trace: Trace) -> tuple[list[Finding], dict[str, float]]:
    """Findings of one rank's trace, costliest first; and its time budget as shares of the wall time."""
    account = time_account(trace)
    wall_ns = int(account["wall_ns"].sum())
    if wall_ns <= 0:
        return [], {}
    share = {
        column.removesuffix("_ns"): int(account[column].sum()) / wall_ns
        for column in account.columns
        if column.endswith("_ns") and column not in ("start_ns", "wall_ns", "idle_ns")
    }
    count = account["step"].n_unique()
    on_device = bool(trace.device_keys)
    busy = share["compute"] + share["exposed_communication"] + share["exposed_copy"] if on_device else 0.0
    unknown = 0.0 if on_device else share["idle_host_untraced"]
    aside_ns = _profiler_ns(trace) + (0 if on_device else _slowed_ns(trace))
    left = 1 - aside_ns * max(1, len(trace.device_keys)) / wall_ns  # which has each step once a device
    aside = "recording" if on_device else "recording, and operators slower than the fastest alike"
    details = _details(trace)
    trains = any(name.startswith("autograd::engine") for name in trace.names)  # graphs are recorded of inference alone

    findings = []
    for name, cause in _CAUSES.items():
        lost, besides, least, lines = share[name], unknown, LEAST, []
        if name == "idle_data_loading":
            waits = loader_waits(trace)
            # The main thread may wait while the device still works: only the device's idle time can be won.
            usual = float((waits["wait_ns"] / waits["wall_ns"].clip(1)).median() or 0.0)  # type: ignore[arg-type]
            lines = [f"the main thread waits {usual:.1%} of a step for the next batch"]
            if not on_device:  # operators inside the loader are loading too
                lost = max(lost, int(waits["wait_ns"].sum()) / wall_ns)
        elif name == "idle_compile_or_load":
            lines = _compilations(trace)
        elif name == "exposed_copy":
            lost *= _between_host_and_device(trace)
        elif name == "idle_python" and not on_device:
            lost, least = lost + unknown, _LEAST_PYTHON
            besides = min(1.0, int(small_operators(trace)["time_ns"].sum()) / wall_ns)
            lost *= len(outermost_operators(trace)) >= _FEWEST_OPERATORS * count
        if lost < least:
            continue
        meanwhile = details.get(name.removeprefix("idle_"))
        says = cause.says if on_device else _ON_HOST.get(cause.rule, cause.says)
        formula = "time lost to it / (wall time of the steps - what recording their events cost"
        findings.append(
            replace(
                cause,
                says=f"{says.removesuffix('.')} ({lost:.0%} of the wall time).",
                bound=min(0.999, (lost + besides) / max(left, busy + lost + besides)),
                evidence=(
                    f"{lost:.1%} of the wall time of {count_text(count, 'step')}",
                    *lines,
                    *([f"meanwhile: {meanwhile}"] if meanwhile else []),
                    *([f"{1 - left:.0%} of it do not count in the bound: {aside}"] if left < _MOSTLY else []),
                ),
                parts=((cause.rule, lost), ("the rest", 1 - lost)),
                levels=cause.levels if on_device and not (trains and cause.levels == GRAPHS) else {},
                formula=formula + (")" if on_device else " - what operators took longer than the fastest alike)"),
            )
        )
    if on_device and (small := _small_kernels(trace, share["compute"])):
        findings.append(small)
    budget = {name: value for name, value in share.items() if value > 0}
    return sorted(findings, key=lambda finding: finding.weight, reverse=True), budget


def _compilations(trace: Trace) -> list[str]:
    """How often torch.compile compiled within the trace, and which functions ran in more than one version."""
    times = int(trace.named(lambda name: name == "_compile.compile_inner (dynamo_timed)").sum())
    again = sorted({match[1] for name in trace.names if (match := _VERSION.match(name)) and int(match[2])})
    lines = [f"torch.compile compiled {count_text(times, 'function')} in it"] if times else []
    return lines + ([f"compiled again, for a guard failed: functions {', '.join(again[:8])}"] if again else [])


def _between_host_and_device(trace: Trace) -> float:
    """The share of copies and memory sets, by their time, that pinned memory would help."""
    length = trace.dur * np.isin(trace.kind, (Kind.MEMCPY, Kind.MEMSET))
    return float(length[trace.named(_CROSSING.search)].sum() / max(length.sum(), 1))


def _profiler_ns(trace: Trace) -> int:
    """The most that recording the host's events within the steps can have cost the thread with most of them."""
    rows = _within_steps(trace, np.flatnonzero(trace.is_host), trace.ts + 1)
    threads = np.unique(trace.column("thread")[rows], return_counts=True)[1]
    return _EVENT_NS * int(threads.max(initial=0))


def _slowed_ns(trace: Trace) -> int:
    """What operators took longer than the fastest of the same name and shapes, within the steps."""
    rows = outermost_operators(trace)
    rows = rows[host_stacks(trace).cause[rows] == CAUSES_OF_HOST.index("operator")]  # not those inside a loader
    rows = _within_steps(trace, rows, trace.end)
    took = pl.DataFrame(
        {"name": trace.column("name")[rows], "shape": trace.column("shape")[rows], "ns": trace.dur[rows]}
    )
    return int(took.select((pl.col("ns") - pl.col("ns").min().over("name", "shape")).sum()).item())


def _within_steps(trace: Trace, rows: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The rows that begin within a step and end in it, too."""
    windows = steps(trace)
    at = np.searchsorted(windows["start_ns"].to_numpy(), trace.ts[rows], side="right") - 1
    inside: np.ndarray = rows[(at >= 0) & (ends[rows] <= windows["end_ns"].to_numpy()[at])]
    return inside


def _details(trace: Trace) -> dict[str, str]:
    """By cause of idle time in the steps: the events that held the host longest, of the device that idles most."""
    frames = [idle_summary(trace, device) for device in trace.device_keys]
    frame = max(frames, key=lambda one: one["idle_ns"].sum(), default=None)
    return dict(frame.select("cause", "what").iter_rows()) if frame is not None else {}


def _small_kernels(trace: Trace, compute: float) -> Finding | None:
    table = kernel_table(trace)
    short = table.filter(pl.col("mean_ns") < 5_000)
    share = float(short["sum_ns"].sum()) / max(float(table["sum_ns"].sum()), 1.0) * compute
    if share < LEAST:
        return None
    return Finding(
        "small-kernels",
        "Kernels shorter than their launch take much of the device's time.",
        share,
        evidence=(f"{int(short['count'].sum())} kernels below 5 us on average",),
        levels={"compile": "default"},
        advice="compile: fuse them",
        formula="time of kernels below 5 us on average / wall time of the steps",
        after="model = torch.compile(model)\ny = model(x)",
    )
