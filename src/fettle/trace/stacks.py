"""Who called whom on the host: the nesting of operators, Python functions, annotations and runtime calls in each
thread.

Computed for all threads at once with array operations. An event's parent is the last event of its thread that began
before it and has not ended; candidates are followed through each other's candidates, which takes a few rounds even for
deep stacks. Events that overlap without nesting (clocks of whole microseconds make them) are cut at their parent's end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fettle.trace.intervals import ranges
from fettle.trace.kinds import Kind
from fettle.trace.model import Bools, Ints, Trace

# Outer to inner, for events with the same start and length.
_NESTING = {Kind.ANNOTATION: 0, Kind.PYTHON: 1, Kind.OPERATOR: 2, Kind.RUNTIME: 3, Kind.OVERHEAD: 4}
CAUSES_OF_HOST = (
    "host_untraced",
    "operator",
    "python",
    "runtime_call",
    "launch_call",
    "blocking_call",
    "allocator",
    "compile_or_load",
    "data_loading",
    "garbage_collection",
    "profiler",
    "other_rank",
)


@dataclass(frozen=True)
class HostStacks:
    """Nesting of host events.

    `parent` and `depth` are indexed by event row (-1 and 0 where there is none). Segments say which event is
    innermost on a thread at a time: sorted by thread and start, disjoint within a thread; time with no event at all
    has no segment.
    """

    parent: Ints
    depth: Ints
    cause: Ints  # by event row: index into CAUSES_OF_HOST
    rows: Ints  # host events by thread and start
    segment_thread: Ints
    segment_start: Ints
    segment_end: Ints
    segment_row: Ints
    overlaps_cut: int

    def thread_slice(self, thread: int) -> slice:
        """The segments of one thread."""
        low, high = np.searchsorted(self.segment_thread, [thread, thread + 1])
        return slice(int(low), int(high))

    def innermost(self, thread: Ints, time: Ints) -> Ints:
        """The row of the innermost event on each thread at each time; -1 for none."""
        answer = np.full(len(thread), -1, dtype=np.int64)
        for one in np.unique(thread):
            part = self.thread_slice(int(one))
            starts = self.segment_start[part]
            mine = np.flatnonzero(thread == one)
            at = np.searchsorted(starts, time[mine], side="right") - 1
            found = at >= 0
            inside = found.copy()
            inside[found] = self.segment_end[part][at[found]] > time[mine][found]
            answer[mine[inside]] = self.segment_row[part][at[inside]]
        return answer

    def over(self, thread: int, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """What a thread did in each of some disjoint windows, in order.

        Returns start, end, innermost row (-1: nothing traced) and window index of every piece; the pieces of a window
        add up to it exactly.
        """
        part = self.thread_slice(thread)
        seg_start, seg_end, seg_row = self.segment_start[part], self.segment_end[part], self.segment_row[part]
        first = np.searchsorted(seg_end, start, side="right")
        last = np.searchsorted(seg_start, end, side="left")
        count = np.maximum(last - first, 0)
        window = np.repeat(np.arange(len(start)), count)
        segment = ranges(first, count)
        begins, stops = np.maximum(seg_start[segment], start[window]), np.minimum(seg_end[segment], end[window])
        rows = seg_row[segment]
        # The free time before each piece, and after the last one of a window.
        head = np.ones(len(window), dtype=bool)
        head[1:] = window[1:] != window[:-1]
        before = np.empty(len(window), dtype=np.int64)
        before[head] = start[window[head]]
        before[~head] = stops[np.flatnonzero(~head) - 1]
        reach = start.copy()
        reach[window] = stops  # the last piece of each window wins
        free = begins > before
        tail = end > reach
        all_start = np.concatenate([begins, before[free], reach[tail]])
        all_end = np.concatenate([stops, begins[free], end[tail]])
        all_row = np.concatenate([rows, np.full(int(free.sum()) + int(tail.sum()), -1, dtype=np.int64)])
        all_window = np.concatenate([window, window[free], np.flatnonzero(tail)])
        order = np.lexsort((all_start, all_window))
        return all_start[order], all_end[order], all_row[order], all_window[order]


def build_stacks(trace: Trace) -> HostStacks:
    """Nest the host events of a trace."""
    count = trace.events.height
    host = trace.is_host
    thread = trace.column("thread")
    rank_of_kind = np.full(256, 5, dtype=np.int64)
    for kind, rank in _NESTING.items():
        rank_of_kind[kind] = rank
    all_rows = np.flatnonzero(host)
    real = all_rows[trace.dur[all_rows] > 0]
    order = np.lexsort((rank_of_kind[trace.kind[real]] - trace.dur[real] * 8, trace.ts[real], thread[real]))
    rows = real[order]
    start, end, threads = trace.ts[rows], trace.end[rows].copy(), thread[rows]
    cut = 0
    parent = _parents(start, end, threads)
    for _ in range(8):
        inner = parent >= 0
        too_long = np.zeros(len(rows), dtype=bool)
        too_long[inner] = end[inner] > end[parent[inner]]
        if not too_long.any():
            break
        cut = max(cut, int(too_long.sum()))
        end[too_long] = end[parent[too_long]]
        parent = _parents(start, end, threads)
    depth = _depths(parent)
    segments = _segments(start, end, parent, threads, rows)

    parent_by_row = np.full(count, -1, dtype=np.int64)
    inner = parent >= 0
    parent_by_row[rows[inner]] = rows[parent[inner]]
    depth_by_row = np.zeros(count, dtype=np.int64)
    depth_by_row[rows] = depth
    partial = HostStacks(parent_by_row, depth_by_row, np.zeros(0, np.int64), rows, *segments, cut)
    instants = all_rows[trace.dur[all_rows] == 0]
    if len(instants):
        around = partial.innermost(thread[instants], trace.ts[instants])
        parent_by_row[instants] = around
        depth_by_row[instants[around >= 0]] = depth_by_row[around[around >= 0]] + 1
    cause = _causes(trace, parent_by_row, all_rows)
    return HostStacks(parent_by_row, depth_by_row, cause, rows, *segments, cut)


def _parents(start: Ints, end: Ints, thread: Ints) -> Ints:
    """Index of each event's parent (-1: none); events sorted by thread and start, outer before inner."""
    candidate = np.arange(-1, len(start) - 1, dtype=np.int64)
    if len(candidate):
        first = np.ones(len(start), dtype=bool)
        first[1:] = thread[1:] != thread[:-1]
        candidate[first] = -1
    active = np.flatnonzero(candidate >= 0)
    while len(active):
        # A candidate that has ended is replaced by its own candidate: all in between have ended too.
        ended = end[candidate[active]] <= start[active]
        active = active[ended]
        candidate[active] = candidate[candidate[active]]
        active = active[candidate[active] >= 0]
    return candidate


def _depths(parent: Ints) -> Ints:
    """Distance to the outermost event, by following parents in doubling steps."""
    depth = (parent >= 0).astype(np.int64)
    above = parent.copy()
    while True:
        has = np.flatnonzero(above >= 0)
        further = has[above[above[has]] >= 0] if len(has) else has
        if not len(has):
            return depth
        depth_add = depth[above[has]]
        depth[has] += depth_add
        if not len(further):
            return depth
        above[has] = above[above[has]]


def _segments(start: Ints, end: Ints, parent: Ints, thread: Ints, rows: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Time when each event is innermost: from its start to its first child, then after each child to the next or its
    end.
    """
    count = len(start)
    index = np.arange(count)
    has_child = np.zeros(count, dtype=bool)
    has_child[:-1] = parent[1:] == index[:-1]
    first_stop = end.copy()
    with_child = np.flatnonzero(has_child)
    first_stop[with_child] = start[with_child + 1]
    order = np.argsort(parent, kind="stable")
    following = np.full(count, -1, dtype=np.int64)
    siblings = parent[order[1:]] == parent[order[:-1]]
    following[order[:-1][siblings]] = order[1:][siblings]
    inner = np.flatnonzero(parent >= 0)
    after_stop = np.where(following[inner] >= 0, start[following[inner]], end[parent[inner]])
    seg_start = np.concatenate([start, end[inner]])
    seg_end = np.concatenate([first_stop, after_stop])
    seg_owner = np.concatenate([index, parent[inner]])
    keep = seg_end > seg_start
    seg_start, seg_end, seg_owner = seg_start[keep], seg_end[keep], seg_owner[keep]
    seg_thread = thread[seg_owner].astype(np.int64)
    order = np.lexsort((seg_start, seg_thread))
    seg_thread, seg_start, seg_end = seg_thread[order], seg_start[order], seg_end[order]
    # Whatever the events did, no moment of a thread is given twice.
    same = seg_thread[1:] == seg_thread[:-1]
    seg_end[:-1][same] = np.minimum(seg_end[:-1], seg_start[1:])[same]
    return seg_thread, seg_start, seg_end, rows[seg_owner[order]]


def inherit(flags: Bools, parent: Ints, rows: Ints) -> Bools:
    """Mark everything inside a marked event: flags and parents are indexed by event row."""
    flags = flags.copy()
    above = parent.copy()
    while True:
        has = rows[above[rows] >= 0]
        if not len(has):
            return flags
        flags[has] |= flags[above[has]]
        above[has] = above[above[has]]


def _causes(trace: Trace, parent: Ints, host_rows: Ints) -> Ints:
    number = {cause: i for i, cause in enumerate(CAUSES_OF_HOST)}
    names = trace.column("name")[host_rows].astype(np.int64)
    kinds = trace.kind[host_rows].astype(np.int64)
    table = {pair: number[cause] for pair, cause in trace.cause_of_name.items()}
    keys, inverse = np.unique(names * 256 + kinds, return_inverse=True)
    codes = np.array([table[(int(k) // 256, int(k) % 256)] for k in keys], dtype=np.int64)
    cause = np.zeros(trace.events.height, dtype=np.int64)
    if len(keys):
        cause[host_rows] = codes[inverse]
    # Data loading and compilation own what runs inside them, save calls that block and the profiler's own time.
    for owner in ("compile_or_load", "data_loading"):
        marked = np.zeros(trace.events.height, dtype=bool)
        marked[host_rows] = cause[host_rows] == number[owner]
        if marked.any():
            inside = inherit(marked, parent, host_rows)
            takes = np.isin(
                cause, [number["operator"], number["python"], number["runtime_call"], number["host_untraced"]]
            )
            cause[inside & takes & trace.is_host] = number[owner]
    return cause
