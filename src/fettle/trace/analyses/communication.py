"""Collectives: how big, how fast, how well hidden."""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from fettle.trace.analyses.account import device_classes
from fettle.trace.frames import frame_of, names_of_rows
from fettle.trace.intervals import intersect, length_within, total
from fettle.trace.kinds import dtype_bytes, short_kernel_name
from fettle.trace.model import Trace

_KIND_IN_NAME = [
    ("allreduce", re.compile(r"all_?reduce|cross_device_reduce|one_shot|two_shot", re.I)),
    ("allgather", re.compile(r"all_?gather", re.I)),
    ("reducescatter", re.compile(r"reduce_?scatter", re.I)),
    ("alltoall", re.compile(r"all_?to_?all", re.I)),
    ("broadcast", re.compile(r"broadcast", re.I)),
    ("sendrecv", re.compile(r"send_?recv", re.I)),
    ("reduce", re.compile(r"reduce", re.I)),
]


def overlap(trace: Trace) -> pl.DataFrame:
    """How much communication ran while something computed.

    Columns: rank, device, communication_ns, hidden_ns, exposed_ns, hidden_share (null without communication).
    """
    parts = []
    for device in trace.device_keys:
        compute, comm, _ = device_classes(trace, device)
        whole, hidden = total(comm), total(intersect(comm, compute))
        parts.append((trace.rank, device, whole, hidden, whole - hidden, hidden / whole if whole else None))
    numbers = ("rank", "device", "communication_ns", "hidden_ns", "exposed_ns")
    return frame_of(parts, **dict.fromkeys(numbers, int), hidden_share=float)


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes over the busiest link for each byte of message, as nccl-tests define bus bandwidth (its PERFORMANCE.md).

    All-reduce moves 2(n-1)/n, all-gather, reduce-scatter and all-to-all (n-1)/n, the others 1.
    """
    if ranks < 2:
        return 1.0
    if collective == "allreduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if collective in ("allgather", "reducescatter", "alltoall") else 1.0


def collective_kind(argument: str, kernel_name: str) -> str:
    """The kind of a collective, by the profiler's argument, else by the kernel's name, else `unknown`."""
    text = argument.lower().removeprefix("c10d::").replace("_", "")
    for source in (text, short_kernel_name(kernel_name)):
        for kind, pattern in _KIND_IN_NAME:
            if source and pattern.search(source):
                return kind
    return argument or "unknown"


def collectives(trace: Trace) -> pl.DataFrame:
    """One row a communication kernel, in order of its start.

    Columns: rank, device, stream, row, name, collective, group, group_size (-1: unknown), bytes (of the message as
    nccl-tests count it: the whole, not a rank's part; null where unknown), start_ns, duration_ns, exposed_ns,
    algorithm_gb_per_s and bus_gb_per_s (10**9; from this rank's duration, which includes waiting for the others: a
    lower bound).
    """
    rows = trace.device_rows[trace.is_collective[trace.device_rows]]
    facts = trace.side["collectives"]
    by_row = {r: i for i, r in enumerate(facts["row"].to_list())}
    external = trace.column("external")
    by_external = {int(external[r]): i for r, i in by_row.items() if external[r] >= 0 and not trace.is_device[r]}
    which = [by_row.get(r, by_external.get(int(external[r]))) for r in rows.tolist()]
    facts = facts.select(pl.all().gather(pl.Series(which, dtype=pl.UInt32())))  # null of kernels that say nothing
    said = zip(facts["collective"].fill_null(""), trace.name_of(rows), strict=True)
    kinds, sizes = [collective_kind(*one) for one in said], facts["group_size"].fill_null(-1)
    # The gathered output, the scattered input: always the larger side is the whole message.
    elements, widths = pl.max_horizontal("in_elements", "out_elements"), map(dtype_bytes, facts["dtype"].fill_null(""))
    message = pl.when(elements.is_between(0, 2**50)).then(elements * pl.Series(list(widths), dtype=pl.Int64()))
    factor = pl.Series([bus_factor(*one) for one in zip(kinds, sizes, strict=True)], dtype=pl.Float64())
    exposed = np.zeros(len(rows), np.int64)
    device = trace.column("device")[rows].astype(np.int64)
    for one in trace.device_keys:
        mine = device == one
        compute = device_classes(trace, one)[0]
        exposed[mine] = trace.dur[rows[mine]] - length_within(compute, trace.ts[rows[mine]], trace.end[rows[mine]])
    frame = pl.DataFrame(
        {
            "rank": np.full(len(rows), trace.rank),
            "device": device,
            "stream": trace.column("stream")[rows],
            "row": rows,
            "name": names_of_rows(trace, rows),
            "collective": pl.Series(kinds, dtype=pl.String()),
            "group": facts["group"].fill_null(""),
            "group_size": sizes,
            "bytes": facts.select(message).to_series(),
            "start_ns": trace.ts[rows],
            "duration_ns": trace.dur[rows],
            "exposed_ns": exposed,
        }
    )
    rate = pl.when(pl.col("duration_ns") > 0).then(pl.col("bytes") / pl.col("duration_ns"))
    return frame.with_columns(algorithm_gb_per_s=rate, bus_gb_per_s=rate * factor)


def collective_table(trace: Trace) -> pl.DataFrame:
    """Collectives by kind, group and size.

    Columns: rank, collective, group, group_size, bytes, count, sum_ns, exposed_ns, median_ns, best_bus_gb_per_s (of the
    shortest: nearest to no waiting).
    """
    return (
        collectives(trace)
        .group_by("rank", "collective", "group", "group_size", "bytes")
        .agg(
            count=pl.len(),
            sum_ns=pl.col("duration_ns").sum(),
            exposed_ns=pl.col("exposed_ns").sum(),
            median_ns=pl.col("duration_ns").median(),
            best_bus_gb_per_s=pl.col("bus_gb_per_s").max(),
        )
        .sort("sum_ns", "collective", "group", "bytes", descending=[True, False, False, False])
    )
