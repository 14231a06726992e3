"""Why was the device idle? Each gap is cut into the pieces that different causes held, never given one label.

A gap is time in which no stream of a device works. The work that ends it was launched by a host call:

    work ends        host does other things        launch call        launch latency        work starts
    |----------------------------------------------|------------------|---------------------|

What the host did before the call is read from the launching thread, piece by piece: the innermost operator, Python
function or call. Where that thread shows nothing, the main thread is asked, then autograd's. Where the work had been
launched before the gap began, the host is not the cause.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fettle.trace.analyses.slots import slot_waits
from fettle.trace.analyses.stacks import CAUSES_OF_HOST, host_stacks
from fettle.trace.analyses.steps import step_windows
from fettle.trace.analyses.stops import autograd_threads, main_thread
from fettle.trace.analyses.waits import CAUSES, NUMBER, Held, blocking_calls, device_waits
from fettle.trace.frames import frame_of, with_rank
from fettle.trace.intervals import Intervals, gaps, in_turn, merge, split
from fettle.trace.kinds import Kind, is_graph_launch, without_address
from fettle.trace.model import Bools, Ints, Trace, per_trace
from fettle.trace.ordering import in_groups

EXPLAINED = 0.10
SAMPLED = 0.02
"""A whole trace has at least this share of the calls that its correlation numbers count: 0.03 to 1 were seen."""
Causes = npt.NDArray[np.uint8]  # numbers in the order of `CAUSES`
Numbers = npt.NDArray[np.integer[Any]]
_PIECE_TYPES = (np.int64, np.int64, np.uint8, np.int32, np.int32)  # start, end, cause, detail, gap
_OF_HOST = np.array([NUMBER.get(cause, 0) for cause in CAUSES_OF_HOST], dtype=np.uint8)
_NAMES = pl.Series(list(CAUSES), dtype=pl.Enum(list(CAUSES)))


@per_trace
def idle_pieces(trace: Trace, device: int) -> pl.DataFrame:
    """All idle time of one device within the trace, cut by cause; pieces are disjoint, in order, and add up to the
    idle time.

    Columns: start_ns, end_ns, cause (a key of `CAUSES`), detail (event name number; -1: none), gap (number of the gap),
    next_row (the work that ended the gap; -1: none came).
    """
    place = np.flatnonzero(trace.column("device")[trace.device_rows] == device)
    rows = trace.device_rows[place]
    busy = merge(trace.ts[rows], trace.end[rows])
    low, high = trace.span
    starts, ends = gaps(busy, low, high)
    pieces = _Pieces()
    after = _next_work(trace, rows, ends)
    next_row = np.where(after >= 0, rows[np.maximum(after, 0)], -1)
    number, waits = np.arange(len(starts)), device_waits(trace)
    ended = np.flatnonzero(after >= 0)
    position = place[after[ended]]

    # What passed once nothing known held the work any more.
    since = np.clip(waits.since[position], starts[ended], ends[ended])
    pieces.add(since, ends[ended], waits.cause[position], -1, number[ended])
    # Until then it waited for its launch; for work of another device; or nobody knows.
    held = waits.held[position]
    for one, cause in ((Held.EVENT, "stream_event"), (Held.STREAM, "between_kernels"), (Held.NOTHING, "unlinked")):
        some = held == one
        pieces.add(starts[ended][some], since[some], cause, -1, number[ended][some])
    launched = held == Held.LAUNCH
    mine, launch = ended[launched], waits.launch[position[launched]]
    l0 = np.clip(waits.called[position[launched]], starts[mine], since[launched])
    cause = _OF_HOST[host_stacks(trace).cause[launch]]
    pieces.add(l0, since[launched], cause, trace.column("name")[launch].astype(np.int32), mine)
    # What the host did until it launched; behind the last work, what the main thread did.
    main, tail = main_thread(trace), np.flatnonzero(next_row < 0)
    _host_time(
        trace,
        pieces,
        np.concatenate([starts[mine], starts[tail]]),
        np.concatenate([l0, ends[tail]]),
        np.concatenate([trace.column("thread")[launch], np.full(len(tail), main)]),
        np.concatenate([mine, number[tail]]),
    )
    names = trace.column("name").astype(np.int32)
    pieces = _cut(pieces, "launch_call", *_full_queue_waits(trace), "full_queue")
    start, end, calls = blocking_calls(trace)
    return _cut(pieces, "queued_unknown", (start, end), names[calls], "blocking_call").frame(next_row)


def _full_queue_waits(trace: Trace) -> tuple[Intervals, npt.NDArray[np.int32]]:
    """When launch calls waited for a slot in a full queue, and the names of the work whose begin freed it."""
    calls, freed = slot_waits(trace)
    work = trace.device_rows[freed]
    start, end, which = in_turn(trace.ts[calls], trace.ts[work])  # several threads may wait at once
    return (start, end), trace.column("name")[work[which]].astype(np.int32)


def _cut(pieces: _Pieces, cause: str, windows: Intervals, names: npt.NDArray[np.int32], inside: str) -> _Pieces:
    """The pieces, with what of one cause lies in disjoint windows given to another, under the windows' names."""
    if not len(windows[0]):
        return pieces
    cut = _Pieces()
    for begin, stop, causes, detail, gap in pieces.parts:
        mine = causes == NUMBER[cause]
        rest = ~mine
        cut.add(begin[rest], stop[rest], causes[rest], detail[rest], gap[rest])
        if mine.any():
            order = np.flatnonzero(mine)[np.argsort(begin[mine], kind="stable")]
            pair, what, of = (begin[order], stop[order]), detail[order], gap[order]
            begins, stops, piece, window = split(pair, windows)
            cut.add(begins, stops, inside, names[window], of[piece])
            begins, stops, piece, _ = split(pair, gaps(merge(*windows), int(pair[0].min()), int(pair[1].max())))
            cut.add(begins, stops, cause, what[piece], of[piece])
    return cut


class _Pieces:
    """Pieces of idle time as they are found, in no order: sets of columns, as in `_PIECE_TYPES`."""

    def __init__(self) -> None:
        self.parts: list[list[npt.NDArray[Any]]] = []

    def add(self, start: Ints, end: Ints, cause: Causes | str, detail: Numbers | int, gap: Numbers) -> None:
        values = (start, end, NUMBER[cause] if isinstance(cause, str) else cause, detail, gap)
        columns = [np.asarray(value, dtype) for value, dtype in zip(values, _PIECE_TYPES, strict=True)]
        self.parts.append([np.broadcast_to(column, len(start)) for column in columns])

    def frame(self, next_row: Ints) -> pl.DataFrame:
        start, end, cause, detail, gap = (np.concatenate(column) for column in zip(*self.parts, strict=True))
        some = np.argsort(start, kind="stable")  # a few runs that are in order already: merged, not sorted
        if not (end > start).all():
            some = some[end[some] > start[some]]
        gap = gap[some]
        return pl.DataFrame(
            {
                "start_ns": start[some],
                "end_ns": end[some],
                "cause": _NAMES.gather(pl.Series(cause[some], dtype=pl.UInt32())),
                "detail": detail[some],
                "gap": gap,
                "next_row": next_row[gap],
            }
        )


def _next_work(trace: Trace, rows: Ints, ends: Ints) -> Ints:
    """Which of some work starts at each gap's end, one that lasts before one that does not; -1 behind the last."""
    order = np.lexsort((trace.dur[rows] <= 0, trace.ts[rows]))
    first = np.append(order, -1)[np.searchsorted(trace.ts[rows[order]], ends)]
    return np.where((first >= 0) & (trace.ts[rows[first]] == ends), first, -1)


def _host_time(trace: Trace, pieces: _Pieces, start: Ints, end: Ints, thread: Ints, gap: Ints) -> None:
    """What a thread did in each window; where it shows nothing, what the main thread did, then autograd's."""
    stacks, names = host_stacks(trace), trace.column("name").astype(np.int32)
    order = np.flatnonzero(end > start)
    order = order[np.argsort(start[order], kind="stable")]
    start, end, thread, gap, name = start[order], end[order], thread[order], gap[order], names[:0]
    others = dict.fromkeys([main_thread(trace), *autograd_threads(trace)])
    asks: list[Ints | int] = [thread, *(other for other in others if other >= 0)]
    for asked in asks:
        left = [(start[:0], end[:0], gap[:0], name[:0])]
        for one, mine in in_groups(np.broadcast_to(asked, len(start))):
            begins, stops, row, window = stacks.over(one, start[mine], end[mine])
            owner, cause = gap[mine][window], np.where(row >= 0, stacks.cause[row], 0)
            name = np.where(row >= 0, names[row], np.int32(-1))
            known, silent = np.flatnonzero(cause), np.flatnonzero(cause == 0)
            pieces.add(begins[known], stops[known], _OF_HOST[cause[known]], name[known], owner[known])
            left.append((begins[silent], stops[silent], owner[silent], name[silent]))
        start, end, gap, name = (np.concatenate(column) for column in zip(*left, strict=True))
        order = np.argsort(start, kind="stable")
        start, end, gap, name = start[order], end[order], gap[order], name[order]
    pieces.add(start, end, "host_untraced", name, gap)


def idle_streams(trace: Trace) -> pl.DataFrame:
    """Idle time of each stream between its first and its last work, cut where its reason changes.

    Columns: rank, device, stream, work (pieces), idle_ns, and its parts: host_ns (until the launch had arrived),
    event_ns (then until the work of another stream had ended), latency_ns (from a launch to its work), gap_ns (the
    usual gap, and inside graphs), unknown_ns.
    """
    waits, rows = device_waits(trace), trace.device_rows
    has = waits.previous >= 0
    start, free = trace.ts[rows[has]], trace.end[rows[np.maximum(waits.previous, 0)]][has]
    since = np.clip(waits.since[has], np.minimum(free, start), start)
    rest, held, cause = start - since, waits.held[has], waits.cause[has]
    gaps_of = [NUMBER[name] for name in ("between_kernels", "inside_graph", "stream_event")]
    parts = {
        "host_ns": np.where(held == Held.LAUNCH, np.maximum(since - free, 0), 0),
        "event_ns": np.where(held == Held.EVENT, np.maximum(since - free, 0), 0),
        "latency_ns": np.where(cause == NUMBER["launch_latency"], rest, 0),
        "gap_ns": np.where(np.isin(cause, gaps_of), rest, 0),
    }
    idle = np.maximum(start - free, 0)
    frame = pl.DataFrame(
        {
            "device": trace.column("device")[rows[has]].astype(np.int64),
            "stream": trace.column("stream")[rows[has]],
            "idle_ns": idle,
            **parts,
            "unknown_ns": idle - sum(parts.values()),
        }
    )
    summed = frame.group_by("device", "stream").agg((pl.len() + 1).alias("work"), pl.all().sum())
    return with_rank(trace, summed.sort("device", "stream"))


def idle_within(trace: Trace, device: int, step: int | None = None) -> pl.DataFrame:
    """The `idle_pieces` of one step, or of all steps, cut at their edges."""
    frame = idle_pieces(trace, device)
    pieces: Intervals = (frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy())
    start, end, piece, _ = split(pieces, step_windows(trace, step))
    return frame[piece].with_columns(start_ns=pl.Series(start), end_ns=pl.Series(end))


def missing_information(trace: Trace, device: int, step: int | None = None) -> str:
    """What a trace lacks where more than `EXPLAINED` of a device's idle time in the steps has no cause; else empty."""
    pieces = idle_within(trace, device, step)
    length, after = (pieces["end_ns"] - pieces["start_ns"]).to_numpy(), pieces["next_row"].to_numpy()
    number, whole = pieces["cause"].to_physical().to_numpy(), max(int(length.sum()), 1)
    correlation = trace.column("correlation")
    calls = np.unique(correlation[(trace.kind == Kind.RUNTIME) & (correlation > 0)])

    def share(some: Bools) -> float:
        return float(length[some].sum() / whole)

    parts = []
    unlinked, unknown = number == NUMBER["unlinked"], number == NUMBER["queued_unknown"]
    if share(unlinked) > EXPLAINED:
        early = unlinked & (correlation[after] < (calls[0] if len(calls) else 0)) & (correlation[after] > 0)
        parts.append(
            f"{share(unlinked):.0%} ends with work whose launch is not in the trace: {share(early):.0%} with work that "
            "was launched before recording began (its number is below every call's), the rest with lost launches"
        )
    if share(unknown) > EXPLAINED:
        first = unknown & (pieces["gap"] == 0).to_numpy() & (idle_pieces(trace, device)["start_ns"][0] == trace.span[0])
        text = f"{share(unknown):.0%} is queued work that launch and stream allowed to begin"
        if share(first) > EXPLAINED:
            text += f"; {share(first):.0%} is before the first work, behind what was launched before recording began"
        if len(calls) and len(calls) < SAMPLED * (calls[-1] - calls[0]):
            text += (
                f"; of the calls that correlation numbers count, only {len(calls) / (calls[-1] - calls[0]):.1%} are in "
                "the trace: it was sampled, or events were lost, and work that is not in it fills these gaps"
            )
        else:
            waits = device_waits(trace)
            launch = np.full(trace.events.height, -1, dtype=np.int64)
            launch[trace.device_rows] = waits.launch
            by = launch[after]
            graph = unknown & ~first & (by >= 0) & trace.named(is_graph_launch, by)
            rest = share(unknown & ~first & ~graph)
            if share(graph) > EXPLAINED:
                text += (
                    f"; {share(graph):.0%} ends with a graph's work: what a graph does besides kernels, copies and "
                    "memory sets (its start, its functions on the host, its waits) is not in it"
                )
            if not trace.side["syncs"].height and rest > EXPLAINED:
                text += "; which events streams waited for is not in it (enable_cuda_sync_events=True records them)"
        parts.append(text)
    silent = number == NUMBER["host_untraced"]
    if share(silent) > EXPLAINED and not (trace.kind == Kind.PYTHON).any():
        parts.append(f"{share(silent):.0%} is host time without an event (with_stack=True records Python functions)")
    return "; ".join(parts)


def idle_summary(trace: Trace, device: int, step: int | None = None) -> pl.DataFrame:
    """Idle time of a device in one step, or in all steps, by cause, with what held the host longest.

    Columns: rank, device, cause, idle_ns, share (of this device's idle time), gaps (pieces), what (the three longest
    details with their ns), meaning.
    """
    pieces, length = idle_within(trace, device, step), (pl.col("end_ns") - pl.col("start_ns")).sum()
    causes = pieces.group_by("cause").agg(idle_ns=length, gaps=pl.len())
    details = pieces.filter(pl.col("detail") >= 0).group_by("cause", "detail").agg(ns=length)
    whole = max(int(causes["idle_ns"].sum()), 1)
    parts = []
    for cause, idle_ns, count in causes.sort("idle_ns", "cause", descending=[True, False]).iter_rows():
        by_name = Counter[str]()
        for detail, ns in details.filter(pl.col("cause") == cause).select("detail", "ns").iter_rows():
            by_name[without_address(trace.names[detail])] += ns
        longest = sorted(by_name.items(), key=lambda item: (-item[1], item[0]))[:3]
        what = "; ".join(f"{name[:60]} ({ns / 1e6:.3f} ms)" for name, ns in longest)
        parts.append((trace.rank, device, cause, idle_ns, idle_ns / whole, count, what, CAUSES[cause]))
    ints, shares = dict.fromkeys(("rank", "device"), int), {"cause": str, "idle_ns": int, "share": float}
    return frame_of(parts, **ints, **shares, gaps=int, what=str, meaning=str)
