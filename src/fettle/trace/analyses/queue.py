"""How much work was queued on each stream over time, and how long the host was held by a full queue."""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.trace.analyses.launches import launched_work
from fettle.trace.analyses.slots import queues, waited_ns
from fettle.trace.frames import frame_of, names_of_rows, with_rank
from fettle.trace.model import Trace


def queue_length(trace: Trace) -> pl.DataFrame:
    """The number of launched but not yet started pieces of work on each stream: a step function.

    A launch adds the work it launches (a graph: all its kernels) at the call's start; work leaves when it starts.
    Columns: rank, device, stream, ts_ns, length. Rows in order of device, stream and time.
    """
    rows, calls = launched_work(trace)
    places = {"device": trace.column("device")[rows].astype(np.int64), "stream": trace.column("stream")[rows]}
    begins = np.maximum(trace.ts[rows], trace.ts[calls])
    launched, begun = (pl.DataFrame(places | {"ts_ns": time}) for time in (trace.ts[calls], begins))
    one = pl.lit(1, dtype=pl.Int64())
    points = pl.concat([launched.with_columns(length=one), begun.with_columns(length=-one)])
    points = points.sort("device", "stream", "ts_ns", "length", descending=[False, False, False, True])
    # Every stream's changes add up to zero, so the next one starts at zero.
    return with_rank(trace, points.with_columns(pl.col("length").cum_sum()))


def queue_summary(trace: Trace) -> pl.DataFrame:
    """Queue length of each stream, weighted by time.

    Columns: rank, device, stream, mean, median, p95, max (pieces of work), empty_share and full_share of the time from
    the stream's first launch to its last start, depth (where the trace shows how long the queue can be), full_ns (time
    that launch calls waited for a slot). A queue that all streams of a device share is given on each of them.
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
        value, weight = value[order], weight[order]
        reach = np.minimum(np.searchsorted(np.cumsum(weight), [0.5 * whole, 0.95 * whole]), len(value) - 1)
        middle, high = value[reach].tolist() if len(value) else (0, 0)
        one = full_of.get((int(key[0]), int(key[1])), full_of.get((int(key[0]), -1)))
        full = waited_ns(trace, one) if one is not None else 0
        mean, empty = float((weight * value).sum() / whole), float(weight[value == 0].sum() / whole)
        depth = None if one is None else one.depth
        parts.append((trace.rank, int(key[0]), int(key[1]), mean, middle, high, int(length.max()), empty,
                      full / whole, depth, full))  # fmt: skip
    places, lengths = ("rank", "device", "stream"), {"mean": float, "median": int, "p95": int, "max": int}
    shares = {"empty_share": float, "full_share": float}
    return frame_of(parts, **dict.fromkeys(places, int), **lengths, **shares, depth=int, full_ns=int)


def _copies(trace: Trace) -> pl.DataFrame:
    """Copies and memory sets: device, name, ts_ns, dur_ns, bytes (null: unknown), gb_per_s (10**9 bytes a second, as
    the profiler says, else bytes / duration; null where neither is known)."""
    facts = trace.side["copies"]
    rows = facts["row"].to_numpy()
    events = pl.DataFrame(
        {
            "device": trace.column("device")[rows].astype(np.int64),
            "name": names_of_rows(trace, rows),
            "ts_ns": trace.ts[rows],
            "dur_ns": trace.dur[rows],
        }
    )
    size = pl.when(pl.col("bytes") >= 0).then(pl.col("bytes"))
    rate = pl.coalesce("gb_per_s", size / pl.col("dur_ns").clip(1))
    return pl.concat([events, facts.drop("row")], how="horizontal").with_columns(bytes=size, gb_per_s=rate)


def copy_bandwidth(trace: Trace) -> pl.DataFrame:
    """Bandwidth of copies and memory sets over time, summed over what runs together: a step function for each name.

    Columns: rank, device, name, ts_ns, gb_per_s (10**9 bytes a second). Copies whose bandwidth the profiler did not
    say it use bytes / duration; without bytes they are left out. Kernels' own memory traffic is not in a trace.
    """
    copies = _copies(trace).drop_nulls("gb_per_s")
    end = pl.col("ts_ns") + pl.col("dur_ns").clip(1)
    edges = pl.concat([copies, copies.with_columns(ts_ns=end, gb_per_s=-pl.col("gb_per_s"))])
    edges = edges.sort("device", "name", "ts_ns", "gb_per_s")
    level = pl.col("gb_per_s").cum_sum().over("device", "name").clip(0.0)
    return with_rank(trace, edges.select("device", "name", "ts_ns", level))


def bandwidth_summary(trace: Trace) -> pl.DataFrame:
    """Copies by name: count, time and bandwidth weighted by time.

    Columns: rank, device, name, count, bytes (null where unknown), busy_ns, mean_gb_per_s (bytes over busy time; the
    time-weighted mean of the rates where bytes are unknown), max_gb_per_s.
    """
    rate, length = pl.col("gb_per_s"), pl.col("dur_ns")
    grouped = (
        _copies(trace)
        .group_by("device", "name")
        .agg(
            count=pl.len(),
            bytes=pl.when(pl.col("bytes").null_count() == 0).then(pl.col("bytes").sum()),
            busy_ns=length.sum(),
            weighted=(rate * length).sum() / length.filter(rate.is_not_null()).sum(),
            max_gb_per_s=rate.max(),
        )
    )
    known = pl.col("bytes").is_not_null() & (pl.col("busy_ns") > 0)
    mean = pl.when(known).then(pl.col("bytes") / pl.col("busy_ns")).otherwise(pl.col("weighted"))
    columns = ("device", "name", "count", "bytes", "busy_ns", mean.alias("mean_gb_per_s"), "max_gb_per_s")
    return with_rank(trace, grouped.select(columns).sort("device", "busy_ns", descending=[False, True]))
