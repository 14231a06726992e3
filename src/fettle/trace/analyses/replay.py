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
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fettle.trace.analyses.slots import queues
from fettle.trace.analyses.stacks import CAUSES_OF_HOST, host_stacks
from fettle.trace.analyses.steps import step_thread, step_windows
from fettle.trace.analyses.stops import Why, autograd_threads, host_stops, main_thread
from fettle.trace.analyses.waits import NUMBER, Held, device_waits
from fettle.trace.intervals import Intervals, length_within, merge
from fettle.trace.kinds import is_graph_launch
from fettle.trace.model import Ints, Trace, per_trace

_UPLOAD = re.compile(r"memcpy\s*(HtoD|H2D|HostToDevice)", re.IGNORECASE)
_WORK, _END, _BEGIN = 0, 1, 2  # at one moment work begins first, then calls end, then others begin


@dataclass(frozen=True)
class Change:
    """What is different: durations of device work by factor (by position in `trace.device_rows`), no call that blocks,
    launches that cost nothing, no time in data loading.
    """

    scale: np.ndarray | None = None
    blocking: bool = True
    launching: bool = True
    loading: bool = True


@dataclass
class _Call:
    """A stretch of a host thread that the replay looks at: a launch, a wait, or both."""

    thread: int
    start: int
    end: int
    gap: float = 0.0  # host time since the call before
    loading: float = 0.0  # of it, data loading
    kept: float = 0.0  # of it, what stays where launches cost nothing
    launches: bool = False
    graph: bool = False
    stop: int = -1  # number of the stop
    queue: int = -1  # the work that must have begun before the call can return


def data_loading(trace: Trace, thread: int) -> Intervals:
    """When a thread was loading data."""
    low, high = trace.span
    start, end, row, _ = host_stacks(trace).over(thread, np.array([low]), np.array([high]))
    if not len(host_stacks(trace).cause):
        return start[:0], end[:0]
    mine = np.where(row >= 0, host_stacks(trace).cause[row], 0) == CAUSES_OF_HOST.index("data_loading")
    return merge(start[mine], end[mine])


@per_trace
def replay_of(trace: Trace) -> Replay:
    """The trace, ready to be run again."""
    return Replay(trace)


class Replay:
    """One trace, run again as often as is asked."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.waits, self.stops = device_waits(trace), host_stops(trace)
        rows = trace.device_rows
        self.start, self.end = trace.ts[rows], trace.end[rows]
        self.work_of: list[list[int]] = []
        self.calls = self._calls()
        self._gaps()
        self._rests()
        self.order = self._order()

    # --- the program ---

    def _calls(self) -> list[_Call]:
        trace, stops, thread = self.trace, self.stops, self.trace.column("thread")
        launch = self.waits.launch
        found: dict[int, _Call] = {}
        rows = np.unique(launch[launch >= 0])
        graphs = np.array([is_graph_launch(name) for name in trace.names], dtype=bool)[trace.column("name")[rows]]
        columns = (column.tolist() for column in (rows, thread[rows], trace.ts[rows], trace.end[rows], graphs))
        for row, on, start, end, graph in zip(*columns, strict=True):
            found[row] = _Call(on, start, end, launches=True, graph=graph)
        silent = []
        for i in range(len(stops.thread)):
            row = int(stops.row[i])
            if row < 0:
                silent.append(_Call(int(stops.thread[i]), int(stops.start[i]), int(stops.end[i]), stop=i))
            else:
                call = found.setdefault(row, _Call(int(thread[row]), int(trace.ts[row]), int(trace.end[row])))
                call.stop = i
        for queue in queues(trace):
            for row, bound in zip(queue.calls.tolist(), queue.bound.tolist(), strict=True):
                if row in found:
                    found[row].queue = bound
        wanted, marks = self._lasts(), step_thread(trace)
        self.step_times = np.unique(np.concatenate(step_windows(trace))).tolist() if marks >= 0 else []
        wanted |= {(marks, time) for time in self.step_times}
        wanted |= {(int(o), int(w)) for o, w in zip(stops.other, stops.when, strict=True) if o >= 0}
        points = [_Call(one, time, time) for one, time in sorted(wanted)]
        calls = [*found.values(), *silent, *points]
        of_row = [*found, *[-1] * (len(silent) + len(points))]
        at = sorted(
            range(len(calls)),
            key=lambda i: (calls[i].thread, calls[i].start, of_row[i] >= 0 or calls[i].stop >= 0, -calls[i].end),
        )
        number = {of_row[j]: i for i, j in enumerate(at) if of_row[j] >= 0}
        calls = [calls[j] for j in at]
        self.mark = {(c.thread, c.start): i for i, c in enumerate(calls) if c.start == c.end and not c.launches}
        self.call_of = [number.get(row, -1) for row in launch.tolist()]
        self.work_of = [[] for _ in calls]
        for work, at_call in enumerate(self.call_of):
            if at_call >= 0:
                self.work_of[at_call].append(work)
        return calls

    def _lasts(self) -> set[tuple[int, int]]:
        """When each host thread is through."""
        trace = self.trace
        rows = np.flatnonzero(trace.is_host)
        thread = trace.column("thread")[rows]
        return {(int(t), int(trace.end[rows[thread == t]].max())) for t in np.unique(thread)}

    def _gaps(self) -> None:
        """Host time between the calls of each thread; a call inside another counts from where that one ends."""
        uploads = np.array([bool(_UPLOAD.search(n)) for n in self.trace.names], dtype=bool)
        code = self.trace.column("name")[self.trace.device_rows]
        low = self.trace.span[0]
        by_thread: dict[int, list[int]] = {}
        for i, call in enumerate(self.calls):
            by_thread.setdefault(call.thread, []).append(i)
        self.host_threads = list(by_thread)
        for thread, mine in by_thread.items():
            reach, starts, stops = low, [], []
            for i in mine:
                call = self.calls[i]
                call.start = max(call.start, reach)
                lasting = call.launches or call.stop >= 0
                call.end = max(call.end, call.start + lasting)
                starts.append(reach)
                stops.append(call.start)
                reach = call.end
            # Data loading stays where launches cost nothing, and so does what may make the data of an upload.
            before, until = np.array(starts, dtype=np.int64), np.array(stops, dtype=np.int64)
            loading = np.zeros(len(mine))
            if thread == main_thread(self.trace):
                loading = length_within(data_loading(self.trace, thread), before, until).astype(float)
            for i, gap, load in zip(mine, (until - before).tolist(), loading.tolist(), strict=True):
                call = self.calls[i]
                call.gap, call.loading = float(gap), load
                feeds = any(uploads[code[w]] for w in self.work_of[i])
                call.kept = float(gap) if feeds else load

    def _rests(self) -> None:
        """What passed after the last reason of each wait, and what usually passes after each sort."""
        waits, start = self.waits, self.start
        rest = (start - waits.since).astype(float)
        # Work whose launch nobody knows comes after what was before it, as long after as it did.
        held = np.where((waits.held == Held.NOTHING) & (waits.previous >= 0), Held.STREAM, waits.held)
        known = ~np.isin(waits.cause, [NUMBER["queued_unknown"], NUMBER["unlinked"]])
        begun = np.array([self.calls[c].start if c >= 0 else 0 for c in self.call_of], dtype=np.int64)
        after_launch = np.maximum(start - begun, 0).astype(float)
        free = self.end[np.maximum(waits.previous, 0)]
        event_end = self.end[np.maximum(waits.event, 0)]
        room = {
            Held.LAUNCH: after_launch,
            Held.STREAM: np.maximum(start - free, 0).astype(float),
            Held.EVENT: np.maximum(start - event_end, 0).astype(float),
        }
        has = {
            Held.LAUNCH: np.array([c >= 0 for c in self.call_of], dtype=bool),
            Held.STREAM: waits.previous >= 0,
            Held.EVENT: waits.event >= 0,
        }
        self.rest, self.mean_rest = {}, {}
        in_call = np.where(held == Held.LAUNCH, after_launch - rest, 0.0)  # the call itself is host time, as measured
        for sort in (Held.LAUNCH, Held.STREAM, Held.EVENT):
            measured = rest[(held == sort) & known]
            low, mean = (float(np.percentile(measured, 25)), float(measured.mean())) if len(measured) else (1e3, 1e3)
            if sort == Held.LAUNCH:
                low += float(np.percentile(in_call[held == sort], 25)) if (held == sort).any() else 0.0
            other = np.minimum(low, room[sort])
            self.rest[sort] = np.where(has[sort], np.where(held == sort, room[sort], other), -1.0).tolist()
            explained = np.where(held == sort, in_call + mean, other)
            self.mean_rest[sort] = np.where(has[sort], explained, -1.0).tolist()
        stops = self.stops
        late = np.maximum(stops.end - stops.when, 0).astype(float)
        usual = late[stops.met & (stops.why != Why.THREAD)]
        self.usual_return = float(usual.mean()) if len(usual) else 0.0
        self.low_return = float(np.percentile(usual, 25)) if len(usual) else 0.0
        self.last_work = [[int(work)] for work in stops.work]
        for k in np.flatnonzero(stops.whole & (stops.work >= 0)).tolist():
            self.last_work[k] += self._ended(int(stops.end[k]))
        self.usual_call = {False: 5_000.0, True: 5_000.0}  # of graphs apart
        for graph in self.usual_call:
            lasts = [c.end - c.start for c in self.calls if c.launches and c.stop < 0 and c.graph == graph]
            if lasts:
                self.usual_call[graph] = float(np.median(lasts))

    @cached_property
    def _lanes(self) -> list[tuple[Ints, Ints]]:
        """By stream: positions of its work, and the latest end so far."""
        key = self.trace.lane(self.trace.device_rows)
        lanes = [np.flatnonzero(key == one) for one in np.unique(key)]
        return [(lane, np.maximum.accumulate(self.end[lane])) for lane in lanes]

    def _ended(self, time: int) -> list[int]:
        """The last work of each stream that was over by then."""
        found = [(lane, int(np.searchsorted(ends, time, side="right")) - 1) for lane, ends in self._lanes]
        return [int(lane[at]) for lane, at in found if at >= 0]

    def _order(self) -> list[tuple[int, int, int]]:
        events = []
        for i, call in enumerate(self.calls):
            events.append((call.start, _BEGIN, i))
            if call.end > call.start:
                after = (
                    int(self.stops.when[call.stop]) + 1 if call.stop >= 0 and self.stops.other[call.stop] >= 0 else 0
                )
                events.append((max(call.end, after), _END, i))
        for work, launch in enumerate(self.call_of):
            begun = self.calls[launch].start + 1 if launch >= 0 else 0
            events.append((max(int(self.start[work]), begun), _WORK, work))
        events.sort()
        return events

    # --- running it ---

    def run(self, change: Change | None = None, *, usual: bool = False) -> Run:
        """Run it with a change."""
        change = change or Change()
        length = (self.end - self.start).astype(float)
        durations = (length if change.scale is None else length * change.scale).tolist()
        rests = self.mean_rest if usual else self.rest
        by_launch, by_stream, by_event = (rests[s] for s in (Held.LAUNCH, Held.STREAM, Held.EVENT))
        previous, event = self.waits.previous.tolist(), self.waits.event.tolist()
        measured = (self.start - self.trace.span[0]).tolist()  # floats from 1970 on would be exact to 256 ns only
        begun = [0.0] * len(self.calls)
        left = [0.0] * len(self.calls)  # when each call ended
        began: list[float | None] = [None] * len(durations)
        done: list[float | None] = [None] * len(durations)
        host = dict.fromkeys(self.host_threads, 0.0)
        for _, what, i in self.order:
            if what == _WORK:
                call = self.call_of[i]
                ready = begun[call] + (by_launch[i] if change.launching else 0.0) if call >= 0 else None
                before = previous[i]
                if before >= 0 and (at := done[before]) is not None:
                    ready = max(ready or 0.0, at + by_stream[i])
                if (other := event[i]) >= 0 and (at := done[other]) is not None:
                    ready = max(ready or 0.0, at + by_event[i])
                begins = float(measured[i]) if ready is None else ready
                began[i], done[i] = begins, begins + durations[i]
            elif what == _BEGIN:
                one = self.calls[i]
                gap = one.gap if change.loading else one.gap - one.loading
                host[one.thread] += gap if change.launching else one.kept
                begun[i] = left[i] = host[one.thread]
            else:
                one = self.calls[i]
                left[i] = host[one.thread] = self._returns(one, begun, begun[i], change, usual, began, done, left)
        return Run(self, left, [at if at is not None else 0.0 for at in done])

    def _returns(
        self,
        one: _Call,
        begun_of: list[float],
        begun: float,
        change: Change,
        usual: bool,
        began: list[float | None],
        done: list[float | None],
        left: list[float],
    ) -> float:
        """When a call returns."""
        stops, lasts = self.stops, float(one.end - one.start)
        if one.stop < 0:
            returns = begun + (lasts if change.launching or not one.launches else 0.0)
        else:
            k = one.stop
            why = int(stops.why[k])
            after = max(float(stops.end[k] - stops.when[k]), 0.0) if stops.met[k] else min(self.low_return, lasts)
            if why == Why.THREAD:
                mark = self.mark.get((int(stops.other[k]), int(stops.when[k])))
                return max(begun, (left[mark] if mark is not None else begun) + after)
            if usual and stops.met[k] and why == Why.SYNC:
                after = min(after, 10 * self.usual_return)
            own = min(lasts, after if why != Why.SLOT else self.usual_call[one.graph]) if stops.met[k] else lasts
            returns = begun + (own if change.launching or not one.launches else 0.0)
            times = began if stops.begins[k] else done
            for work in self.last_work[k] if (change.launching if why == Why.SLOT else change.blocking) else ():
                launch = self.call_of[work]
                if (at := times[work]) is not None and (launch < 0 or begun_of[launch] <= begun):
                    returns = max(returns, at + after)
        if one.queue >= 0 and change.launching and (at := began[one.queue]) is not None:
            returns = max(returns, at)
        return returns


@dataclass(frozen=True, eq=False)
class Run:
    """What came out of one run, ns from the trace's start: when each call returned, each piece of device work was
    done.
    """

    replay: Replay
    left: list[float]
    done: list[float]
    ends: dict[int, tuple[Ints, np.ndarray]] = field(default_factory=dict)

    def _by_end(self, thread: int) -> tuple[Ints, np.ndarray]:
        """Ends in the trace in order, and when all work up to each was done in this run: of work that the thread and
        those of its backward launched, or of all work (-1).
        """
        if thread in self.ends:
            return self.ends[thread]
        replay = self.replay
        if thread >= 0:
            group = {-1, thread, *autograd_threads(replay.trace)}
            mine = np.array([c < 0 or replay.calls[c].thread in group for c in replay.call_of], dtype=bool)
        else:
            mine = np.ones(len(replay.end), dtype=bool)
        order = np.flatnonzero(mine)[np.argsort(replay.end[mine], kind="stable")]
        self.ends[thread] = replay.end[order], np.maximum.accumulate(np.array(self.done)[order])
        return self.ends[thread]

    def settled(self, time: int, thread: int = -1) -> float:
        """When everything is over that was over by `time` in the trace: a thread that marks it, with the device work of
        its steps, or all threads and all work (-1).
        """
        marks = self.replay.mark
        if thread >= 0:
            times = self.replay.step_times
            host = self.left[marks[thread, times[max(bisect_right(times, time) - 1, 0)]]]
        else:
            host = max((self.left[i] for (_, at), i in marks.items() if at <= time), default=0.0)
        ends, over = self._by_end(thread)
        at = int(np.searchsorted(ends, time, side="right")) - 1
        return max(host, float(over[at])) if at >= 0 else host
