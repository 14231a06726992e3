"""Who called whom on the host: the nesting of operators, Python functions, annotations and runtime calls in each
thread.

Computed for all threads at once with array operations. An event's parent is the last event of its thread that began
before it and has not ended; candidates are followed through each other's candidates, which takes a few rounds even for
deep stacks. Events that overlap without nesting (clocks of whole microseconds make them) are cut at their parent's end,
in order, each before what it contains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fettle.trace.analyses.launches import launched_work
from fettle.trace.intervals import gaps, split
from fettle.trace.kinds import Kind
from fettle.trace.model import Ints, Trace, per_trace
from fettle.trace.ordering import in_groups, order_by

# Outer to inner, for events with the same start and length.
_NESTING = {Kind.ANNOTATION: 0, Kind.PYTHON: 1, Kind.OPERATOR: 2, Kind.RUNTIME: 3, Kind.OVERHEAD: 4}
_GIVE_WAY = ("operator", "python", "runtime_call", "host_untraced")
LONG_COPY_NS = 20_000
ROUNDED_NS = 1_000
ENTERING_EVENTS = 64  # functions and their calls on the way into a range
CAUSES_OF_HOST = (
    "host_untraced", "operator", "python", "runtime_call", "launch_call", "blocking_call", "allocator",
    "compile_or_load", "data_loading", "garbage_collection", "profiler", "other_rank",
)  # fmt: skip


@dataclass(frozen=True)
class HostStacks:
    """Nesting of host events.

    `parent` and `depth` are indexed by event row (-1 and 0 where there is none). Segments say which event is
    innermost on a thread at a time: sorted by thread and start, disjoint within a thread; time with no event at all
    has no segment.
    """

    parent: Ints
    depth: Ints
    cause: npt.NDArray[np.uint8]  # by event row: index into CAUSES_OF_HOST
    rows: Ints  # host events by thread and start
    segment_thread: Ints
    segment_start: Ints
    segment_end: Ints
    segment_row: Ints
    overlaps_cut: int

    @cached_property
    def self_ns(self) -> Ints:
        """By event row: time in which the event was the innermost one."""
        own = np.zeros(len(self.parent), dtype=np.int64)
        np.add.at(own, self.segment_row, self.segment_end - self.segment_start)
        return own

    def thread_slice(self, thread: int) -> slice:
        """The segments of one thread."""
        low, high = np.searchsorted(self.segment_thread, [thread, thread + 1])
        return slice(int(low), int(high))

    def innermost(self, thread: Ints, time: Ints) -> Ints:
        """The row of the innermost event on each thread at each time; -1 for none."""
        answer = np.full(len(thread), -1, dtype=np.int64)
        for one, mine in in_groups(thread):
            part = self.thread_slice(one)
            at = np.searchsorted(self.segment_start[part], time[mine], side="right") - 1
            inside = np.append(self.segment_end[part], np.iinfo(np.int64).min)[at] > time[mine]
            answer[mine[inside]] = self.segment_row[part][at[inside]]
        return answer

    def over(self, thread: int, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """What a thread did in each of some disjoint windows, in order.

        Returns start, end, innermost row (-1: nothing traced) and window index of every piece; the pieces of a window
        add up to it exactly.
        """
        lasting = np.flatnonzero(end > start)
        part, start, end = self.thread_slice(thread), start[lasting], end[lasting]
        if not len(start):
            return start, end, start, start
        busy = self.segment_start[part], self.segment_end[part]
        begins, stops, which, window = split(busy, (start, end))
        free, until, _, of_free = split(gaps(busy, int(start[0]), int(end[-1])), (start, end))
        rows = np.concatenate([self.segment_row[part][which], np.full(len(free), -1)])
        begins, stops, window = (np.concatenate(both) for both in ((begins, free), (stops, until), (window, of_free)))
        order = np.argsort(begins, kind="stable")
        return begins[order], stops[order], rows[order], lasting[window[order]]


@per_trace
def host_stacks(trace: Trace) -> HostStacks:
    """Nest the host events of a trace."""
    count = trace.events.height
    thread = trace.column("thread")
    all_rows = np.flatnonzero(trace.is_host)
    lasting = trace.dur[all_rows] > 0
    begin = trace.ts
    rows = _outer_first(trace, all_rows[lasting], begin)
    for late in (_begin_after_entering, _begin_after_rounding):
        moved, to = late(trace, rows)
        if len(moved):
            begin = begin.copy()
            begin[moved] = to
            rows = _outer_first(trace, rows, begin)
    parent, depth = np.full(count, -1, dtype=np.int64), np.zeros(count, dtype=np.int64)
    start, end, on = begin[rows], trace.end[rows], thread[rows].astype(np.int64)
    above = _parents(start, end, on)
    cut = _cut_overlaps(start, end, on, above)
    depth[rows], segments = _sweep(start, end, above, on, rows)
    parent[rows] = np.append(rows, -1)[above]
    partial = HostStacks(parent, depth, np.zeros(0, np.uint8), rows, *segments, cut)
    instants = all_rows[~lasting]
    if len(instants):
        around = partial.innermost(thread[instants], trace.ts[instants])
        parent[instants] = around
        depth[instants[around >= 0]] = depth[around[around >= 0]] + 1
    return replace(partial, cause=_causes(trace, parent, all_rows))


def _begin_after_entering(trace: Trace, rows: Ints) -> tuple[Ints, Ints]:
    """Annotations that outlive the Python function which opened them, and when those functions ended.

    `with record_function(...)` opens its range inside `__enter__`, and the profiler opens a step inside `step`: to
    nest, the range has to begin where they end. Rows are in order, so these functions are the few events before it.
    """
    if not (trace.kind[rows] == Kind.PYTHON).any():
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    at = np.flatnonzero(trace.kind[rows] == Kind.ANNOTATION)
    thread, ours = trace.column("thread"), rows[at]
    begin = trace.ts[ours].copy()
    open_ = np.arange(len(at))
    for back in range(1, ENTERING_EVENTS):
        open_ = open_[at[open_] >= back]
        mine = ours[open_]
        before = rows[at[open_] - back]
        around = trace.end[before] > trace.ts[mine]
        ends_first = around & (trace.end[before] < trace.end[mine]) & (trace.kind[before] == Kind.PYTHON)
        same = thread[before] == thread[mine]
        some = open_[ends_first & same]
        begin[some] = np.maximum(begin[some], trace.end[before[ends_first & same]])
        open_ = open_[same & (ends_first | ~around)]  # whatever else is around it is what it lies in
        if not len(open_):
            break
    moved = np.flatnonzero(begin > trace.ts[ours])
    return ours[moved], begin[moved]


def _begin_after_rounding(trace: Trace, rows: Ints) -> tuple[Ints, Ints]:
    """Events that seem to begin in one that ends right then, as both ends were rounded, and when it ends: they come
    after it, where nesting would cut nearly all of them."""
    start, end, thread = trace.ts[rows], trace.end[rows], trace.column("thread")[rows]
    begin = start.copy()
    for back in (1, 2, 3):  # the event before, or what that lies in; from behind a range that begins then as well, too
        over = end[:-back] - start[back:]
        some = np.flatnonzero((over > 0) & (over <= ROUNDED_NS))
        mine = some + back
        some = some[(thread[some] == thread[mine]) & (end[mine] - end[some] > over[some])]
        begin[some + back] = np.maximum(begin[some + back], end[some])
    moved = np.flatnonzero(begin > start)
    return rows[moved], begin[moved]


def _outer_first(trace: Trace, rows: Ints, begin: Ints) -> Ints:
    """Rows by thread and start, of those that start together the longest first, then by what usually nests in what."""
    rows = rows[order_by(trace.column("thread")[rows], begin[rows])]
    start, thread = begin[rows], trace.column("thread")[rows]
    together = (start[1:] == start[:-1]) & (thread[1:] == thread[:-1])
    if not together.any():
        return rows
    rank_of_kind = np.full(256, 5, dtype=np.int64)
    for kind, rank in _NESTING.items():
        rank_of_kind[kind] = rank
    group = np.concatenate([[0], np.cumsum(~together)])
    tied = np.flatnonzero(np.concatenate([[False], together]) | np.concatenate([together, [False]]))
    some = rows[tied]
    # Within a group the same row numbers come out in another order: only tied rows are sorted again.
    rows[tied] = some[np.lexsort((rank_of_kind[trace.kind[some]] - trace.dur[some] * 8, group[tied]))]
    return rows


def _parents(start: Ints, end: Ints, thread: Ints) -> Ints:
    """Index of each event's parent (-1: none); events sorted by thread and start, outer before inner."""
    candidate = np.arange(-1, len(start) - 1, dtype=np.int64)
    candidate[np.diff(thread, prepend=-1) != 0] = -1
    active = np.flatnonzero(candidate >= 0)
    while len(active):
        # A candidate that has ended is replaced by its own candidate: all in between have ended too.
        ended = end[candidate[active]] <= start[active]
        active = active[ended]
        candidate[active] = candidate[candidate[active]]
        active = active[candidate[active] >= 0]
    return candidate


def _cut_overlaps(start: Ints, end: Ints, thread: Ints, parent: Ints) -> int:
    """End every event with its parent at the latest, in place, ends and parents; returns how many were cut.

    A cut changes the parents only of what begins before the event's old end: from each event that is too long, events
    are gone through one by one until there.
    """
    inner = np.flatnonzero(parent >= 0)
    too_long = inner[end[inner] > end[parent[inner]]].tolist()
    starts, ends, above = start.data, end.data, parent.data  # give plain integers, several times faster
    cut, at = 0, 0
    for first in too_long:
        if first < at:
            continue
        at, reach = first, ends[first]
        behind = int(np.searchsorted(thread, thread[first], side="right"))
        while at < behind and starts[at] < reach:
            around = at - 1 if at > first else above[first]
            while around >= 0 and ends[around] <= starts[at]:
                around = above[around]
            above[at] = around
            if around >= 0 and ends[at] > ends[around]:
                reach = max(reach, ends[at])
                ends[at] = ends[around]
                cut += 1
            at += 1
    return cut


def _sweep(
    start: Ints, end: Ints, parent: Ints, thread: Ints, rows: Ints
) -> tuple[Ints, tuple[Ints, Ints, Ints, Ints]]:
    """Depth of each event, and the segments: who is innermost between one begin or end of an event and the next.

    Events are in order of thread and start, outer before inner. At one instant events end before others begin; inner
    ones end first, outer ones begin first.
    """
    # Ends in reverse order before begins: of those at one instant a stable sort leaves them like that.
    count, time = len(start), np.concatenate([end[::-1], start])
    turn = order_by(np.concatenate([thread[::-1], thread]), time)
    time, begins = time[turn], turn >= count
    level = np.cumsum(np.where(begins, 1, -1))
    depth = level[begins] - 1  # events begin in their own order
    event = np.where(begins, turn - count, count - 1 - turn)
    owner = np.where(begins, event, parent[event])
    keep = np.flatnonzero((owner[:-1] >= 0) & (time[1:] > time[:-1]))
    owner = owner[keep]
    return depth, (thread[owner], time[keep], time[keep + 1], rows[owner])


def nearest(parent: Ints, flags: np.ndarray, rows: Ints) -> Ints:
    """By row, the nearest event at or above each of `rows` that is flagged; -1 for none.

    Each row's `parent` is followed in doubling steps.
    """
    answer = np.where(flags, np.arange(len(flags)), -1)
    above = parent.copy()
    active = rows[(answer[rows] < 0) & (above[rows] >= 0)]
    while len(active):
        own = answer[above[active]]
        hit = own >= 0
        # The whole stretch above has been searched only once its own answer is settled, so take the nearest known one.
        answer[active[hit]] = own[hit]
        rest = active[~hit]
        above[rest] = above[above[rest]]
        active = rest[above[rest] >= 0]
    return answer


def _causes(trace: Trace, parent: Ints, host_rows: Ints) -> npt.NDArray[np.uint8]:
    number = {cause: i for i, cause in enumerate(CAUSES_OF_HOST)}
    table = np.zeros(len(trace.names) * 256, dtype=np.uint8)
    for (name, kind), one in trace.cause_of_name.items():
        table[name * 256 + kind] = number[one]
    names, kinds = trace.column("name"), trace.kind
    cause = np.zeros(trace.events.height, dtype=np.uint8)
    cause[host_rows] = table[names[host_rows].astype(np.int64) * 256 + kinds[host_rows]]
    # Whatever starts device work launches it: copies, memory sets, graphs.
    work, calls = launched_work(trace)
    cause[calls[cause[calls] == number["runtime_call"]]] = number["launch_call"]
    # A copy that is done when its call returns has made the host wait, whatever its name promises; one that has begun
    # by then has, too, where the call is long.
    copies = trace.kind[work] == Kind.MEMCPY
    work, calls = work[copies], calls[copies]
    stop = trace.ts[calls] + trace.dur[calls]
    waited = trace.ts[work] + trace.dur[work] <= stop
    waited |= (trace.ts[work] < stop) & (trace.dur[calls] > LONG_COPY_NS)
    cause[calls[waited]] = number["blocking_call"]
    # Data loading and compilation own what runs inside them, save calls that block and the profiler's own time.
    for owner in ("compile_or_load", "data_loading"):
        marked = cause == number[owner]
        if marked.any():
            inside = nearest(parent, marked, host_rows) >= 0
            gives = np.isin(np.arange(len(CAUSES_OF_HOST)), [number[c] for c in _GIVE_WAY])
            cause[inside & gives[cause]] = number[owner]
    return cause
