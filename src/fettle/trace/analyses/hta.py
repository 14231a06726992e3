"""The same questions under Holistic Trace Analysis' definitions and rounding, for those who compare with it.

What differs from the exact analyses: events are rounded inward to whole microseconds, whatever carries a stream
number counts as device work (sync events and the host side of generated kernels too), kernels are told apart by name
alone, all devices are pooled, the last of several steps is dropped, and one gap has one cause. Kept for comparison;
use the exact ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import polars as pl

from fettle.trace.analyses.launches import launch_links
from fettle.trace.frames import frame_of
from fettle.trace.intervals import combinations, intersect, merge, total
from fettle.trace.kinds import Kind
from fettle.trace.model import Bools, Ints, Trace, per_trace

_COMMUNICATION = re.compile(r"(^nccl.*)|(^hip)|(^hccl)|(.*ncclKernel.*)")
_MEMORY = re.compile(r"(^(hip)?Memcpy)|(^(hip)?Memset)|(^dma)")
_NOT_COMPUTATION = re.compile(
    r"(^nccl)|(.*Memcpy)|(.*Memset)|(.*dma)|(^.*Sync)|(^Stream Wait Event)|(cuda.*LaunchKernel)|(^runFunction)|"
    r"(^hip)|(^job_exe)|"
    r"(^packet)|(^pe_exe)|(^cpum_exe_subgraph)|(^hccl)|(^collective_subgraph_execution)"
)
_QUEUED = {
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "hipLaunchKernel",
    "hipExtModuleLaunchKernel",
    "hipMemcpyAsync",
    "hipMemsetAsync",
    "hipMemcpyWithStream",
}
_LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync"}


def kernel_type(name: str) -> str:
    """COMMUNICATION, MEMORY, COMPUTATION or OTHER, by name."""
    if _COMMUNICATION.match(name):
        return "COMMUNICATION"
    if _MEMORY.match(name):
        return "MEMORY"
    return "OTHER" if _NOT_COMPUTATION.match(name) else "COMPUTATION"


@dataclass(frozen=True)
class _Rounded:
    """Device rows as HTA sees them, in whole microseconds."""

    row: Ints
    ts: Ints
    dur: Ints
    stream: Ints
    type: np.ndarray[tuple[int], np.dtype[np.object_]]
    launch_ts: Ints  # -1: no launch
    launch_dur: Ints
    launch_name: np.ndarray[tuple[int], np.dtype[np.object_]]

    @property
    def end(self) -> Ints:
        return self.ts + self.dur

    def of(self, flags: Bools) -> tuple[Ints, Ints]:
        return self.ts[flags], self.end[flags]


@per_trace
def _rounded(trace: Trace) -> _Rounded:
    ts, end = _microseconds(trace)
    stream, correlation = trace.column("stream"), trace.column("correlation")
    kept = trace.kind != Kind.OTHER
    host = kept & (stream < 0)
    steps = {c for c, n in enumerate(trace.names) if n.startswith("ProfilerStep#")}
    gpu = kept & (stream != -1)
    codes = trace.column("name")
    marks = host & np.isin(codes, list(steps))
    if len(steps) > 1 and marks.any():
        host &= ts < ts[marks].max()
        gpu &= (stream >= 0) & (correlation >= 0) & np.isin(correlation, correlation[host & (correlation >= 0)])
    rows = np.flatnonzero(gpu)
    types = np.array([kernel_type(n) for n in trace.names], dtype=object)
    links, by_row = launch_links(trace), np.full(trace.events.height, -1, dtype=np.int64)
    by_row[links.device_rows] = links.launch_rows
    launch = np.where((by_row[rows] >= 0) & host[by_row[rows]], by_row[rows], -1)
    names = np.array([*trace.names, ""], dtype=object)
    return _Rounded(
        rows,
        ts[rows],
        end[rows] - ts[rows],
        stream[rows],
        types[codes[rows]],
        np.where(launch >= 0, ts[np.maximum(launch, 0)], -1),
        np.where(launch >= 0, (end - ts)[np.maximum(launch, 0)], 0),
        names[np.where(launch >= 0, codes[np.maximum(launch, 0)].astype(np.int64), -1)],
    )


def _microseconds(trace: Trace) -> tuple[Ints, Ints]:
    """Start rounded up and end rounded down, where the trace's clock has fractions at all."""
    if not (np.any(trace.ts % 1000) or np.any(trace.dur % 1000)):
        return trace.ts // 1000, trace.end // 1000
    start, length = trace.ts / 1000.0, trace.dur / 1000.0
    return np.ceil(start).astype(np.int64), np.floor(start + length).astype(np.int64)


def temporal_breakdown(trace: Trace) -> pl.DataFrame:
    """Columns: rank, idle_us, compute_us, non_compute_us, kernel_us (first start to last end). Empty without device
    work.
    """
    work = _rounded(trace)
    columns = dict.fromkeys(("rank", "idle_us", "compute_us", "non_compute_us", "kernel_us"), int)
    if not len(work.row):
        return frame_of([], **columns)
    span = int(work.end.max() - work.ts.min())
    busy = _merged_total(work.ts, work.end)
    compute = _merged_total(*work.of(work.type == "COMPUTATION"))
    return frame_of([(trace.rank, span - busy, compute, busy - compute, span)], **columns)


def _merged_total(start: Ints, end: Ints) -> int:
    """Summed length of merged intervals where events shorter than their rounding count negatively, as they do there."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    group = np.concatenate([[0], np.cumsum(start[1:] > reach[:-1])])
    last = np.full(int(group[-1]) + 1, np.iinfo(np.int64).min)
    np.maximum.at(last, group, end)
    first = start[np.flatnonzero(np.diff(group, prepend=-1))]
    return int((last - first).sum())


def deviations(trace: Trace) -> list[str]:
    """Where HTA's own numbers for this trace may differ from these, and why."""
    reasons: list[str] = []
    work = _rounded(trace)
    called = work.launch_ts >= 0
    time, stream = np.concatenate([work.ts, work.launch_ts[called]]), np.concatenate([work.stream, work.stream[called]])
    if len(np.unique(np.stack([stream, time]), axis=1).T) < len(time):
        reasons.append("its sort leaves the order of equal times open: mean queue length")
    on_device = np.isin(trace.kind[work.row], [Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET])
    lost = int((on_device & ~called & (trace.column("correlation")[work.row] > 0)).sum())
    if lost:
        reasons.append(
            f"it takes the file's first event for the launch of work whose launch is not there ({lost} of "
            f"{len(work.row)}): idle by category"
        )
    if trace.facts.wide_clock_chunks:
        reasons.append("it holds clocks since 1970 to 256 ns: times that are rounded by 1 µs more or less")
    names = {"Stream Wait Event", "pe_exe"} & set(trace.name_of(work.row))
    if names:
        reasons.append(f"release 0.5.0 counts {' and '.join(sorted(names))} as computation, 0.6.1 does not")
    if "cuLaunchKernelEx" in trace.names:
        reasons.append("release 0.5.0 has another list of launch calls (cuLaunchKernelEx): queues, launches")
    if any(name.startswith("runFunction") for name in trace.names):
        reasons.append("it has categories, streams and launch calls of MTIA's own: times, idle, queues, launches")
    return reasons


def communication_overlap(trace: Trace) -> float | None:
    """Percentage of communication time that overlaps computation, to 2 decimals; None without communication."""
    work = _rounded(trace)
    communication = merge(*work.of(work.type == "COMMUNICATION"))
    whole = total(communication)
    return (
        round(100 * total(intersect(communication, merge(*work.of(work.type == "COMPUTATION")))) / whole, 2)
        if whole
        else None
    )


def kernel_types(trace: Trace) -> pl.DataFrame:
    """Columns: kernel_type (combinations joined by ` overlapping `), sum_us."""
    work = _rounded(trace)
    types = ("COMPUTATION", "COMMUNICATION", "MEMORY")
    lengths = combinations([merge(*work.of(work.type == t)) for t in types])
    rows = [
        (" overlapping ".join(t for i, t in enumerate(types) if key >> i & 1), total(pair))
        for key, pair in lengths.items()
    ]
    return frame_of(rows, kernel_type=str, sum_us=int).sort("sum_us", descending=True)


def kernel_statistics(trace: Trace) -> pl.DataFrame:
    """Columns: name, kernel_type, sum_us, max_us, min_us, std_us, mean_us: over launches (HTA's table with no row
    folded away).
    """
    work = _rounded(trace)
    frame = pl.DataFrame({"name": trace.name_of(work.row), "kernel_type": work.type.astype(str), "dur": work.dur})
    dur = pl.col("dur")
    return (
        frame.filter(pl.col("kernel_type") != "OTHER")
        .group_by("name", "kernel_type")
        .agg(sum_us=dur.sum(), max_us=dur.max(), min_us=dur.min(), std_us=dur.std().fill_null(0.0), mean_us=dur.mean())
        .sort("kernel_type", "name")
    )


def idle_breakdown(trace: Trace, consecutive_kernel_delay_us: int = 30) -> pl.DataFrame:
    """Per stream and label (host_wait, kernel_wait, other): columns rank, stream, idle_category, idle_us,
    idle_ratio.
    """
    work = _rounded(trace)
    on_device = np.isin(trace.kind[work.row], [Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET])
    rows = []
    for stream in np.unique(work.stream[on_device]):
        mine = np.flatnonzero(on_device & (work.stream == stream))
        mine = mine[np.argsort(work.ts[mine], kind="stable")]
        interval = work.ts[mine][1:] - work.end[mine][:-1]
        launched = work.launch_ts[mine][1:]
        host = (launched >= 0) & (launched > work.end[mine][:-1])
        waits = ~host & (interval < consecutive_kernel_delay_us)  # of unknown launch, too
        sums = {
            "host_wait": interval[host].sum(),
            "kernel_wait": interval[waits].sum(),
            "other": interval[~host & ~waits].sum(),
        }
        whole = interval.sum()
        rows += [(trace.rank, int(stream), k, int(v), float(v / whole) if whole else 0.0) for k, v in sums.items()]
    return frame_of(rows, rank=int, stream=int, idle_category=str, idle_us=int, idle_ratio=float)


def launch_statistics(trace: Trace) -> pl.DataFrame:
    """The four launch calls that HTA knows, in the columns of its launch histograms: correlation, call, call_row,
    call_ns, duration_ns, delay_ns (never negative), short (the work is, and its call is no longer than 50 us).
    """
    work = _rounded(trace)
    chosen = np.isin(work.launch_name, list(_LAUNCHES)) & np.isin(
        trace.kind[work.row], [Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET]
    )
    delay = np.maximum(work.ts - work.launch_ts - work.launch_dur, 0)
    call, length = work.launch_dur[chosen], work.dur[chosen]
    return pl.DataFrame(
        {
            "correlation": trace.column("correlation")[work.row[chosen]],
            "call": work.launch_name[chosen].astype(str),
            "call_row": work.row[chosen],
            "call_ns": 1000 * call,
            "duration_ns": 1000 * length,
            "delay_ns": 1000 * delay[chosen],
            "short": (length < call) & (call <= 50),
        }
    )


def queue_summary(trace: Trace) -> pl.DataFrame:
    """Columns: stream, count, mean, max of the queue length over its points (not weighted by time)."""
    work = _rounded(trace)
    chosen = np.isin(work.launch_name, list(_QUEUED)) & (work.launch_ts >= 0)
    rows = []
    for stream in np.unique(work.stream[chosen]):
        mine = chosen & (work.stream == stream)
        time = np.concatenate([work.launch_ts[mine], work.ts[mine]])
        change = np.concatenate([np.ones(mine.sum(), np.int64), -np.ones(mine.sum(), np.int64)])
        length = np.cumsum(change[np.argsort(time, kind="stable")])
        rows.append((int(stream), len(length), float(length.mean()), int(length.max())))
    return frame_of(rows, stream=int, count=int, mean=float, max=int)
