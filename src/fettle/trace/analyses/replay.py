"""A trace run again with a change: who waits for whom stays as it was, times come out new.

Host threads go through what they did: between waits their time passes as it was measured; a launch call, a call that
blocks, silence in which another thread works (`stops`) and a full queue (`slots`) are waited
for anew. Device work begins when its launch, its stream and the event that it waits for allow
(`waits`). A wait takes as long after its last reason as it did in the trace; where another reason was the
last one then, as long as is usual, at most what there was room for. So the unchanged replay gives the trace itself.
`usual=True` gives every such rest its mean instead, and what nothing explains none: how far that is from the trace is
how far the replay can be trusted.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fettle.trace.analyses.slots import Queue, queues, shallow_queues
from fettle.trace.analyses.stacks import CAUSES_OF_HOST, host_stacks
from fettle.trace.analyses.steps import step_thread, step_windows
from fettle.trace.analyses.stops import Why, autograd_threads, host_stops, main_thread
from fettle.trace.analyses.waits import NUMBER, Held, device_waits
from fettle.trace.intervals import Intervals, length_within, merge
from fettle.trace.kinds import Kind, is_graph_launch
from fettle.trace.model import Bools, Ints, Trace, per_trace
from fettle.trace.ordering import in_groups

_UPLOAD = re.compile(r"(memcpy\s*|copy)(HtoD|H2D|M2D|HostToDevice)", re.IGNORECASE)
"""On Intel's GPUs M is memory that is not pinned; older versions of ROCm write CopyHostToDevice."""
_NEVER = float("-inf")
_WORK, _END, _BEGIN = 0, 1, 2  # at one moment work begins first, then calls end, then others begin


@dataclass(frozen=True)
class Change:
    """What is different: durations of device work by factor (by position in `trace.device_rows`), no call that blocks,
    launches that cost nothing, no time in data loading."""

    scale: np.ndarray | None = None
    blocking: bool = True
    launching: bool = True
    loading: bool = True


@dataclass
class _Calls:
    """Launches and waits of host threads, by thread and time, and moments, of no length: columns of one length."""

    thread: Ints
    start: Ints
    end: Ints
    launches: Bools
    graph: Bools
    stop: Ints  # number of the stop; -1: none
    queue: Ints  # number of the queue that it launches into; -1: none, or one that was never full
    bound: Ints  # which begin in that queue must have been before the call can return; -1: none
    freed: Ints  # which begin freed the slot that it waited for; -1: it did not wait


def data_loading(trace: Trace, thread: int) -> Intervals:
    """When a thread was loading data."""
    low, high = trace.span
    start, end, row, _ = host_stacks(trace).over(thread, np.array([low]), np.array([high]))
    mine = np.append(host_stacks(trace).cause, 0)[row] == CAUSES_OF_HOST.index("data_loading")
    return merge(start[mine], end[mine])


@per_trace
def replay_of(trace: Trace, doubtful: bool = False) -> Replay:
    """The trace, ready to be run again; where asked, with `doubtful_waits` and `shallow_queues` taken for true."""
    return Replay(trace, doubtful)


class Replay:
    """One trace, run again as often as is asked."""

    def __init__(self, trace: Trace, doubtful: bool = False) -> None:
        self.trace = trace
        self.waits, self.stops = device_waits(trace), host_stops(trace, doubtful)
        self.queues = queues(trace) + (shallow_queues(trace) if doubtful else [])
        rows = trace.device_rows
        self.start, self.end = trace.ts[rows], trace.end[rows]
        self.device = trace.column("device")[rows]
        self.calls, self.call_of, self.mark = self._calls()
        self._gaps()
        self._rests()
        self.order = self._order()

    # --- the program ---

    def _calls(self) -> tuple[_Calls, Ints, dict[tuple[int, int], int]]:
        """The stretches, which one launched each piece of work (-1: unknown), and those that mark a thread's moment."""
        trace, stops, launch = self.trace, self.stops, self.waits.launch
        stopped = np.flatnonzero(stops.row >= 0)
        silent = np.flatnonzero(stops.row < 0)
        rows = np.unique(np.concatenate([launch[launch >= 0], stops.row[stopped]]))
        wanted, marks = self._lasts(), step_thread(trace)
        self.step_times = np.unique(np.concatenate(step_windows(trace))).tolist() if marks >= 0 else []
        wanted |= {(marks, time) for time in self.step_times}
        wanted |= {(int(o), int(w)) for o, w in zip(stops.other, stops.when, strict=True) if o >= 0}
        points = np.array(sorted(wanted), dtype=np.int64).reshape(-1, 2)
        thread = np.concatenate([trace.column("thread")[rows], stops.thread[silent], points[:, 0]]).astype(np.int64)
        start = np.concatenate([trace.ts[rows], stops.start[silent], points[:, 1]])
        end = np.concatenate([trace.end[rows], stops.end[silent], points[:, 1]])
        launches, graph = np.zeros((2, len(start)), dtype=bool)
        launches[: len(rows)] = np.isin(rows, launch)
        graph[: len(rows)] = trace.named(is_graph_launch, rows)
        stop, queue, bound, freed = np.full((4, len(start)), -1, dtype=np.int64)
        stop[np.searchsorted(rows, stops.row[stopped])] = stopped
        stop[len(rows) : len(rows) + len(silent)] = silent
        self.queue_of = np.full(len(launch), -1, dtype=np.int64)  # of device work
        for number, one in enumerate(self.queues):
            self.queue_of[one.order] = number
            at = np.searchsorted(rows, one.calls)
            queue[at] = number
            for column, work in ((bound, one.bound), (freed, one.released)):
                column[at] = np.where(work >= 0, np.searchsorted(one.order, work), -1)
        is_work = np.arange(len(start)) < len(rows) + len(silent)
        order = np.lexsort((-end, is_work, start, thread))  # a moment comes before what begins then
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        columns: list[Any] = [thread, start, end, launches, graph, stop, queue, bound, freed]
        calls = _Calls(*(column[order] for column in columns))
        call_of = np.full(len(launch), -1, dtype=np.int64)
        call_of[launch >= 0] = place[np.searchsorted(rows, launch[launch >= 0])]
        at = place[len(rows) + len(silent) :].tolist()
        return calls, call_of, {(one, time): i for (one, time), i in zip(points.tolist(), at, strict=True)}

    def _lasts(self) -> set[tuple[int, int]]:
        """When each host thread is through. The profiler's own notes lie on no thread of the program."""
        trace = self.trace
        rows = np.flatnonzero(trace.is_host & (trace.kind != Kind.OVERHEAD))
        return {(t, int(trace.end[rows[mine]].max())) for t, mine in in_groups(trace.column("thread")[rows])}

    def _gaps(self) -> None:
        """Host time between the calls of each thread: `gap`, `loading` of it in data loading, `kept` of it where
        launches cost nothing. A call inside another counts from where that one ends."""
        calls, trace, low = self.calls, self.trace, self.trace.span[0]
        uploads = trace.named(_UPLOAD.search, trace.device_rows)
        feeds = np.zeros(len(calls.start), dtype=bool)
        feeds[self.call_of[uploads & (self.call_of >= 0)]] = True
        before = np.empty_like(calls.start)
        loading = np.zeros(len(calls.start))
        lasting = (calls.launches | (calls.stop >= 0)).astype(np.int64)
        self.host_threads = np.unique(calls.thread).tolist()
        for thread in self.host_threads:
            mine = slice(*np.searchsorted(calls.thread, [thread, thread + 1]).tolist())
            # Each ends no earlier than `lasting` after its begin and after the end before: a running maximum.
            least = np.cumsum(lasting[mine])
            ends = np.maximum(calls.end[mine], calls.start[mine] + lasting[mine]) - least
            reach = np.maximum(np.maximum.accumulate(ends), low) + least
            before[mine] = np.concatenate([[low], reach[:-1]])
            calls.start[mine] = np.maximum(calls.start[mine], before[mine])
            calls.end[mine] = reach
            # Data loading stays where launches cost nothing, and so does what may make the data of an upload.
            if thread == main_thread(trace):
                loading[mine] = length_within(data_loading(trace, thread), before[mine], calls.start[mine])
        gap = (calls.start - before).astype(float)
        self.gap, self.loading, self.kept = gap, loading, np.where(feeds, gap, loading)

    def _rests(self) -> None:
        """What passed after the last reason of each wait, and what usually passes after each sort."""
        waits, start = self.waits, self.start
        rest = (start - waits.since).astype(float)
        # Work whose launch nobody knows comes after what was before it, as long after as it did.
        held = np.where((waits.held == Held.NOTHING) & (waits.previous >= 0), Held.STREAM, waits.held)
        known = ~np.isin(waits.cause, [NUMBER["queued_unknown"], NUMBER["unlinked"]])
        calls = self.calls
        # Work is launched when its call begins (0: unknown), or when it returns where it may have waited for a slot.
        begun, returned = np.append(calls.start, 0)[self.call_of], np.append(calls.end, 0)[self.call_of]
        may_wait = np.append((calls.bound >= 0) | (calls.freed >= 0), False)[self.call_of]
        self.at_return = may_wait & (returned <= start)
        self.launched = np.where(self.at_return, returned, begun)
        ended = np.append(self.end, 0)
        reasons = (
            (Held.LAUNCH, self.launched, self.call_of >= 0),
            (Held.STREAM, ended[waits.previous], waits.previous >= 0),
            (Held.EVENT, ended[waits.event], waits.event >= 0),
        )
        self.rest, self.mean_rest = {}, {}
        # The call itself is host time, as measured.
        in_call = np.where(held == Held.LAUNCH, np.maximum(start - self.launched, 0) - rest, 0.0)
        for sort, since, there in reasons:
            mine, room = held == sort, np.maximum(start - since, 0).astype(float)
            measured = rest[mine & known]
            low, mean = (float(np.percentile(measured, 25)), float(measured.mean())) if len(measured) else (1e3, 1e3)
            if sort == Held.LAUNCH and mine.any():
                low += float(np.percentile(in_call[mine], 25))
            other = np.minimum(low, room)
            self.rest[sort] = np.where(there, np.where(mine, room, other), -1.0).tolist()
            self.mean_rest[sort] = np.where(there, np.where(mine, in_call + mean, other), -1.0).tolist()
        stops = self.stops
        late = np.maximum(stops.end - stops.when, 0).astype(float)
        usual = late[stops.met & (stops.why != Why.THREAD)]
        self.usual_return = float(usual.mean()) if len(usual) else 0.0
        self.low_return = float(np.percentile(usual, 25)) if len(usual) else 0.0
        self.last_work = [[int(work)] for work in stops.work]
        for k in np.flatnonzero(stops.whole & (stops.work >= 0)).tolist():
            self.last_work[k] += self._ended(int(stops.end[k]), int(self.device[stops.work[k]]))
        self.usual_call = {False: 5_000.0, True: 5_000.0}  # by whether it launches a graph
        durations = (calls.end - calls.start).astype(float)
        for graph in self.usual_call:
            alike = calls.launches & (calls.stop < 0) & (calls.graph == graph)
            if alike.any():
                self.usual_call[graph] = float(np.median(durations[alike]))

    @cached_property
    def _lanes(self) -> list[tuple[Ints, Ints]]:
        """By stream: positions of its work, and the latest end so far."""
        lanes = in_groups(self.trace.lane(self.trace.device_rows))
        return [(lane, np.maximum.accumulate(self.end[lane])) for _, lane in lanes]

    def _ended(self, time: int, device: int) -> list[int]:
        """The last work of each stream of a device that was over by then."""
        ended = [(lane, int(np.searchsorted(ends, time, side="right")) - 1) for lane, ends in self._lanes]
        return [int(lane[at]) for lane, at in ended if at >= 0 and self.device[lane[0]] == device]

    def _order(self) -> list[tuple[int, int]]:
        """What happens, in its order: the sort of event, and which call or piece of work. When work begins is known as
        soon as it and what it comes after are launched."""
        calls, stops = self.calls, self.stops
        # A call that waits for nothing needs no second place in the order, for its end.
        waits = np.flatnonzero((calls.stop >= 0) | (calls.bound >= 0))
        stop = calls.stop[waits]
        after = np.where(np.append(stops.other, -1)[stop] >= 0, np.append(stops.when, 0)[stop] + 1, calls.end[waits])
        known = np.where(self.call_of >= 0, self.launched + 1, self.start).tolist()
        after_which = zip(self.waits.previous.tolist(), self.waits.event.tolist(), strict=True)
        for i, (previous, event) in enumerate(after_which):
            if previous >= 0 and known[previous] > known[i]:
                known[i] = known[previous]
            if event >= 0 and known[event] > known[i]:
                known[i] = known[event]
        time = [calls.start, np.maximum(calls.end[waits], after), np.array(known, dtype=np.int64)]
        what = np.repeat([_BEGIN, _END, _WORK], [len(part) for part in time])
        which = np.concatenate([np.arange(len(calls.start)), waits, np.arange(len(self.start))])
        order = np.lexsort((which, what, np.concatenate(time)))
        return list(zip(what[order].tolist(), which[order].tolist(), strict=True))

    def overfills(self, run: Run, queue: Queue, scale: np.ndarray | None) -> bool:
        """Whether launch calls returned in a run while a queue held more than it can."""
        rows, first = np.unique(self.waits.launch[queue.order], return_index=True)
        call = self.call_of[queue.order[first]][np.searchsorted(rows, queue.calls)]
        length = (self.end - self.start)[queue.order] * (1.0 if scale is None else scale[queue.order])
        begins = np.sort(np.array(run.done)[queue.order] - length)
        bound = queue.bound >= 0
        free = begins[np.searchsorted(queue.order, queue.bound[bound])]
        return bool((np.array(run.left)[call[bound]] < free - 1).any())

    # --- running it ---

    def run(self, change: Change | None = None, *, usual: bool = False) -> Run:
        change, calls = change or Change(), self.calls
        length = (self.end - self.start).astype(float)
        durations = (length if change.scale is None else length * change.scale).tolist()
        rests = self.mean_rest if usual else self.rest
        by_stream, by_event = rests[Held.STREAM], rests[Held.EVENT]
        by_launch = rests[Held.LAUNCH] if change.launching else [0.0] * len(durations)
        call_of, previous, event = self.call_of.tolist(), self.waits.previous.tolist(), self.waits.event.tolist()
        measured = (self.start - self.trace.span[0]).tolist()  # floats from 1970 on would be exact to 256 ns only
        gap = (self.kept if not change.launching else self.gap if change.loading else self.gap - self.loading).tolist()
        costs = change.launching | ~calls.launches
        lasts = np.where(costs & (calls.stop < 0), calls.end - calls.start, 0).astype(float).tolist()
        stops, thread, bound = calls.stop.tolist(), calls.thread.tolist(), calls.bound.tolist()
        queue, queue_of, at_return = calls.queue.tolist(), self.queue_of.tolist(), self.at_return.tolist()
        # When work begins that was launched into each queue; the last list, at -1, is of work in no queue.
        in_queue: list[list[float]] = [[] for _ in range(len(self.queues) + 1)]
        # The last element, at -1, stands for what is unknown: it holds nothing up.
        begun, left = [_NEVER] * (len(gap) + 1), [_NEVER] * (len(gap) + 1)
        began, done = [_NEVER] * (len(durations) + 1), [_NEVER] * (len(durations) + 1)
        host = dict.fromkeys(self.host_threads, 0.0)
        for what, i in self.order:
            if what == _WORK:
                ready = (left if at_return[i] else begun)[call_of[i]] + by_launch[i]
                if (at := done[previous[i]] + by_stream[i]) > ready:
                    ready = at
                if (at := done[event[i]] + by_event[i]) > ready:
                    ready = at
                began[i] = begins = measured[i] if ready == _NEVER else ready
                done[i] = begins + durations[i]
                if queue_of[i] >= 0:
                    insort(in_queue[queue_of[i]], begins)
            elif what == _BEGIN:
                begun[i] = begins = host[thread[i]] + gap[i]
                left[i] = host[thread[i]] = begins + lasts[i]
            else:
                returns = left[i]
                launched = in_queue[queue[i]]
                if stops[i] >= 0:
                    returns = self._returns(i, begun, change, usual, began, done, left, launched)
                if change.launching and 0 <= bound[i] < len(launched):
                    returns = max(returns, launched[bound[i]])
                left[i] = host[thread[i]] = returns
        return Run(self, left, done[:-1])

    def _returns(
        self,
        call: int,
        begun_of: list[float],
        change: Change,
        usual: bool,
        began: list[float],
        done: list[float],
        left: list[float],
        in_queue: list[float],
    ) -> float:
        stops, calls, k = self.stops, self.calls, int(self.calls.stop[call])
        took, begun, why, met = float(calls.end[call] - calls.start[call]), begun_of[call], stops.why[k], stops.met[k]
        after = max(float(stops.end[k] - stops.when[k]), 0.0) if met else min(self.low_return, took)
        if why == Why.THREAD:
            mark = self.mark.get((int(stops.other[k]), int(stops.when[k])))
            return max(begun, (left[mark] if mark is not None else begun) + after)
        if usual and met and why == Why.SYNC:
            after = min(after, 10 * self.usual_return)
        own = min(took, after if why != Why.SLOT else self.usual_call[bool(calls.graph[call])]) if met else took
        returns = begun + (own if change.launching or not calls.launches[call] else 0.0)
        freed = int(calls.freed[call])
        if why == Why.SLOT and 0 <= freed < len(in_queue):
            return max(returns, in_queue[freed] + after) if change.launching else returns
        times = began if stops.begins[k] else done
        for work in self.last_work[k] if (change.launching if why == Why.SLOT else change.blocking) else ():
            launch = int(self.call_of[work])
            if launch < 0 or begun_of[launch] <= begun:
                returns = max(returns, times[work] + after)
        return returns


@dataclass(frozen=True, eq=False)
class Run:
    """What came out of one run, ns from the trace's start: when each call returned, each piece of work was done."""

    replay: Replay
    left: list[float]
    done: list[float]
    ends: dict[int, tuple[Ints, np.ndarray]] = field(default_factory=dict)

    def _by_end(self, thread: int) -> tuple[Ints, np.ndarray]:
        """Ends in the trace in order, and when all work up to each was done in this run: of work that the thread and
        those of its backward launched, or of all work (-1)."""
        if thread in self.ends:
            return self.ends[thread]
        replay = self.replay
        if thread >= 0:
            group = [thread, *autograd_threads(replay.trace)]
            call = replay.call_of
            mine = (call < 0) | np.isin(replay.calls.thread[call], group)
        else:
            mine = np.ones(len(replay.end), dtype=bool)
        order = np.flatnonzero(mine)[np.argsort(replay.end[mine], kind="stable")]
        self.ends[thread] = replay.end[order], np.maximum.accumulate(np.array(self.done)[order])
        return self.ends[thread]

    def settled(self, time: int, thread: int = -1) -> float:
        """When all is over that was over by `time` in the trace: a thread that marks it, with the device work of its
        steps, or all threads and all work (-1)."""
        marks = self.replay.mark
        if thread >= 0:
            times = self.replay.step_times
            host = self.left[marks[thread, times[max(bisect_right(times, time) - 1, 0)]]]
        else:
            host = max((self.left[i] for (_, at), i in marks.items() if at <= time), default=0.0)
        ends, over = self._by_end(thread)
        at = int(np.searchsorted(ends, time, side="right")) - 1
        return max(host, float(over[at])) if at >= 0 else host
