"""How much work was queued on each stream over time, and how long the host was held by a full queue."""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.trace.analyses.launches import launch_links, text_column
from fettle.trace.analyses.slots import queues, waited_ns
from fettle.trace.model import Ints, Trace
from fettle.trace.ordering import order_by


def queue_length(trace: Trace) -> pl.DataFrame:
    """The number of launched but not yet started pieces of work on each stream: a step function.

    A launch adds the work it launches (a graph: all its kernels) at the call's start; work leaves when it starts.
    Columns: rank, device, stream, ts_ns, length. Rows in order of device, stream and time.
    """
    rows, calls = launch_links(trace).known
    device = trace.column("device")[rows].astype(np.int64)
    stream = trace.column("stream")[rows]
    time = np.concatenate([trace.ts[calls], np.maximum(trace.ts[rows], trace.ts[calls])])
    change = np.concatenate([np.ones(len(rows), np.int64), -np.ones(len(rows), np.int64)])
    device, stream = np.concatenate([device, device]), np.concatenate([stream, stream])
    order = order_by(device, stream, time, -change)
    device, stream, time, change = device[order], stream[order], time[order], change[order]
    length = np.cumsum(change)  # every stream's changes add up to zero, so the next one starts at zero
    return pl.DataFrame(
        {"rank": np.full(len(time), trace.rank), "device": device, "stream": stream, "ts_ns": time, "length": length}
    )


def queue_summary(trace: Trace) -> pl.DataFrame:
    """Queue length of each stream, weighted by time.

    Columns: rank, device, stream, mean, median, p95, max (pieces of work), empty_share and full_share of the time from
    the stream's first launch to its last start, depth (where the trace shows how long the queue can be), full_ns (time
    that launch calls waited for a slot). A queue that all streams of a device share is told on each of them.
    """
    full_of = {(q.device, q.stream): q for q in queues(trace)}
    series = queue_length(trace)
    parts = []
    for key, part in series.group_by("device", "stream", maintain_order=True):
        time, length = part["ts_ns"].to_numpy(), part["length"].to_numpy()
        weight, value = np.diff(time), length[:-1]
        whole = int(weight.sum())
        if whole == 0:
            weight, whole = np.ones_like(weight), max(len(weight), 1)
        order = np.argsort(value, kind="stable")
        reach = np.cumsum(weight[order])

        def quantile(
            q: float, reach: Ints = reach, order: Ints = order, value: Ints = value, whole: int = whole
        ) -> int:
            return int(value[order[min(int(np.searchsorted(reach, q * whole)), len(order) - 1)]]) if len(order) else 0

        one = full_of.get((int(key[0]), int(key[1])), full_of.get((int(key[0]), -1)))
        full = waited_ns(trace, one) if one is not None else 0
        parts.append(
            {
                "rank": trace.rank,
                "device": int(key[0]),
                "stream": int(key[1]),
                "mean": float((weight * value).sum() / whole),
                "median": quantile(0.5),
                "p95": quantile(0.95),
                "max": int(length.max()),
                "empty_share": float(weight[value == 0].sum() / whole),
                "full_share": full / whole,
                "depth": None if one is None else one.depth,
                "full_ns": full,
            }
        )
    schema = {
        "rank": pl.Int64(),
        "device": pl.Int64(),
        "stream": pl.Int64(),
        "mean": pl.Float64(),
        "median": pl.Int64(),
        "p95": pl.Int64(),
        "max": pl.Int64(),
        "empty_share": pl.Float64(),
        "full_share": pl.Float64(),
        "depth": pl.Int64(),
        "full_ns": pl.Int64(),
    }
    return pl.DataFrame(parts, schema=schema)


def copy_bandwidth(trace: Trace) -> pl.DataFrame:
    """Bandwidth of copies and memory sets over time, summed over what runs together: a step function for each name.

    Columns: rank, device, name, ts_ns, gb_per_s (10**9 bytes a second). Copies whose bandwidth the profiler did not
    tell use bytes / duration; without bytes they are left out. Kernels' own memory traffic is not in a trace.
    """
    facts = trace.side["copies"]
    rows = facts["row"].to_numpy()
    told = facts["gb_per_s"].cast(pl.Float64()).to_numpy().astype(float)
    size = facts["bytes"].to_numpy()
    length = np.maximum(trace.dur[rows], 1)
    rate = np.where(np.isfinite(told), told, np.where(size >= 0, size / length, np.nan))
    good = np.isfinite(rate)
    rows, rate, length = rows[good], rate[good], length[good]
    code = trace.column("name")[rows].astype(np.int64)
    device = trace.column("device")[rows].astype(np.int64)
    time = np.concatenate([trace.ts[rows], trace.ts[rows] + length])
    change = np.concatenate([rate, -rate])
    code, device = np.concatenate([code, code]), np.concatenate([device, device])
    order = np.lexsort((change, time, code, device))
    frame = pl.DataFrame(
        {
            "rank": np.full(len(order), trace.rank),
            "device": device[order],
            "name": text_column(trace, code[order]),
            "ts_ns": time[order],
            "gb_per_s": change[order],
        }
    )
    return frame.with_columns(gb_per_s=pl.col("gb_per_s").cum_sum().over("device", "name").clip(0.0))


def bandwidth_summary(trace: Trace) -> pl.DataFrame:
    """Copies by name: count, time and bandwidth weighted by time.

    Columns: rank, device, name, count, bytes (null where not told), busy_ns, mean_gb_per_s (bytes over busy time; the
    time-weighted mean of the rates where bytes are not told), max_gb_per_s.
    """
    facts = trace.side["copies"]
    rows = facts["row"].to_numpy()
    frame = facts.with_columns(
        device=pl.Series(trace.column("device")[rows].astype(np.int64)),
        name=text_column(trace, trace.column("name")[rows]),
        dur=pl.Series(trace.dur[rows]),
        bytes=pl.when(pl.col("bytes") >= 0).then(pl.col("bytes")),
    )
    grouped = frame.group_by("device", "name").agg(
        count=pl.len(),
        bytes=pl.when(pl.col("bytes").null_count() == 0).then(pl.col("bytes").sum()),
        busy_ns=pl.col("dur").sum(),
        weighted=(pl.col("gb_per_s") * pl.col("dur")).sum() / pl.col("dur").sum(),
        max_gb_per_s=pl.col("gb_per_s").max(),
    )
    return grouped.select(
        rank=pl.lit(trace.rank, dtype=pl.Int64()),
        device="device",
        name="name",
        count="count",
        bytes="bytes",
        busy_ns="busy_ns",
        mean_gb_per_s=pl.when(pl.col("bytes").is_not_null() & (pl.col("busy_ns") > 0))
        .then(pl.col("bytes") / pl.col("busy_ns"))
        .otherwise(pl.col("weighted")),
        max_gb_per_s="max_gb_per_s",
    ).sort("device", "busy_ns", descending=[False, True])
