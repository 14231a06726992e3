"""The same questions under Holistic Trace Analysis' definitions and rounding, for those who compare with it.

What differs from the exact analyses: events are rounded inward to whole microseconds, whatever carries a stream
number counts as device work (sync events and the host side of generated kernels too), kernels are told apart by name
alone, all devices are pooled, the last of several steps is dropped, and one gap has one cause. Kept for comparison;
use the exact ones.
"""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from fettle.trace.analyses.launches import launch_rows
from fettle.trace.frames import frame_of, names_of_rows, with_rank
from fettle.trace.intervals import combinations, intersect, merge, total
from fettle.trace.kinds import DEVICE_KINDS, Kind
from fettle.trace.model import Ints, Trace, per_trace

_COMMUNICATION = re.compile(r"(^nccl.*)|(^hip)|(^hccl)|(.*ncclKernel.*)")
_MEMORY = re.compile(r"(^(hip)?Memcpy)|(^(hip)?Memset)|(^dma)")
_NOT_COMPUTATION = re.compile(
    r"(^nccl)|(.*Memcpy)|(.*Memset)|(.*dma)|(^.*Sync)|(^Stream Wait Event)|(cuda.*LaunchKernel)|(^runFunction)|"
    r"(^hip)|(^job_exe)|"
    r"(^packet)|(^pe_exe)|(^cpum_exe_subgraph)|(^hccl)|(^collective_subgraph_execution)"
)
CONSECUTIVE_US = 30
_LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cudaMemcpyAsync", "cudaMemsetAsync"}
_QUEUED = _LAUNCHES | {
    "cuLaunchKernel", "cuLaunchKernelEx", "hipLaunchKernel", "hipExtModuleLaunchKernel", "hipMemcpyAsync",
    "hipMemsetAsync", "hipMemcpyWithStream",
}  # fmt: skip


def kernel_type(name: str) -> str:
    """COMMUNICATION, MEMORY, COMPUTATION or OTHER, by name."""
    if _COMMUNICATION.match(name):
        return "COMMUNICATION"
    if _MEMORY.match(name):
        return "MEMORY"
    return "OTHER" if _NOT_COMPUTATION.match(name) else "COMPUTATION"


@per_trace
def _rounded(trace: Trace) -> pl.DataFrame:
    """Device rows as HTA sees them, in whole microseconds; those of the launch are null where none is known."""
    ts, end = _microseconds(trace)
    stream, correlation, codes = trace.column("stream"), trace.column("correlation"), trace.column("name")
    kept = trace.kind != Kind.OTHER
    host = kept & (stream < 0)
    gpu = kept & (stream != -1)
    is_step = trace.named(lambda name: name.startswith("ProfilerStep#"))
    marks = host & is_step
    if len(np.unique(codes[is_step])) > 1 and marks.any():
        host &= ts < ts[marks].max()
        gpu &= (stream >= 0) & (correlation >= 0) & np.isin(correlation, correlation[host & (correlation >= 0)])
    rows = np.flatnonzero(gpu)
    by_row = np.full(trace.events.height, -1, dtype=np.int64)
    by_row[trace.device_rows] = launch_rows(trace)
    launch = by_row[rows]
    called = (launch >= 0) & host[launch]
    types = pl.Series([kernel_type(name) for name in trace.names], dtype=pl.String())
    frame = pl.DataFrame(
        {
            "row": rows,
            "name": names_of_rows(trace, rows),
            "ts": ts[rows],
            "end": end[rows],
            "stream": stream[rows],
            "type": types.gather(pl.Series(codes[rows], dtype=pl.UInt32())),
            "on_device": np.isin(trace.kind[rows], DEVICE_KINDS),
            "called": called,
            "launch_ts": ts[launch],
            "launch_end": end[launch],
            "launch": names_of_rows(trace, launch),
        }
    )
    of_launch = pl.col("launch_ts", "launch_end", "launch")
    return frame.with_columns(pl.when("called").then(of_launch)).drop("called")


def _of_type(work: pl.DataFrame, kind: str) -> tuple[Ints, Ints]:
    """Starts and ends of the work of one type."""
    mine = work.filter(pl.col("type") == kind)
    return mine["ts"].to_numpy(), mine["end"].to_numpy()


def _microseconds(trace: Trace) -> tuple[Ints, Ints]:
    """Start rounded up and end rounded down, where the trace's clock has fractions at all."""
    if not (np.any(trace.ts % 1000) or np.any(trace.dur % 1000)):
        return trace.ts // 1000, trace.end // 1000
    start, length = trace.ts / 1000.0, trace.dur / 1000.0
    return np.ceil(start).astype(np.int64), np.floor(start + length).astype(np.int64)


def temporal_breakdown(trace: Trace) -> pl.DataFrame:
    """Columns: rank, idle_us, compute_us, non_compute_us, kernel_us (first start to last end); no row without work."""
    work = _rounded(trace)
    columns = dict.fromkeys(("rank", "idle_us", "compute_us", "non_compute_us", "kernel_us"), int)
    if not work.height:
        return frame_of([], **columns)
    ts, end = work["ts"].to_numpy(), work["end"].to_numpy()
    span = int(end.max() - ts.min())
    busy, compute = _merged_total(ts, end), _merged_total(*_of_type(work, "COMPUTATION"))
    return frame_of([(trace.rank, span - busy, compute, busy - compute, span)], **columns)


def _merged_total(start: Ints, end: Ints) -> int:
    """Summed length of merged intervals where events shorter than their rounding count negatively, as they do there."""
    if not len(start):
        return 0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.append(True, start[1:] > reach[:-1]))
    return int((np.maximum.reduceat(end, first) - start[first]).sum())


def deviations(trace: Trace) -> list[str]:
    """Where HTA's own numbers for this trace may differ from these, and why."""
    reasons: list[str] = []
    work = _rounded(trace)
    calls = work.select("stream", ts="launch_ts").drop_nulls()
    if pl.concat([work.select("stream", "ts"), calls]).is_duplicated().any():
        reasons.append("its sort leaves the order of equal times open: mean queue length")
    silent = work.filter("on_device", pl.col("launch_ts").is_null())["row"].to_numpy()
    lost = int((trace.column("correlation")[silent] > 0).sum())
    if lost:
        reasons.append(
            f"it takes the file's first event for the launch of work whose launch is not there ({lost} of "
            f"{work.height}): idle by category"
        )
    if trace.facts.wide_clock_chunks:
        reasons.append("it holds clocks since 1970 to 256 ns: times that are rounded by 1 µs more or less")
    names = {"Stream Wait Event", "pe_exe"} & set(work["name"])
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
    communication, compute = merge(*_of_type(work, "COMMUNICATION")), merge(*_of_type(work, "COMPUTATION"))
    whole = total(communication)
    return round(100 * total(intersect(communication, compute)) / whole, 2) if whole else None


def kernel_types(trace: Trace) -> pl.DataFrame:
    """Columns: kernel_type (combinations joined by ` overlapping `), sum_us."""
    work = _rounded(trace)
    types = ("COMPUTATION", "COMMUNICATION", "MEMORY")
    lengths = combinations({kind: merge(*_of_type(work, kind)) for kind in types})
    rows = [(" overlapping ".join(names), us) for names, us in lengths.items()]
    return frame_of(rows, kernel_type=str, sum_us=int).sort("sum_us", descending=True)


def kernel_statistics(trace: Trace) -> pl.DataFrame:
    """Columns: name, kernel_type, sum_us, max_us, min_us, std_us, mean_us: over launches, with no row folded away."""
    work = _rounded(trace)
    dur = pl.col("end") - pl.col("ts")
    return (
        work.filter(pl.col("type") != "OTHER")
        .group_by("name", kernel_type="type")
        .agg(sum_us=dur.sum(), max_us=dur.max(), min_us=dur.min(), std_us=dur.std().fill_null(0.0), mean_us=dur.mean())
        .sort("kernel_type", "name")
    )


def idle_breakdown(trace: Trace) -> pl.DataFrame:
    """Per stream and label (host_wait, kernel_wait, other): rank, stream, idle_category, idle_us, idle_ratio."""
    before = pl.col("end").shift().over("stream")
    idle_us, late = pl.col("ts") - before, (pl.col("launch_ts") > before).fill_null(value=False)
    work = _rounded(trace).filter("on_device").sort("stream", "ts", maintain_order=True)
    work = work.select("stream", idle_us=idle_us, late=late, short=idle_us < CONSECUTIVE_US)
    idle, late, short = pl.col("idle_us"), pl.col("late"), pl.col("short")
    sums = work.group_by("stream", maintain_order=True).agg(
        host_wait=idle.filter(late).sum(),
        kernel_wait=idle.filter(~late, short).sum(),  # of unknown launch, too
        other=idle.filter(~late, ~short).sum(),
    )
    whole = idle.sum().over("stream")
    shares = (
        sums.unpivot(index="stream", variable_name="idle_category", value_name="idle_us")
        .sort("stream", maintain_order=True)
        .with_columns(idle_ratio=pl.when(whole != 0).then(idle / whole).otherwise(0.0))
    )
    return with_rank(trace, shares)


def launch_statistics(trace: Trace) -> pl.DataFrame:
    """The four launch calls that HTA knows, in the columns of its launch histograms: correlation, call, call_row,
    call_ns, duration_ns, delay_ns (never negative), short (the work is, and its call is no longer than 50 us)."""
    work = _rounded(trace).filter("on_device", pl.col("launch").is_in(_LAUNCHES))
    call, length = pl.col("launch_end") - pl.col("launch_ts"), pl.col("end") - pl.col("ts")
    return work.select(
        pl.Series("correlation", trace.column("correlation")[work["row"].to_numpy()]),
        call="launch",
        call_row="row",
        call_ns=1000 * call,
        duration_ns=1000 * length,
        delay_ns=1000 * (pl.col("ts") - pl.col("launch_end")).clip(0),
        short=(length < call) & (call <= 50),
    )


def queue_summary(trace: Trace) -> pl.DataFrame:
    """Columns: stream, count, mean, max of the queue length over its points (not weighted by time)."""
    work = _rounded(trace).filter(pl.col("launch").is_in(_QUEUED))
    points = pl.concat([work.select("stream", time=at, change=pl.lit(by)) for at, by in (("launch_ts", 1), ("ts", -1))])
    length = pl.col("change").cum_sum().over("stream")
    lengths = points.sort("stream", "time", maintain_order=True).select("stream", length=length)
    return lengths.group_by("stream", maintain_order=True).agg(
        count=pl.len(), mean=pl.col("length").mean(), max=pl.col("length").max()
    )
