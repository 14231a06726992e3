"""How deep a device's queue is, and which launch calls waited for a slot in it: both found from the trace.

A queue holds work that is launched and has not begun. Once it is full, a launch call returns only when some work has
begun: such calls are long, begin before that work and end right after it, and leave the queue as long as it can be.
That length is the depth. It differs between devices and drivers (1,022 on one, 970 beside other entries that traces do
not show on another), and belongs to one stream or to all of a device's, whichever explains more of the waiting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fettle.trace.analyses.launches import launch_rows, launched_work
from fettle.trace.kinds import Kind, is_graph_launch
from fettle.trace.model import Bools, Ints, Trace, per_trace
from fettle.trace.ordering import in_groups

FEWEST_WAITS = 5
SAME_NS, CLEAR_RETURN_NS = 100, 2_000
"""Fewer are enough where no other call is as long: two that return the same time after a slot came free, three soon."""
LONG_NS = 15_000
RETURN_NS = 20_000
"""Longest time from the begin of the work that freed a slot to the return of the call that waited for it."""
SPREAD = 0.06
"""How far below the longest queue the length may be, as entries that the trace does not show come and go."""
SURELY_DEEP = 64
"""A queue that was once so long and never full is taken to be long enough for anything: those whose depth shows in
traces of real devices hold about a thousand (970 and 1,022)."""


@dataclass(frozen=True)
class Queue:
    """One queue: `stream` is -1 where it is shared by all of the device's streams.

    The other fields are by launch call, in order of their begin: `released` is the work (position in
    `trace.device_rows`) whose begin freed the slot that the call waited for, -1 where it did not wait; `bound` the work
    that has to have begun before the call can return if the queue never holds more than `depth`, -1 for the first ones.
    `order` are all works of the queue in order of their begin: a slot comes free with the nth begin, of whichever work
    that is.
    """

    device: int
    stream: int
    depth: int
    calls: Ints
    released: Ints
    bound: Ints
    order: Ints


@dataclass(frozen=True)
class _Launches:
    """The launch calls of one queue in order: their rows and times, how much had been launched when each returned, the
    begins of all their work in order, and how many of them each return saw. `plain` calls launch one piece of work and
    do not wait for it; a `graph` call is as long as its graph is large.
    """

    calls: Ints
    start: Ints
    end: Ints
    launched: Ints
    begins: Ints
    order: Ints
    seen: Ints
    plain: Bools
    graph: Bools

    @property
    def length(self) -> Ints:
        return self.launched - self.seen

    @property
    def lag(self) -> Ints:
        """From the last begin of work before it to each call's return."""
        return self.end - self.begins[np.maximum(self.seen - 1, 0)]

    @property
    def freed(self) -> Bools:
        """Whether a slot came free while the call ran, and it returned soon after."""
        free: Bools = (self.seen > 0) & (self.lag < self.end - self.start) & (self.lag <= RETURN_NS)
        return free & self.plain


@per_trace
def queues(trace: Trace) -> list[Queue]:
    """The queues that were full at some time, with the launch calls that waited; empty where none was."""
    work = np.flatnonzero(launch_rows(trace) >= 0)  # positions, which are in order of begin
    rows, calls = launched_work(trace)
    device, stream = trace.column("device")[rows].astype(np.int64), trace.column("stream")[rows]
    queues = []
    for one, mine in in_groups(device):
        streams = [(s, mine[at]) for s, at in in_groups(stream[mine])]
        alone = [q for s, on in streams if (q := _queue(trace, work[on], calls[on], one, s))]
        shared = _queue(trace, work[mine], calls[mine], one, -1) if len(streams) > 1 else None
        if shared is not None and waited_ns(trace, shared) > 1.05 * sum(waited_ns(trace, q) for q in alone):
            alone = [shared]
        queues += alone
    return queues


def slot_waits(trace: Trace) -> tuple[Ints, Ints]:
    """Launch calls that waited for a slot, and the work (position in `trace.device_rows`) whose begin freed it."""
    nothing = np.zeros(0, dtype=np.int64)
    parts = [(q.calls[q.released >= 0], q.released[q.released >= 0]) for q in queues(trace)]
    calls, released = (np.concatenate(column) for column in zip((nothing, nothing), *parts, strict=True))
    return calls, released


@per_trace
def doubtful_waits(trace: Trace) -> tuple[Ints, Ints]:
    """As `slot_waits`: calls that look like it and that no queue explains, as they are too few or left no plateau."""
    launch = launch_rows(trace)
    work, known = np.flatnonzero(launch >= 0), slot_waits(trace)[0]
    rows = trace.device_rows[work]
    device, lane = trace.column("device")[rows], trace.lane(rows)
    parts = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))]
    for key, only_longest in ((device, False), (lane, True)):
        for _, mine in in_groups(key):
            one = _launches(trace, work[mine], launch[work[mine]])
            may = one.freed & (_at_longest(one) | (_long_calls(one) & (not only_longest)))
            may &= (one.lag <= CLEAR_RETURN_NS) & ~np.isin(one.calls, known)
            parts.append((one.calls[may], one.order[one.seen[may] - 1]))
    calls, freed = (np.concatenate(column) for column in zip(*parts, strict=True))
    calls, first = np.unique(calls, return_index=True)
    return calls, freed[first]


@per_trace
def shallow_queues(trace: Trace) -> list[Queue]:
    """The queues of streams that were never full, if they were no deeper than a device's longest was: the least that a
    depth which does not show may be. None where that one was long. A graph is one entry."""
    full, launch = queues(trace), launch_rows(trace)
    work = np.flatnonzero(launch >= 0)
    work = work[np.sort(np.unique(launch[work], return_index=True)[1])]
    rows, calls = trace.device_rows[work], launch[work]
    device, lane = trace.column("device")[rows].astype(np.int64), trace.lane(rows)
    shallow = []
    for one, on_device in in_groups(device):
        if any(queue.device == one and queue.stream < 0 for queue in full):
            continue
        lanes = []
        for _, at in in_groups(lane[on_device]):
            mine = on_device[at]
            stream = int(trace.column("stream")[rows[mine][0]])
            if not any((queue.device, queue.stream) == (one, stream) for queue in full):
                lanes.append((stream, _launches(trace, work[mine], calls[mine])))
        depth = max((int(each.length.max()) for _, each in lanes), default=0)
        for stream, each in lanes if depth < SURELY_DEEP else ():
            bound, _ = _bound(each, depth)
            shallow.append(Queue(one, stream, depth, each.calls, np.full(len(bound), -1), bound, each.order))
    return shallow


def waited_ns(trace: Trace, queue: Queue) -> int:
    """How long launch calls waited for a slot, summed."""
    waits = queue.released >= 0
    begins = trace.ts[trace.device_rows[queue.released[waits]]]
    return int((begins - trace.ts[queue.calls[waits]]).sum())


def _queue(trace: Trace, work: Ints, calls: Ints, device: int, stream: int) -> Queue | None:
    """One stream's queue, or a whole device's, if it was ever full. A graph is as many entries as it has kernels, or
    one that its first kernel frees, whichever explains more of the waiting."""
    by_count = _counted(trace, work, calls, device, stream)
    if (np.diff(np.sort(calls)) > 0).all():
        return by_count
    order = np.lexsort((work, calls))
    first = order[np.diff(calls[order], prepend=-1) != 0]
    by_call = _counted(trace, work[first], calls[first], device, stream)
    if by_call is None or (by_count is not None and waited_ns(trace, by_count) >= waited_ns(trace, by_call)):
        return by_count
    return by_call


def _counted(trace: Trace, work: Ints, calls: Ints, device: int, stream: int) -> Queue | None:
    if len(work) < FEWEST_WAITS:
        return None
    one = _launches(trace, work, calls)
    waiting = _depth(one)
    if waiting is None:
        return None
    depth, clear = waiting
    bound, begins = _bound(one, depth)
    in_time = begins <= one.end
    near = one.length >= depth - max(2, SPREAD * depth)
    just = (begins > one.start) & in_time
    # A short call may return right after work began by chance: one that waited returns as soon after it as clear cases.
    soonest, latest = np.percentile(one.lag[clear], [5, 95])
    just &= (one.lag >= soonest - SAME_NS) & (one.lag <= latest + SAME_NS)
    released = np.where(one.freed & near & (just | _long_calls(one)), one.order[np.maximum(one.seen - 1, 0)], -1)
    released = np.where(one.graph & just & (one.end - begins <= CLEAR_RETURN_NS), bound, released)
    return Queue(device, stream, depth, one.calls, released, np.where(in_time, bound, -1), one.order)


def _launches(trace: Trace, work: Ints, calls: Ints) -> _Launches:
    distinct, count = np.unique(calls, return_counts=True)
    by_time = np.argsort(trace.ts[distinct], kind="stable")
    distinct, launched = distinct[by_time], np.cumsum(count[by_time])
    start, end = trace.ts[distinct], trace.end[distinct]
    rows, order = trace.device_rows, np.sort(work)
    begins = trace.ts[rows[order]]
    seen = np.searchsorted(begins, end, side="right")
    graph = trace.named(is_graph_launch, distinct)
    itself = calls[(trace.end[rows[work]] <= trace.end[calls]) & (trace.kind[rows[work]] != Kind.KERNEL)]
    plain = ~graph & ~np.isin(distinct, itself)  # a copy that waits for itself waits for no slot
    return _Launches(distinct, start, end, launched, begins, order, seen, plain, graph)


def _bound(one: _Launches, depth: int) -> tuple[Ints, Ints]:
    """The work that has to have begun before each call can return from a queue of this depth, and when; -1: none."""
    at = np.maximum(one.launched - 1 - depth, -1)
    return np.append(one.order, -1)[at], np.append(one.begins, -1)[at]


def _long_calls(one: _Launches) -> Bools:
    """Calls far longer than the shortest ones."""
    duration = one.end - one.start
    few = np.sort(duration[one.plain])[:FEWEST_WAITS]
    usual = float(np.median(few)) if len(few) else 0.0
    long: Bools = duration > max(LONG_NS, 4 * usual)
    return long & one.plain


def _at_longest(one: _Launches) -> Bools:
    """Calls that leave the queue as long as it ever is, and take longer than those in which no work began."""
    duration, full = one.end - one.start, max(int(one.length[one.plain].max(initial=0)), 2)
    others = one.plain & ~one.freed
    most = float(np.percentile(duration[others], 90)) if others.any() else np.inf
    return one.plain & (one.length >= full) & (duration > most)


def _depth(one: _Launches) -> tuple[int, Bools] | None:
    """The length at which launch calls wait, and calls that show it; None where they never wait."""
    duration, full = one.end - one.start, int(one.length[one.plain].max(initial=0))
    if full < 2:
        return None
    top = one.plain & (one.length >= full - 1)
    below = one.plain & (one.length < 0.9 * full)
    if top.sum() >= 20 and below.any():  # calls at the top are longer than below it, be they ever so short
        longer = np.median(duration[top]) > 1.5 * np.median(duration[below])
        if longer and one.freed[top].mean() >= 0.7:
            return full, top & one.freed
    _, freed = _bound(one, full)
    may = one.plain & (freed > one.start)
    if may.any() and (one.plain & ~may).any():  # as long as no other, and over right after the slot came free
        clear = may & (duration > 1.1 * np.percentile(duration[one.plain & ~may], 99))
        lag = one.end - freed
        same = may & (np.abs(lag - np.median(lag[clear])) <= SAME_NS) if clear.any() else clear
        if same.sum() >= max(2, clear.sum()):
            return full, same
        if clear.sum() > 2 and (lag[clear] <= CLEAR_RETURN_NS).mean() >= 0.9:
            return full, clear
    waits = np.flatnonzero(_long_calls(one) & one.freed & (one.length >= 2))
    if len(waits) < FEWEST_WAITS:
        return None
    order = waits[np.argsort(one.length[waits], kind="stable")]
    weight = np.cumsum(duration[order])
    depth = int(one.length[order[np.searchsorted(weight, weight[-1] / 2)]])
    near = np.abs(one.length - depth) <= max(2, SPREAD * depth)
    # Most long calls must be at that length, most calls there long or freed, and few above it.
    at_it = near[waits]
    concentrated = duration[waits[at_it]].sum() >= 0.6 * duration[waits].sum() and at_it.sum() >= FEWEST_WAITS
    above = (one.length > depth + max(2, SPREAD * depth)) & one.plain
    rare = above.sum() <= 0.3 * (near & one.plain).sum()
    rate = at_it.sum() / max((near & one.plain).sum(), 1)
    elsewhere = (~at_it).sum() / max((~near & one.plain).sum(), 1)
    if not (concentrated and rare and rate > 3 * elsewhere):
        return None
    shown = np.zeros(len(duration), dtype=bool)
    shown[waits[at_it]] = True
    return int(one.length[shown].max()) if (one.length[shown] >= depth).any() else depth, shown
