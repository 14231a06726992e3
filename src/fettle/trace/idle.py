"""Why was the device idle? Each gap is cut into the pieces that different causes held, never given one label.

A gap is time in which no stream of a device works. The work that ends it was launched by a host call:

    work ends        host does other things        launch call        launch latency        work starts
    |----------------------------------------------|------------------|---------------------|

What the host did before the call is read from the launching thread, piece by piece: the innermost operator, Python
function or call. Where that thread shows nothing, the main thread is asked, then autograd's. Where the work had been
launched before the gap began, the host is not the cause.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from fettle.trace.intervals import Intervals, gaps, merge, split
from fettle.trace.kinds import Kind, is_graph_launch, without_address
from fettle.trace.model import Ints, Trace
from fettle.trace.stacks import CAUSES_OF_HOST

CAUSES: dict[str, str] = {
    "operator": "the host was inside an operator (its overhead, not a call to the device)",
    "python": "the host ran Python code",
    "runtime_call": "another call to the device's runtime",
    "launch_call": "the launch call itself",
    "full_queue": "a launch call while a stream's queue was full: the host waits until work leaves it",
    "launch_latency": "from the end of the launch call to the start of the work",
    "blocking_call": "the host waited in a call that blocks (synchronise, .item(), a copy from pageable memory)",
    "other_rank": "the host waited for another rank: a barrier, or a collective that the host itself carries out",
    "allocator": "device or pinned memory was allocated or freed",
    "compile_or_load": "compilation, or lazy loading of a module",
    "data_loading": "the host waited for, or did, data loading",
    "garbage_collection": "Python's garbage collector",
    "profiler": "the profiler's own work",
    "stream_event": "the work was queued behind an event of another stream",
    "between_kernels": "the work was queued; the usual gap between two kernels",
    "inside_graph": "between two kernels of one launched graph",
    "queued_unknown": "the work was queued for long and nothing says why it waited",
    "unlinked": "the work that ended the gap has no known launch",
    "host_untraced": "the host did something that the trace does not show",
}
# Old versions had no `autograd::engine` range: there the operators themselves tell.
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
BETWEEN_KERNELS_NS = 30_000
LATENCY_NS = 100_000
PIECES_AT_ONCE = 1 << 20
Causes = npt.NDArray[np.uint8]  # numbers in the order of `CAUSES`
Numbers = npt.NDArray[np.integer[Any]]
_PIECE_TYPES = (np.int64, np.int64, np.uint8, np.int32, np.int32)  # start, end, cause, detail, gap
_NUMBER = {cause: i for i, cause in enumerate(CAUSES)}
_OF_HOST = np.array([_NUMBER.get(cause, 0) for cause in CAUSES_OF_HOST], dtype=np.uint8)
_NAMES = pl.Series(list(CAUSES), dtype=pl.Enum(list(CAUSES)))
_NONE = np.zeros(0, np.int64)


def idle_pieces(trace: Trace, device: int) -> pl.DataFrame:
    """All idle time of one device within the trace, cut by cause; pieces are disjoint, in order, and add up to the
    idle time.

    Columns: start_ns, end_ns, cause (a key of `CAUSES`), detail (event name number; -1: none), gap (number of the gap),
    next_row (the work that ended the gap; -1: none came).
    """
    if device not in trace.idle:
        trace.idle[device] = _idle_pieces(trace, device)
    return trace.idle[device]


def _idle_pieces(trace: Trace, device: int) -> pl.DataFrame:
    rows = trace.device_rows[trace.column("device")[trace.device_rows] == device]
    busy = merge(trace.ts[rows], trace.end[rows])
    low, high = trace.span
    starts, ends = gaps(busy, low, high)
    if not len(starts):
        return _Pieces().frame(_NONE)
    next_row = _next_work(trace, rows, ends)
    pieces = _Pieces()
    launch = np.full(len(starts), -1, dtype=np.int64)
    ended = next_row >= 0
    launch[ended] = trace.launches.launch_of(next_row[ended])
    number = np.arange(len(starts))

    tail = ~ended
    unlinked = ended & (launch < 0)
    pieces.add(starts[unlinked], ends[unlinked], "unlinked", -1, number[unlinked])
    linked = np.flatnonzero(launch >= 0)
    call_start, call_end = trace.ts[launch[linked]], trace.end[launch[linked]]
    queued = call_end <= starts[linked]
    _queued(trace, pieces, starts, ends, next_row, launch, linked[queued], rows)

    mine = linked[~queued]
    l0 = np.clip(call_start[~queued], starts[mine], ends[mine])
    l1 = np.clip(call_end[~queued], l0, ends[mine])
    names = trace.column("name")
    pieces.add(l0, l1, "launch_call", names[launch[mine]].astype(np.int32), mine)
    graph = _graph_names(trace)[names[launch[mine]]] if len(mine) else np.zeros(0, dtype=bool)
    slow = (ends[mine] - l1 > LATENCY_NS) & ~graph
    pieces.add(l1[~slow], ends[mine][~slow], "launch_latency", -1, mine[~slow])
    pieces.add(l1[slow], ends[mine][slow], "queued_unknown", -1, mine[slow])
    # What the host did until it launched; behind the last work, what the main thread did.
    main = main_thread(trace)
    thread = np.where(launch[mine] >= 0, trace.column("thread")[launch[mine]], main)
    _host_time(
        trace,
        pieces,
        np.concatenate([starts[mine], starts[tail]]),
        np.concatenate([l0, ends[tail]]),
        np.concatenate([thread, np.full(int(tail.sum()), main)]),
        np.concatenate([mine, number[tail]]),
    )
    return _full_queue(trace, pieces).frame(next_row)


def _full_queue(trace: Trace, pieces: _Pieces) -> _Pieces:
    """The pieces, with the time that launch calls spent while some stream's queue was full cut out of them."""
    from fettle.trace.queue import full_intervals

    full = full_intervals(trace)
    if not len(full[0]):
        return pieces
    cut = _Pieces()
    for start, end, cause, detail, gap in pieces.parts:
        calls = cause == _NUMBER["launch_call"]
        rest = ~calls
        cut.add(start[rest], end[rest], cause[rest], detail[rest], gap[rest])
        if calls.any():
            pair, what, of = (start[calls], end[calls]), detail[calls], gap[calls]
            free = gaps(full, int(start.min()), int(end.max()))
            for windows, name in ((full, "full_queue"), (free, "launch_call")):
                begins, stops, piece, _ = split(pair, windows)
                cut.add(begins, stops, name, what[piece], of[piece])
    return cut


class _Pieces:
    """Pieces of idle time as they are found, in no order.

    Millions of them: they are copied into few large arrays, because what many small ones of them leave between
    themselves is handed back to the system and asked for again, which costs more than finding them.
    """

    def __init__(self) -> None:
        self.full: list[list[npt.NDArray[Any]]] = []
        self.columns: list[npt.NDArray[Any]] = [np.empty(0, dtype) for dtype in _PIECE_TYPES]
        self.used = 0

    @property
    def parts(self) -> list[list[npt.NDArray[Any]]]:
        """All pieces: sets of columns, in the order of `_PIECE_TYPES`."""
        return [*self.full, [column[: self.used] for column in self.columns]]

    def add(self, start: Ints, end: Ints, cause: Causes | str, detail: Numbers | int, gap: Numbers) -> None:
        values = (start, end, _NUMBER[cause] if isinstance(cause, str) else cause, detail, gap)
        done, count = 0, len(start)
        while done < count:
            if self.used == len(self.columns[0]):
                self.full.append(self.columns)
                self.columns, self.used = [np.empty(PIECES_AT_ONCE, dtype) for dtype in _PIECE_TYPES], 0
            more = min(count - done, len(self.columns[0]) - self.used)
            for column, value in zip(self.columns, values, strict=True):
                piece = value[done : done + more] if isinstance(value, np.ndarray) else value
                column[self.used : self.used + more] = piece
            done += more
            self.used += more

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
    """The first work that starts at each gap's end; -1 behind the last."""
    starts = trace.ts[rows]
    at = np.searchsorted(starts, ends, side="left")
    found = at < len(rows)
    answer = np.full(len(ends), -1, dtype=np.int64)
    exact = np.zeros(len(ends), dtype=bool)
    exact[found] = starts[at[found]] == ends[found]
    # Zero-length work at the same instant does not end a gap; take the first that lasts.
    clamped = np.minimum(at, max(len(rows) - 1, 0))
    answer[exact] = rows[clamped[exact]]
    for i in np.flatnonzero(exact & (trace.dur[rows[clamped]] == 0)).tolist():
        j = int(at[i])
        while j < len(rows) and starts[j] == ends[i] and trace.dur[rows[j]] == 0:
            j += 1
        answer[i] = rows[j] if j < len(rows) and starts[j] == ends[i] else rows[at[i]]
    return answer


def _graph_names(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array([is_graph_launch(n) for n in trace.names], dtype=bool)


def _queued(
    trace: Trace, pieces: _Pieces, starts: Ints, ends: Ints, next_row: Ints, launch: Ints, which: Ints, rows: Ints
) -> None:
    """Gaps whose next work had been launched before they began."""
    if not len(which):
        return
    same_graph = _graph_names(trace)[trace.column("name")[launch[which]]]
    previous_at = np.searchsorted(trace.ts[rows], ends[which], side="left") - 1
    previous = rows[np.maximum(previous_at, 0)]
    same_graph &= trace.launches.launch_of(previous) == launch[which]
    short = ends[which] - starts[which] <= BETWEEN_KERNELS_NS
    behind_event = _behind_event(trace, next_row[which], launch[which])
    cause = np.where(
        same_graph,
        "inside_graph",
        np.where(behind_event, "stream_event", np.where(short, "between_kernels", "queued_unknown")),
    )
    for one in np.unique(cause):
        some = which[cause == one]
        pieces.add(starts[some], ends[some], str(one), -1, some)


def _behind_event(trace: Trace, next_row: Ints, launch: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether the host made the stream wait for an event shortly before it launched this work."""
    waits = np.array(["StreamWaitEvent" in n for n in trace.names], dtype=bool)
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & waits[trace.column("name")])
    answer = np.zeros(len(next_row), dtype=bool)
    if not len(calls):
        return answer
    thread = trace.column("thread")
    # The launch of the work before this one on the same stream bounds "shortly".
    device_rows = trace.launches.device_rows
    key = trace.column("device")[device_rows].astype(np.int64) * 2**40 + trace.column("stream")[device_rows] % 2**40
    order = np.argsort(key, kind="stable")
    position = np.empty(trace.events.height, dtype=np.int64)
    position[device_rows[order]] = np.arange(len(order))
    at = position[next_row]
    has = at > 0
    previous = device_rows[order[np.maximum(at - 1, 0)]]
    same = has & (key[order[np.maximum(at - 1, 0)]] == key[order[at]])
    since = np.where(same, trace.ts[np.maximum(trace.launches.launch_of(previous), 0)], trace.span[0])
    for one in np.unique(thread[launch]):
        times = np.sort(trace.ts[calls[thread[calls] == one]])
        mine = np.flatnonzero(thread[launch] == one)
        until = trace.ts[launch[mine]]
        answer[mine] = np.searchsorted(times, until) > np.searchsorted(times, np.minimum(since[mine], until))
    return answer


def main_thread(trace: Trace) -> int:
    """The thread that runs the steps; else the one that launches most; else the one with most host events; -1: none."""
    thread = trace.column("thread")
    step_codes = np.array([n.startswith("ProfilerStep#") for n in trace.names], dtype=bool)
    for rows in (
        np.flatnonzero((trace.kind == Kind.ANNOTATION) & step_codes[trace.column("name")]),
        trace.launches.known[1],
        np.flatnonzero(trace.is_host),
    ):
        if len(rows):
            return int(np.bincount(thread[rows]).argmax())
    return -1


def autograd_threads(trace: Trace) -> list[int]:
    """Threads that run backward operators."""
    engine = np.array([bool(_BACKWARD.search(n)) for n in trace.names], dtype=bool)
    rows = np.flatnonzero((trace.kind == Kind.OPERATOR) & engine[trace.column("name")])
    return [int(t) for t in np.unique(trace.column("thread")[rows])]


def _host_time(trace: Trace, pieces: _Pieces, start: Ints, end: Ints, thread: Ints, gap: Ints) -> None:
    keep = end > start
    start, end, thread, gap = start[keep], end[keep], thread[keep], gap[keep]
    fallbacks = [t for t in [main_thread(trace), *autograd_threads(trace)] if t >= 0]
    names = trace.column("name")
    asked: set[int] = set()
    while len(start):
        next_round: list[tuple[Ints, Ints, Ints, Ints]] = []
        for one in np.unique(thread):
            mine = np.flatnonzero(thread == one)
            mine = mine[np.argsort(start[mine], kind="stable")]
            for block in trace.stacks.blocks(int(one), start[mine], end[mine]):
                some = mine[block]
                s, e, row, window = trace.stacks.over(int(one), start[some], end[some])
                owner = gap[some][window]
                cause = np.where(row >= 0, trace.stacks.cause[row], 0)
                name = np.where(row >= 0, names[row].astype(np.int32), np.int32(-1))
                silent = np.flatnonzero(cause == 0)
                if not len(silent):
                    pieces.add(s, e, _OF_HOST[cause], name, owner)
                else:
                    known = np.flatnonzero(cause)
                    pieces.add(s[known], e[known], _OF_HOST[cause[known]], name[known], owner[known])
                    next_round.append((s[silent], e[silent], owner[silent], name[silent]))
        if not next_round:
            return
        start, end, gap, name = (np.concatenate([part[i] for part in next_round]) for i in range(4))
        order = np.argsort(start, kind="stable")
        start, end, gap, name = start[order], end[order], gap[order], name[order]
        remaining = [t for t in fallbacks if t not in asked]
        if not remaining:
            pieces.add(start, end, "host_untraced", name, gap)
            return
        asked.add(remaining[0])
        thread = np.full(len(start), remaining[0])


def idle_summary(trace: Trace, device: int, windows: Intervals | None = None) -> pl.DataFrame:
    """Idle time of a device by cause, with what held the host longest.

    Columns: rank, device, cause, idle_ns, share (of this device's idle time), gaps (pieces), what (the three longest
    details with their ns), meaning.
    """
    frame = idle_pieces(trace, device)
    if windows is not None:
        start, end, piece, _ = split((frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()), windows)
        frame = frame[piece].with_columns(start_ns=pl.Series(start), end_ns=pl.Series(end))
    frame = frame.select("cause", "detail", idle_ns=pl.col("end_ns") - pl.col("start_ns"))
    if not frame.height:
        return pl.DataFrame(
            schema={
                "rank": pl.Int64(),
                "device": pl.Int64(),
                "cause": pl.String(),
                "idle_ns": pl.Int64(),
                "share": pl.Float64(),
                "gaps": pl.UInt32(),
                "what": pl.String(),
                "meaning": pl.String(),
            }
        )
    told = frame.filter(pl.col("detail") >= 0).group_by("cause", "detail").agg(pl.col("idle_ns").sum())
    names = [without_address(trace.names[d]) for d in told["detail"]]
    by_name = told.with_columns(name=pl.Series(names, dtype=pl.String())).group_by("cause", "name")
    longest = by_name.agg(pl.col("idle_ns").sum()).sort("idle_ns", "name", descending=[True, False])
    what = {
        str(cause[0]): "; ".join(f"{name[:120]} ({ns / 1e6:.3f} ms)" for _, name, ns in part.head(3).iter_rows())
        for cause, part in longest.group_by("cause", maintain_order=True)
    }
    total = int(frame["idle_ns"].sum())
    summary = frame.group_by("cause").agg(pl.col("idle_ns").sum(), gaps=pl.len()).sort("idle_ns", descending=True)
    summary = summary.with_columns(pl.col("cause").cast(pl.String()))
    return summary.select(
        rank=pl.lit(trace.rank, dtype=pl.Int64()),
        device=pl.lit(device, dtype=pl.Int64()),
        cause=pl.col("cause"),
        idle_ns=pl.col("idle_ns"),
        share=pl.col("idle_ns") / total,
        gaps=pl.col("gaps"),
        what=pl.Series([what.get(c, "") for c in summary["cause"]], dtype=pl.String()),
        meaning=pl.Series([CAUSES[c] for c in summary["cause"]], dtype=pl.String()),
    )
