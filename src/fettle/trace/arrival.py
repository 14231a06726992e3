"""Collectives over the ranks: clocks aligned by them, who arrived late, and which rank the others waited for."""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.trace.account import device_classes
from fettle.trace.communication import bus_factor, collectives
from fettle.trace.idle import idle_summary
from fettle.trace.intervals import total
from fettle.trace.kinds import short_kernel_name
from fettle.trace.model import Trace


def clock_offsets(matched: pl.DataFrame) -> pl.DataFrame:
    """How far each rank's clock is from the first rank's, judged by the ends of collectives they share.

    A collective ends on all its ranks at nearly one time. Columns: rank, offset_ns (to subtract from that rank's
    clock), uncertainty_ns (1.4826 x median absolute deviation), pairs (collectives used).
    """
    if not matched.height:
        return pl.DataFrame(
            schema={"rank": pl.Int64(), "offset_ns": pl.Int64(), "uncertainty_ns": pl.Int64(), "pairs": pl.Int64()}
        )
    reference = int(matched["rank"].min())  # type: ignore[arg-type]
    ends = matched.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    base = ends.filter(pl.col("rank") == reference).select("key", base_ns="end_ns")
    parts = []
    for rank in sorted(ends["rank"].unique().to_list()):
        shift = (
            ends.filter(pl.col("rank") == rank)
            .join(base, on="key")
            .select(d=pl.col("end_ns") - pl.col("base_ns"))["d"]
            .to_numpy()
        )
        middle = float(np.median(shift)) if len(shift) else 0.0
        spread = float(np.median(np.abs(shift - middle))) * 1.4826 if len(shift) else float("nan")
        parts.append((rank, round(middle), round(spread) if np.isfinite(spread) else -1, len(shift)))
    return pl.DataFrame(
        parts,
        schema={"rank": pl.Int64(), "offset_ns": pl.Int64(), "uncertainty_ns": pl.Int64(), "pairs": pl.Int64()},
        orient="row",
    )


def match_collectives(traces: list[Trace]) -> pl.DataFrame:
    """The same collective on every rank, matched by process group and kind, in order, with sizes as a check.

    Columns of `collectives`, with start_ns on a clock shared by the files where they tell their base time, and key
    (one a collective). Ranks that saw fewer of a group's collectives are matched from the end, which is where traces
    agree; send-receive kernels, whose partner is not named, count only where every rank has the same number of them.
    Only keys seen on two ranks or more are kept.
    """
    bases = [int(t.metadata.get("baseTimeNanoseconds", 0) or 0) for t in traces]
    frames = []
    for trace, base in zip(traces, bases, strict=True):
        frame = collectives(trace).filter(pl.col("collective") != "unknown")
        short = pl.Series([short_kernel_name(n) for n in frame["name"]], dtype=pl.String())
        frame = frame.with_columns(
            start_ns=pl.col("start_ns") + (base - bases[0]),
            family=pl.concat_str(
                pl.col("group"),
                pl.lit("|"),
                pl.col("collective"),
                pl.lit("|"),
                pl.when(pl.col("bytes").is_null()).then(short).otherwise(pl.col("bytes").cast(pl.String())),
            ),
        )
        order = pl.len().over("family") - 1 - pl.int_range(pl.len()).over("family")
        frames.append(frame.with_columns(key=pl.col("family") + "|" + order.cast(pl.String())).drop("family"))
    if not frames:
        return pl.DataFrame()
    both = pl.concat(frames)
    if not both.height:
        return both.with_columns(key=pl.lit("", dtype=pl.String()))
    if (both["group"] == "").all():
        both = _match_by_ends(both)
    else:
        counts = both.filter(pl.col("collective") == "sendrecv").group_by("rank").len()
        if counts.height and (counts.height != len(traces) or counts["len"].n_unique() != 1):
            both = both.filter(pl.col("collective") != "sendrecv")
    return both.filter(pl.col("rank").n_unique().over("key") > 1)


def _match_by_ends(frame: pl.DataFrame) -> pl.DataFrame:
    """Old traces name no groups, and a rank may belong to several: order says nothing there.

    Collectives of one kernel on one stream are the same where their ends are each other's nearest, within a
    millisecond. That takes clocks for nearly aligned; what it cannot match has a key of its own and drops out.
    """
    reference = int(frame["rank"].min())  # type: ignore[arg-type]
    ends = (frame["start_ns"] + frame["duration_ns"]).to_numpy()
    rank, stream, names = frame["rank"].to_numpy(), frame["stream"].to_numpy(), frame["name"].to_numpy()
    keys = [f"alone {i}" for i in range(frame.height)]
    base = np.flatnonzero(rank == reference)
    for one in np.unique(rank[rank != reference]):
        for i in np.flatnonzero(rank == one).tolist():
            same = base[(stream[base] == stream[i]) & (names[base] == names[i])]
            if not len(same):
                continue
            best = int(same[np.abs(ends[same] - ends[i]).argmin()])
            back = np.flatnonzero((rank == one) & (stream == stream[i]) & (names == names[i]))
            if abs(int(ends[best] - ends[i])) <= 1_000_000 and back[np.abs(ends[back] - ends[best]).argmin()] == i:
                keys[i] = keys[best] = f"end {best}"
    return frame.with_columns(key=pl.Series(keys, dtype=pl.String()))


def arrival(traces: list[Trace]) -> pl.DataFrame:
    """Arrival skew of every matched collective, on aligned clocks.

    Columns: key, collective, group, bytes, ranks, first_ns (earliest start), skew_ns (latest start minus earliest),
    last_rank (who arrived last), waited_ns (summed over ranks: time from own start to the last start), transfer_ns
    (from the last start to the median end), bus_gb_per_s (over transfer_ns: without waiting).
    """
    matched = match_collectives(traces)
    if not matched.height:
        return pl.DataFrame(
            schema={
                "key": pl.String(),
                "collective": pl.String(),
                "group": pl.String(),
                "bytes": pl.Int64(),
                "ranks": pl.UInt32(),
                "first_ns": pl.Int64(),
                "skew_ns": pl.Int64(),
                "last_rank": pl.Int64(),
                "waited_ns": pl.Int64(),
                "transfer_ns": pl.Float64(),
                "clear": pl.Boolean(),
                "bus_gb_per_s": pl.Float64(),
            }
        )
    clocks = clock_offsets(matched)
    uncertainty = int(clocks["uncertainty_ns"].max())  # type: ignore[arg-type]
    offsets = clocks.select("rank", "offset_ns")
    aligned = matched.join(offsets, on="rank").with_columns(start_ns=pl.col("start_ns") - pl.col("offset_ns"))
    start = pl.col("start_ns")
    frame = aligned.group_by("key").agg(
        collective=pl.col("collective").first(),
        group=pl.col("group").first(),
        group_size=pl.col("group_size").first(),
        bytes=pl.col("bytes").first(),
        ranks=pl.len(),
        first_ns=start.min(),
        skew_ns=start.max() - start.min(),
        last_rank=pl.col("rank").sort_by("start_ns").last(),
        waited_ns=(start.max() - start).sum(),
        transfer_ns=(start + pl.col("duration_ns")).median() - start.max(),
    )
    factor = pl.Series(
        [bus_factor(k, n) for k, n in zip(frame["collective"], frame["group_size"], strict=True)], dtype=pl.Float64()
    )
    rate = pl.when(pl.col("transfer_ns") > 0).then(pl.col("bytes") / pl.col("transfer_ns")) * factor
    frame = frame.with_columns(clear=pl.col("skew_ns") > 2 * uncertainty)
    return frame.with_columns(bus_gb_per_s=rate).drop("group_size").sort("first_ns")


def stragglers(traces: list[Trace]) -> pl.DataFrame:
    """Which ranks the others wait for, and what those ranks did differently before the collectives.

    Columns: rank, last_times (collectives it arrived last at), caused_ns (waiting of other ranks for it), share (of
    all waiting), busy_ns (its compute) and busy_excess_ns (over the median rank), idle_excess_ns, reason (the larger
    excess, with the longest idle cause). Empty for fewer than two ranks, or without collectives that match.
    """
    schema = {
        "rank": pl.Int64(),
        "last_times": pl.UInt32(),
        "caused_ns": pl.Int64(),
        "share": pl.Float64(),
        "busy_ns": pl.Int64(),
        "busy_excess_ns": pl.Int64(),
        "idle_excess_ns": pl.Int64(),
        "reason": pl.String(),
    }
    skews = arrival(traces)
    if len(traces) < 2 or not skews.height:
        return pl.DataFrame(schema=schema)
    caused = skews.group_by("last_rank").agg(last_times=pl.len(), caused_ns=pl.col("waited_ns").sum())
    by_rank = {int(r["last_rank"]): r for r in caused.to_dicts()}
    whole = int(skews["waited_ns"].sum()) or 1
    busy = {t.rank: sum(total(device_classes(t, d)[0]) for d in t.device_keys) for t in traces}
    idle, longest = {}, {}
    for trace in traces:
        frames = [idle_summary(trace, d) for d in trace.device_keys]
        idle[trace.rank] = sum(int(f["idle_ns"].sum()) for f in frames)
        tops = [(f["idle_ns"][0], f["cause"][0], f["what"][0]) for f in frames if f.height]
        longest[trace.rank] = max(tops, default=(0, "", ""))
    median_busy, median_idle = float(np.median(list(busy.values()))), float(np.median(list(idle.values())))
    parts = []
    for rank in sorted(by_rank):
        more_busy, more_idle = busy[rank] - median_busy, idle[rank] - median_idle
        cause = longest[rank]
        if max(more_busy, more_idle) <= 0:
            reason = "unknown: it neither computes nor idles more than the median rank"
        elif more_busy >= more_idle:
            reason = "it computes longer"
        else:
            reason = f"it idles longer, mostly {cause[1]}: {cause[2].split(' (')[0]}"
        row = by_rank[rank]
        parts.append(
            (
                rank,
                row["last_times"],
                row["caused_ns"],
                row["caused_ns"] / whole,
                busy[rank],
                round(more_busy),
                round(more_idle),
                reason,
            )
        )
    return pl.DataFrame(parts, schema=schema, orient="row").sort("caused_ns", descending=True)
