"""Collectives over the ranks: clocks aligned by them, who arrived late, and which rank the others waited for."""

from __future__ import annotations

import numpy as np
import polars as pl

from fettle.trace.analyses.account import device_classes
from fettle.trace.analyses.communication import bus_factor, collectives
from fettle.trace.analyses.idle import idle_pieces
from fettle.trace.frames import frame_of, with_rank
from fettle.trace.intervals import length_within, split
from fettle.trace.io.fields import integer
from fettle.trace.kinds import Kind, short_kernel_name, without_address
from fettle.trace.model import Ints, Trace
from fettle.trace.ordering import in_groups

_NEAR_NS = 1_000_000
"""How far apart the ends of one collective may be on two ranks where nothing but their ends says that it is one."""


def clock_offsets(matched: pl.DataFrame) -> pl.DataFrame:
    """How far each rank's clock is from the first rank's, judged by the ends of collectives they share.

    A collective ends on all its ranks at nearly one time. A rank that shares none with the first is held against ranks
    that do; where there are none, its group has a clock of its own, that of its first rank. Columns: rank, offset_ns
    (to subtract from that rank's clock), uncertainty_ns (1.4826 x median absolute deviation), pairs (collectives used).
    """
    clocks = frame_of([], rank=int, offset_ns=int, uncertainty_ns=int, pairs=int)
    left = matched.select("rank", "key", end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    base = frame_of([], key=str, base_ns=int)
    middle = pl.col("shift").median()
    spread = (pl.col("shift") - middle).abs().median() * 1.4826
    while left.height:
        shared = left.join(base, on="key").select("rank", shift=pl.col("end_ns") - pl.col("base_ns"))
        if not shared.height:  # the first rank, or that of a group which shares nothing with those before
            shared = left.filter(pl.col("rank") == pl.col("rank").min()).select("rank", shift=pl.lit(0, pl.Int64()))
        found = shared.group_by("rank").agg(
            offset_ns=middle.round().cast(pl.Int64()), uncertainty_ns=spread.round().cast(pl.Int64()), pairs=pl.len()
        )
        clocks = pl.concat([clocks, found], how="vertical_relaxed")
        aligned = left.join(found, on="rank").select("key", base_ns=pl.col("end_ns") - pl.col("offset_ns"))
        base = pl.concat([base, aligned]).unique("key", keep="first", maintain_order=True)
        left = left.join(found, on="rank", how="anti")
    return clocks.sort("rank")


def match_collectives(traces: list[Trace]) -> pl.DataFrame:
    """The same collective on every rank, matched by process group and kind, in order, with sizes as a check.

    Columns of `collectives`, with start_ns on a clock shared by the files where they give their base time, and key
    (one a collective). Ranks that saw fewer of a group's collectives are matched from the end, which is where traces
    agree; send-receive kernels, whose partner is not named, and exchanges of all with all whose sizes differ by rank
    count only where every rank has the same number of them. Only keys seen on two ranks or more are kept.
    """
    frames, base = [], _base_ns(traces[0])
    for trace in traces:
        frame = collectives(trace).filter(pl.col("collective") != "unknown")
        short = pl.Series([short_kernel_name(n) for n in frame["name"]], dtype=pl.String())
        size, uneven = pl.coalesce(pl.col("bytes").cast(pl.String()), short), pl.col("collective") == "alltoall"
        frame = frame.with_columns(
            start_ns=pl.col("start_ns") + (_base_ns(trace) - base),
            family=pl.format("{}|{}|{}", "group", "collective", pl.when(uneven).then(pl.lit("")).otherwise(size)),
        )
        order = pl.len().over("family") - 1 - pl.int_range(pl.len()).over("family")
        frames.append(frame.with_columns(key=pl.col("family") + "|" + order.cast(pl.String())).drop("family"))
    both = pl.concat(frames)
    if not both.height:
        return both
    if (both["group"] == "").all():
        both = _match_by_ends(both)
    else:
        counts = both.filter(pl.col("collective") == "sendrecv").group_by("rank").len()
        if counts.height and (counts.height != len(traces) or counts["len"].n_unique() != 1):
            both = both.filter(pl.col("collective") != "sendrecv")
        kind = ("group", "collective")
        both = both.with_columns(calls=pl.len().over("rank", *kind))
        certain = pl.col("calls").min().over(kind) == pl.col("calls").max().over(kind)
        differs = pl.col("bytes").n_unique().over("key") > 1
        both = both.filter((pl.col("collective") != "alltoall") | certain | ~differs.any().over(kind)).drop("calls")
    return both.filter(pl.col("rank").n_unique().over("key") > 1)


def _match_by_ends(frame: pl.DataFrame) -> pl.DataFrame:
    """Old traces name no groups, and a rank may belong to several: order says nothing there.

    Collectives of one kernel on one stream are the same where their ends are each other's nearest, within a
    millisecond. That takes clocks for nearly aligned; what it cannot match has a key of its own and drops out.
    """
    ends = frame.select("rank", "stream", "name", end=pl.col("start_ns") + pl.col("duration_ns")).with_row_index("at")
    reference = int(frame["rank"].min())  # type: ignore[arg-type]
    keys = [f"alone {i}" for i in range(frame.height)]
    for alike in ends.sort("end").partition_by("stream", "name"):
        at, rank, end = (alike[column].to_numpy() for column in ("at", "rank", "end"))
        of_rank = dict(in_groups(rank))
        base = of_rank.pop(reference, rank[:0])
        for mine in of_rank.values() if len(base) else ():
            to, back = _nearest(end[base], end[mine]), _nearest(end[mine], end[base])
            same = (back[to] == np.arange(len(mine))) & (np.abs(end[base[to]] - end[mine]) <= _NEAR_NS)
            for i, there in zip(at[mine[same]].tolist(), at[base[to[same]]].tolist(), strict=True):
                keys[i] = keys[there] = f"end {there}"
    return frame.with_columns(key=pl.Series(keys, dtype=pl.String()))


def _nearest(times: Ints, of: Ints) -> Ints:
    """Which of some times, in order, is the nearest to each of others."""
    after = np.minimum(np.searchsorted(times, of), len(times) - 1)
    before = np.maximum(after - 1, 0)
    return np.where(np.abs(of - times[before]) <= np.abs(times[after] - of), before, after)


def clock_shifts(traces: list[Trace], clocks: pl.DataFrame | None = None) -> dict[int, int]:
    """By rank, what its clock shows, ns, where the first rank's shows 0, as the traces say and the ends of shared
    collectives (`clocks`: their `clock_offsets`, where these are known already)."""
    clocks = clock_offsets(match_collectives(traces)) if clocks is None else clocks
    offsets = dict(zip(clocks["rank"], clocks["offset_ns"], strict=True))
    base = _base_ns(traces[0])
    return {t.rank: int(offsets.get(t.rank, 0)) - (_base_ns(t) - base) for t in traces}


def _base_ns(trace: Trace) -> int:
    """The moment that the file's times count from; 0 where it does not say."""
    return max(0, integer(trace.metadata.get("baseTimeNanoseconds")))


def arrival(traces: list[Trace], matched: pl.DataFrame | None = None) -> pl.DataFrame:
    """Arrival skew of every matched collective, on aligned clocks; `matched`: their `match_collectives`, where known.

    Columns: key, collective, group, bytes, ranks, first_ns (earliest start), skew_ns (latest start minus earliest),
    last_rank (who arrived last), waited_ns (summed over ranks: time from own start to the last start), transfer_ns
    (from the last start to the median end), bus_gb_per_s (over transfer_ns: without waiting).
    """
    matched = match_collectives(traces) if matched is None else matched
    clocks = clock_offsets(matched)
    uncertainty = int(clocks["uncertainty_ns"].max() or 0)  # type: ignore[arg-type]
    offsets = clocks.select("rank", "offset_ns")
    aligned = matched.join(offsets, on="rank").with_columns(start_ns=pl.col("start_ns") - pl.col("offset_ns"))
    start = pl.col("start_ns")
    frame = aligned.group_by("key").agg(
        collective=pl.col("collective").first(),
        group=pl.col("group").first(),
        group_size=pl.col("group_size").first(),
        bytes=pl.when(pl.col("bytes").n_unique() == 1).then(pl.col("bytes").first()),
        ranks=pl.len(),
        first_ns=start.min(),
        skew_ns=start.max() - start.min(),
        last_rank=pl.col("rank").sort_by("start_ns").last(),
        waited_ns=(start.max() - start).sum(),
        transfer_ns=(start + pl.col("duration_ns") - start.max()).median(),
    )
    factor = pl.Series(
        [bus_factor(k, n) for k, n in zip(frame["collective"], frame["group_size"], strict=True)], dtype=pl.Float64()
    )
    rate = pl.when(pl.col("transfer_ns") > 0).then(pl.col("bytes") / pl.col("transfer_ns")) * factor
    frame = frame.with_columns(clear=pl.col("skew_ns") > 2 * uncertainty)
    return frame.with_columns(bus_gb_per_s=rate).drop("group_size").sort("first_ns")


def stragglers(traces: list[Trace], matched: pl.DataFrame | None = None) -> pl.DataFrame:
    """Which ranks the others wait for, and what held those ranks up before the collectives they came last to.

    Ranks leave a shared collective together and run apart until the next one. In the stretches that end with a clearly
    last arrival, the time that the late rank spent computing, and idle by cause, is compared with the mean of the other
    ranks in the same stretches; the first collective has no such stretch unless it is the only one.

    Columns: rank, last_times (collectives it arrived last at), caused_ns (waiting of other ranks for it), share (of
    all waiting), compute_excess_ns and idle_excess_ns (in those stretches, over the others), reason (the largest
    excess, by name). Empty for fewer than two ranks, or without collectives that match. `matched` as in `arrival`.
    """
    matched = match_collectives(traces) if matched is None else matched
    skews = arrival(traces, matched)
    if len(traces) < 2:
        skews = skews.clear()
    before = [_upstream(t, matched.filter(pl.col("rank") == t.rank)) for t in traces if skews.height]
    whole = int(skews["waited_ns"].sum()) or 1
    caused = skews.group_by("last_rank").agg(last_times=pl.len(), caused_ns=pl.col("waited_ns").sum())
    parts = []
    for rank, times, waiting in caused.sort("caused_ns", descending=True).iter_rows():
        keys = skews.filter((pl.col("last_rank") == rank) & pl.col("clear")).select("key", "ranks")
        some = pl.concat(before).join(keys, on="key")
        # The others' mean, rank by rank: a rank that spent nothing on something has no row for it.
        own = pl.col("rank") == rank
        weight = pl.when(own).then(pl.col("ns")).otherwise(-pl.col("ns") / (pl.col("ranks") - 1))
        excess = some.group_by("part", "name").agg(ns=weight.sum()).sort("ns", "name", descending=[True, False])
        compute = int(excess.filter(pl.col("part") == "compute")["ns"].sum())
        idle = int(excess.filter(~pl.col("part").is_in(["compute", "kernel"]))["ns"].sum())
        reason = _reason(excess, keys.height)
        parts.append((rank, times, waiting, waiting / whole, compute, idle, reason))
    parts_ns = {"caused_ns": int, "share": float, "compute_excess_ns": int, "idle_excess_ns": int}
    return frame_of(parts, rank=int, last_times=int, **parts_ns, reason=str)


def _reason(excess: pl.DataFrame, times: int) -> str:
    """The largest excess in words."""
    if not times:
        return "no arrival was later than the clocks are uncertain"
    by_part = excess.filter(pl.col("part") != "kernel").group_by("part").agg(pl.col("ns").sum())
    largest = by_part.sort("ns", "part", descending=[True, False])
    if not largest.height or largest["ns"][0] <= 0:
        return "unknown: before these collectives it neither computes nor idles longer than the others"
    part, ns = str(largest["part"][0]), float(largest["ns"][0])
    details = excess.filter((pl.col("part") == ("kernel" if part == "compute" else part)) & (pl.col("name") != ""))
    which = f", mostly {details['name'][0][:120]}" if details.height and details["ns"][0] > 0 else ""
    what = "it computes longer" if part == "compute" else f"it idles longer in {part}"
    return f"{what} ({ns / 1e6:.3f} ms){which}"


def _upstream(trace: Trace, shared: pl.DataFrame) -> pl.DataFrame:
    """What a rank did from the end of each shared collective to the start of the next.

    Columns: rank, key (of the next one), part (compute, kernel: the same by name and summed over streams, or an idle
    cause), name, ns.
    """
    rows = shared["row"].to_numpy()
    order = np.argsort(trace.ts[rows], kind="stable")
    rows, keys = rows[order], shared["key"].gather(pl.Series(order)).to_list()
    left = np.maximum.accumulate(np.concatenate([[trace.span[0]], trace.end[rows]]))[:-1]
    first = 1 if len(rows) > 1 else 0
    low = left[first:]
    high, keys = np.maximum(trace.ts[rows][first:], low), keys[first:]
    parts: list[tuple[str, str, str, int]] = []
    names = trace.column("name")
    for device in trace.device_keys:
        compute = length_within(device_classes(trace, device)[0], low, high)
        parts += [(key, "compute", "", ns) for key, ns in zip(keys, compute.tolist(), strict=True)]
        on = (trace.column("device") == device) & (trace.kind == Kind.KERNEL) & ~trace.is_collective
        work = np.flatnonzero(on)
        at = np.searchsorted(low, trace.ts[work], side="right") - 1
        work, at = work[at >= 0], at[at >= 0]
        inside = np.minimum(trace.end[work], high[at]) - trace.ts[work]
        for row, window, ns in zip(names[work].tolist(), at.tolist(), inside.tolist(), strict=True):
            if ns > 0:
                parts.append((keys[window], "kernel", short_kernel_name(trace.names[row]), ns))
        pieces = idle_pieces(trace, device)
        start, end, piece, window_of = split((pieces["start_ns"].to_numpy(), pieces["end_ns"].to_numpy()), (low, high))
        cause, detail = pieces["cause"].cast(pl.String()).gather(pl.Series(piece)), pieces["detail"].to_numpy()[piece]
        for one, what, window, ns in zip(
            cause, detail.tolist(), window_of.tolist(), (end - start).tolist(), strict=True
        ):
            parts.append((keys[window], one, without_address(trace.names[what]) if what >= 0 else "", ns))
    frame = frame_of(parts, key=str, part=str, name=str, ns=int)
    return with_rank(trace, frame.group_by("key", "part", "name").agg(pl.col("ns").sum()))
