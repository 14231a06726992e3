"""What each piece of device work waited for before it began: one answer for idle causes, critical path and what-if.

Work begins when its launch has arrived, the work before it on its stream has ended, and the work of another stream that
it waits for, if any, has ended. The latest of the three held it; what passes between that moment and its begin has a
cause of its own: the usual gap or latency, or one that nothing in the trace explains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import polars as pl

from fettle.trace.analyses.launches import launch_rows
from fettle.trace.analyses.stacks import CAUSES_OF_HOST, host_stacks
from fettle.trace.analyses.stops import autograd_threads, main_thread
from fettle.trace.intervals import in_turn
from fettle.trace.kinds import Kind, is_graph_launch
from fettle.trace.model import Bools, Ints, Trace, per_trace
from fettle.trace.ordering import in_groups, order_by

CAUSES: dict[str, str] = {
    "operator": "the host was inside an operator (its overhead, not a call to the device)",
    "python": "the host ran Python code",
    "runtime_call": "another call to the device's runtime",
    "launch_call": "the launch call itself",
    "full_queue": "a launch call waited for a slot in a full queue: until the work that is named began",
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
NUMBER = {cause: i for i, cause in enumerate(CAUSES)}
BETWEEN_KERNELS_NS = 30_000
LATENCY_NS = 100_000
EVENT_WAIT_NS = 2_000
FEWEST, MANY = 5, 20
"""Pieces of work from which a usual time is read; with fewer than many, up to twice the median is usual."""


class Held(IntEnum):
    """What the work had been waiting for at last."""

    NOTHING = 0  # no launch, and nothing before it
    LAUNCH = 1
    STREAM = 2
    EVENT = 3


@dataclass(frozen=True)
class Waits:
    """What device work waited for, by its position in `trace.device_rows`; positions of others likewise, -1 for none.

    `called` is the launch call's begin, not after the work's (-1: no known launch, nor one before which it must be).
    Nothing known held the work any more from `since` on; `cause` (a number in the order of `CAUSES`) is that of the
    time from then to its begin. Where another reason may as well have been the last one, as the work began within its
    usual time too, `rival` is that and `rival_since` when it let go; `Held.NOTHING` elsewhere.
    """

    launch: Ints
    called: Ints
    previous: Ints
    event: Ints
    held: npt.NDArray[np.uint8]
    since: Ints
    cause: npt.NDArray[np.uint8]
    rival: npt.NDArray[np.uint8]
    rival_since: Ints

    def preferring(self, sort: Held) -> Waits:
        """The same, with a rival of this sort taken for the reason that held the work."""
        mine = self.rival == sort
        causes = {Held.LAUNCH: "launch_latency", Held.STREAM: "between_kernels", Held.EVENT: "stream_event"}
        return replace(
            self,
            held=np.where(mine, self.rival, self.held),
            since=np.where(mine, self.rival_since, self.since),
            cause=np.where(mine, np.uint8(NUMBER[causes[sort]]), self.cause),
        )

    def source(self) -> Ints:
        """The work that held each piece; -1 where it was a launch, or nothing."""
        return np.select([self.held == Held.STREAM, self.held == Held.EVENT], [self.previous, self.event], -1)


@per_trace
def device_waits(trace: Trace) -> Waits:
    """Find out for all device work at once."""
    rows = trace.device_rows
    start, end = trace.ts[rows], trace.end[rows]
    launch = launch_rows(trace)
    linked, at = launch >= 0, np.maximum(launch, 0)

    def ended_of(work: Ints) -> Ints:
        return np.where(work >= 0, np.minimum(end[np.maximum(work, 0)], start), -1)

    called = np.where(linked, np.minimum(trace.ts[at], start), -1)
    arrived = np.where(linked, np.minimum(trace.end[at], start), -1)
    key = trace.lane(rows)
    previous, by_then = _along_streams(key, order_by(key, np.arange(len(rows), dtype=np.int64)), called)
    free = ended_of(previous)
    # Streams keep their order: what was launched before work that had been launched early had been launched as well.
    called = np.where(linked, called, np.minimum(by_then, start))
    event, exact = _recorded_events(trace, rows, key)
    asked = _asked_to_wait(trace, launch)
    by = _launchers(trace, launch)
    event = _asked_events(start, end, key, called, by, event, asked & ~exact)
    in_call = linked & (trace.end[at] > start) & (previous >= 0) & (free >= called)
    reasons = {
        Held.LAUNCH: _Reason(arrived, linked & ~in_call),
        Held.STREAM: _Reason(free, (previous >= 0) & (linked | ((called >= 0) & (called <= free)))),
        Held.EVENT: _Reason(ended_of(event), event >= 0),
    }
    graph = trace.named(is_graph_launch, at)
    same_graph = linked & graph & (previous >= 0) & (launch[np.maximum(previous, 0)] == launch)
    usual = _usual_waits(start, called, reasons, asked | exact | _after_others(start, end, key, arrived), same_graph)
    calls = trace.column("name")[at].astype(np.int64)
    inside, idle = linked & (trace.end[at] > start), linked & (free < called)
    passed = _until_begin(start - called, calls, inside, idle) - usual[Held.LAUNCH].low
    sent = called + np.floor(passed).astype(np.int64)  # clocks since 1970 do not fit into a float64
    arrived = np.where(in_call, np.clip(sent, called, start), arrived)
    reasons[Held.LAUNCH] = _Reason(arrived, linked)
    held, since, rival, rival_since = _last_reason(start, reasons, usual)
    since = np.where((held == Held.NOTHING) & (previous >= 0), np.maximum(free, 0), since)
    most = np.array([usual[sort].late if sort in usual else 0.0 for sort in Held])
    late = ~exact & (start - since > np.maximum(most[held], EVENT_WAIT_NS))
    late_ns = max(EVENT_WAIT_NS, 3 * usual[Held.LAUNCH].low * usual[Held.LAUNCH].known)
    event = _guessed_events(start, end, key, since, held, event, late, asked | exact, by, late_ns)
    ended = ended_of(event)
    guessed = (event >= 0) & (reasons[Held.EVENT].since != ended) & (ended > since)
    held[guessed] = Held.EVENT
    rival[guessed] = Held.NOTHING
    since = np.where(guessed, ended, since)
    cause = _causes(start - since, held, graph, same_graph, asked | exact)
    return Waits(launch, called, previous, event, held, since, cause, rival, rival_since)


@dataclass(frozen=True)
class _Reason:
    """When one sort of reason let each piece of work begin at the earliest, and for which pieces there is one."""

    since: Ints
    there: Bools


@dataclass(frozen=True)
class _Usual:
    """What passes between one sort of reason and the begin, ns: the shortest, the longest that may be usual, and from
    when on work is late; `known` where that was read from work with no other reason."""

    low: float
    high: float
    late: float
    known: bool


def _after_others(start: Ints, end: Ints, key: Ints, arrived: Ints) -> Bools:
    """Whether work of another stream ended right before, after the launch: a wait that does not show, or chance."""
    by_end = np.argsort(end, kind="stable")
    at = np.searchsorted(end[by_end], start, side="right") - 1
    last = by_end[np.maximum(at, 0)]
    found: Bools = (at >= 0) & (key[last] != key) & (end[last] > arrived) & (start - end[last] <= EVENT_WAIT_NS)
    return found


def _usual_waits(
    start: Ints, called: Ints, reasons: dict[Held, _Reason], asked: Bools, same_graph: Bools
) -> dict[Held, _Usual]:
    """What passes between each reason and the begin, ns: the shortest, and the longest that is usual. They are read
    from work whose other reasons were long gone; where there is none, from the shortest that occurs. Inside a graph
    work follows sooner than it does where each piece has a launch of its own.
    """
    launch, stream, event = reasons[Held.LAUNCH], reasons[Held.STREAM], reasons[Held.EVENT]
    alone = launch.there & ~asked & (stream.since < called)
    usual = {Held.LAUNCH: _range(start - launch.since, alone, launch.there, LATENCY_NS)}
    gone = launch.since + usual[Held.LAUNCH].high
    alone = stream.there & ~asked & ~same_graph & (stream.since > gone)
    usual[Held.STREAM] = _range(start - stream.since, alone, stream.there, BETWEEN_KERNELS_NS)
    alone = event.there & (event.since > np.maximum(gone, stream.since + usual[Held.STREAM].high))
    usual[Held.EVENT] = _range(start - event.since, alone, event.there, BETWEEN_KERNELS_NS)
    return usual


def _until_begin(passed: Ints, calls: Ints, inside: Bools, idle: Bools) -> npt.NDArray[np.float64]:
    """For work that begins `inside` its own launch call, which does not show when it was sent: what passes at least
    from the begin of such a call (by name) to the work's, ns. It is read where the stream was `idle` by then; where it
    never was, no more than after other launch calls.
    """
    others = passed[idle & ~inside & (passed <= LATENCY_NS)]
    most = float(np.median(others)) if len(others) else 0.0
    least = np.zeros(len(passed))
    within = np.flatnonzero(inside)
    for _, at in in_groups(calls[within]):
        mine = within[at]
        alone = mine[idle[mine]]
        if len(alone) < len(mine):
            least[mine] = np.percentile(passed[alone], 10) if len(alone) else min(passed[mine].min(), most)
    return least


def _range(passed: Ints, alone: Bools, there: Bools, most: int) -> _Usual:
    """The shortest and the longest usual time, of those below `most` with no other reason; else the shortest of all."""
    alone = alone & (passed <= most)
    if alone.sum() < FEWEST:
        shortest = float(min(passed[there].min(initial=most), most))
        return _Usual(shortest, 3 * shortest, 0.0, known=False)
    low, middle, high = (float(value) for value in np.percentile(passed[alone], [10, 50, 90]))
    most_usual = min(2 * middle, 3 * low + EVENT_WAIT_NS)  # what takes longer has a reason that the trace does not show
    high = min(high, most_usual)
    late = high + (high - low) / 2
    return _Usual(low, max(late, most_usual) if alone.sum() < MANY else late, late, known=True)


def _last_reason(
    start: Ints, reasons: dict[Held, _Reason], usual: dict[Held, _Usual]
) -> tuple[npt.NDArray[np.uint8], Ints, npt.NDArray[np.uint8], Ints]:
    """Which reason held each piece last, and until when: of those after which it begins within the usual time the one
    that leaves the least unexplained, else of all. Then the next best of the former, its rival, likewise."""
    sorts = np.array([*reasons, Held.NOTHING], dtype=np.uint8)
    since = np.array([*(reason.since for reason in reasons.values()), start])
    there = np.array([reason.there for reason in reasons.values()])
    beyond = start - since[:-1] - np.array([[usual[sort].low] for sort in reasons])
    unusual = start - since[:-1] > np.array([[usual[sort].high] for sort in reasons])
    far = float(np.abs(beyond).max(initial=0)) + 1
    rank = np.where(there, beyond + far * unusual, 4 * far)
    each = np.arange(len(start))
    best = np.argmin(rank, axis=0)
    ties = (there & ~unusual).sum(axis=0) > 1
    best[~there.any(axis=0)] = len(reasons)
    rank[np.minimum(best, len(reasons) - 1), each] = 4 * far
    second = np.where(ties, np.argmin(rank, axis=0), len(reasons))
    return sorts[best], since[best, each], sorts[second], since[second, each]


def _along_streams(key: Ints, order: Ints, called: Ints) -> tuple[Ints, Ints]:
    """For each piece the work before it on its stream, and the first launch of it and what follows; -1 for none."""
    far = np.iinfo(np.int64).max
    previous, by_then = np.full(len(key), -1, dtype=np.int64), np.where(called >= 0, called, far)
    for mine in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        previous[mine[1:]] = mine[:-1]
        by_then[mine] = np.minimum.accumulate(by_then[mine[::-1]])[::-1]
    return previous, np.where(by_then == far, -1, by_then)


def _recorded_events(trace: Trace, rows: Ints, key: Ints) -> tuple[Ints, Bools]:
    """What sync events say: the work on another stream behind whose event the work was queued."""
    event, exact = np.full(len(rows), -1, dtype=np.int64), np.zeros(len(rows), dtype=bool)
    table = trace.side["syncs"]
    waits = table.filter(pl.Series(["Wait" in sync for sync in table["sync"]], dtype=pl.Boolean()))
    if not waits.height:
        return event, exact
    correlation, stream, device = trace.column("correlation"), trace.column("stream"), trace.column("device")
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & (correlation > 0))
    time_of = dict(zip(correlation[calls].tolist(), trace.ts[calls].tolist(), strict=True))
    launch = launch_rows(trace)
    launched = np.where(launch >= 0, trace.ts[np.maximum(launch, 0)], -1)
    by_call = np.argsort(launched, kind="stable")
    by_call = by_call[launched[by_call] >= 0]
    lanes: dict[tuple[int, int], Ints] = {}
    for _, at in in_groups(key[by_call]):
        lane = by_call[at]
        lanes[int(device[rows[lane[0]]]), int(stream[rows[lane[0]]])] = lane
    for row, other, record in waits.select("row", "wait_on_stream", "wait_on_record").iter_rows():
        waited, recorded = time_of.get(int(correlation[row])), time_of.get(record)
        mine, source = lanes.get((int(device[row]), int(stream[row]))), lanes.get((int(device[row]), other))
        if waited is None or recorded is None or mine is None or source is None:
            continue
        to = int(np.searchsorted(launched[mine], waited))
        before = int(np.searchsorted(launched[source], recorded)) - 1
        if to < len(mine) and before >= 0:
            event[mine[to]], exact[mine[to]] = source[before], True
    return event, exact


def _asked_to_wait(trace: Trace, launch: Ints) -> Bools:
    """Whether the host made a stream, taken for the one that the thread launches on next, wait for an event right
    before it launched this work. Where there are sync events, they know better."""
    answer = np.zeros(len(launch), dtype=bool)
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & trace.named(lambda name: "StreamWaitEvent" in name))
    if not len(calls) or any("Wait" in sync for sync in trace.side["syncs"]["sync"]):
        return answer
    thread = trace.column("thread")
    called, known = dict(in_groups(thread[calls])), np.flatnonzero(launch >= 0)
    for one, at in in_groups(thread[launch[known]]):
        times = np.sort(trace.ts[calls[called.get(one, at[:0])]])
        mine = known[at]
        mine = mine[np.argsort(trace.ts[launch[mine]], kind="stable")]
        before = np.searchsorted(times, trace.ts[launch[mine]])
        answer[mine] = np.diff(before, prepend=0) > 0
    return answer


def _launchers(trace: Trace, launch: Ints) -> Ints:
    """The thread that launched each piece of work, those of the backward as the main one; -1 where nobody knows."""
    thread = trace.column("thread")[np.maximum(launch, 0)].astype(np.int64)
    thread[np.isin(thread, autograd_threads(trace))] = main_thread(trace)
    return np.where(launch >= 0, thread, -1)


def _asked_events(start: Ints, end: Ints, key: Ints, called: Ints, by: Ints, event: Ints, asked: Bools) -> Ints:
    """Where a wait was asked for and nobody says for what: the thread's last work on another stream, if it was done."""
    for _, by_call in in_groups(by):
        by_call = by_call[np.argsort(called[by_call], kind="stable")]
        changes = np.flatnonzero(key[by_call[1:]] != key[by_call[:-1]])  # the last of each run on one stream
        run = np.searchsorted(changes, np.arange(len(by_call))) - 1
        mine, source = by_call[run >= 0], by_call[changes[run[run >= 0]]]
        take = asked[mine] & (end[source] <= start[mine])
        event[mine[take]] = source[take]
    return event


def _guessed_events(
    start: Ints,
    end: Ints,
    key: Ints,
    since: Ints,
    held: npt.NDArray[np.uint8],
    event: Ints,
    late: Bools,
    asked: Bools,
    by: Ints,
    late_ns: float,
) -> Ints:
    """For work that begins later than usual after all known reasons: the work that ended last before it, if on another
    stream, where the host asked for a wait, or where it ended right before."""
    by_end = np.argsort(end, kind="stable")
    ends = end[by_end]
    known = np.maximum(since, np.where(event >= 0, end[np.maximum(event, 0)], 0))
    some = np.flatnonzero(late & (start - known > EVENT_WAIT_NS) & (held != Held.NOTHING))
    at = np.searchsorted(ends, start[some], side="right") - 1
    found = (at >= 0) & (ends[np.maximum(at, 0)] > known[some])
    some, source = some[found], by_end[at[found]]
    near, wait = start[some] - end[source], start[some] - known[some]
    # Where waits for events are in the trace, work that nobody asked to wait is late for reasons of its own.
    mine = by[some] == by[source]
    unasked = ~asked.any() & ((wait > late_ns) | ((near <= 1_000) & (2 * wait > late_ns)))
    by_guess = (mine & ((held[some] != Held.LAUNCH) | unasked)) | (wait > LATENCY_NS)
    take = (asked[some] & mine) | ((near <= np.minimum(BETWEEN_KERNELS_NS, wait - near)) & by_guess)
    take &= key[source] != key[some]
    event = event.copy()
    event[some[take]] = source[take]
    return event


def _causes(
    wait: Ints, held: npt.NDArray[np.uint8], graph: Bools, same_graph: Bools, asked: Bools
) -> npt.NDArray[np.uint8]:
    short = wait <= BETWEEN_KERNELS_NS
    cause = np.full(len(wait), NUMBER["queued_unknown"], dtype=np.uint8)
    cause[held == Held.NOTHING] = NUMBER["unlinked"]
    on_stream, on_event, on_launch = held == Held.STREAM, held == Held.EVENT, held == Held.LAUNCH
    cause[on_stream & short] = NUMBER["between_kernels"]
    cause[on_stream & asked] = NUMBER["stream_event"]
    cause[on_stream & same_graph & (wait <= LATENCY_NS)] = NUMBER["inside_graph"]
    cause[on_event & (short | asked)] = NUMBER["stream_event"]
    cause[on_launch & ((wait <= LATENCY_NS) | graph)] = NUMBER["launch_latency"]
    return cause


@per_trace
def blocking_calls(trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Disjoint stretches in which some thread was in a call that blocks: start, end, row of the call. They cause what
    would be `queued_unknown` meanwhile."""
    cause = host_stacks(trace).cause == CAUSES_OF_HOST.index("blocking_call")
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & cause)
    start, end, which = in_turn(trace.ts[calls], trace.end[calls])
    return start, end, calls[which]
