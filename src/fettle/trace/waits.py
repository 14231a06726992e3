"""What each piece of device work waited for before it began: one answer for idle causes, critical path and what-if.

Work begins when its launch has arrived, the work before it on its stream has ended, and the work of another stream that
it waits for, if any, has ended. The latest of the three held it; what passes between that moment and its begin has a
cause of its own: the usual gap or latency, or one that nothing in the trace explains.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from fettle.trace.kinds import Kind, is_graph_launch
from fettle.trace.model import Bools, Ints, Trace, per_trace
from fettle.trace.ordering import order_by
from fettle.trace.stacks import CAUSES_OF_HOST

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


class Held(IntEnum):
    """What the work had been waiting for at last."""

    NOTHING = 0  # no launch, and nothing before it
    LAUNCH = 1
    STREAM = 2
    EVENT = 3


@dataclass(frozen=True)
class Waits:
    """Of each piece of device work, by its position in `trace.device_rows`; positions of others likewise, -1 for none.

    `called` is the launch call's begin, not after the work's (-1: no known launch, nor one before which it must be).
    Nothing known held the work any more from `since` on; `cause` (a number in the order of `CAUSES`) is that of the
    time from then to its begin.
    """

    launch: Ints
    called: Ints
    previous: Ints
    event: Ints
    held: npt.NDArray[np.uint8]
    since: Ints
    cause: npt.NDArray[np.uint8]

    def source(self) -> Ints:
        """The work that held each piece; -1 where it was a launch, or nothing."""
        held: Ints = np.where(
            self.held == Held.STREAM, self.previous, np.where(self.held == Held.EVENT, self.event, -1)
        )
        return held


@per_trace
def device_waits(trace: Trace) -> Waits:
    """Find out for all device work at once."""
    rows = trace.device_rows
    start, end = trace.ts[rows], trace.end[rows]
    launch = trace.launches.launch_rows
    linked = launch >= 0
    at = np.maximum(launch, 0)
    if not len(rows):
        nothing = np.zeros(0, dtype=np.int64)
        none = np.zeros(0, dtype=np.uint8)
        return Waits(launch, nothing, nothing, nothing, none, nothing, none)
    called = np.where(linked, np.minimum(trace.ts[at], start), -1)
    arrived = np.where(linked, np.minimum(trace.end[at], start), -1)
    key, order = _by_stream(trace, rows)
    previous = _previous(key, order)
    free = np.where(previous >= 0, np.minimum(end[np.maximum(previous, 0)], start), -1)
    # Streams keep their order: what was launched before work that had been launched early had been launched as well.
    by_then = _launched_by(called, key, order)
    called = np.where(linked, called, np.where(by_then >= 0, np.minimum(by_then, start), -1))
    in_call = linked & (trace.end[at] > start)
    # Work that its stream had not held for long tells the usual latency; work that was launched before, the usual gap.
    latency = min(_usual(start - arrived, linked & (free < called)), LATENCY_NS)
    gap = min(_usual(start - free, linked & (previous >= 0) & (free > arrived)), BETWEEN_KERNELS_NS)
    close = (free > arrived) & (start - free <= 2 * gap)
    on_stream = (previous >= 0) & (close | (free + gap >= arrived + latency) | (in_call & (free >= called)))
    on_stream &= linked | ((called >= 0) & (called <= free))
    held = np.where(on_stream, Held.STREAM, np.where(linked, Held.LAUNCH, Held.NOTHING)).astype(np.uint8)
    since = np.where(on_stream, free, np.where(linked, arrived, np.maximum(free, 0)))
    since = np.where((held == Held.NOTHING) & (previous < 0), start, since)
    event, told = _told_events(trace, rows, key)
    asked = _asked_to_wait(trace, rows, launch, previous)
    event = _asked_events(start, end, key, called, linked, event, asked & ~told)
    by = np.where(linked, trace.column("thread")[at], -1)
    event = _guessed_events(start, end, since, held, event, told, asked, by, max(EVENT_WAIT_NS, 3 * latency))
    ends = np.where(event >= 0, np.minimum(end[np.maximum(event, 0)], start), -1)
    on_event = (event >= 0) & (ends > since)
    held[on_event] = Held.EVENT
    since = np.where(on_event, ends, since)
    cause = _causes(trace, rows, since, held, previous, launch, asked | told)
    return Waits(launch, called, previous, event, held, since, cause)


def _usual(passed: Ints, some: Bools) -> int:
    """What usually passes, ns: the lower quartile; 0 where that is of too few."""
    return int(np.percentile(passed[some], 25)) if some.sum() >= 5 else 0


def _by_stream(trace: Trace, rows: Ints) -> tuple[Ints, Ints]:
    """A number for each piece's device and stream, and the order by that and by start."""
    device, stream = trace.column("device")[rows].astype(np.int64), trace.column("stream")[rows]
    pairs = device * 2**40 + stream % 2**40
    key = np.unique(pairs, return_inverse=True)[1].astype(np.int64)
    return key, order_by(key, np.arange(len(rows), dtype=np.int64))


def _previous(key: Ints, order: Ints) -> Ints:
    """The work before each piece on its stream."""
    previous = np.full(len(key), -1, dtype=np.int64)
    same = key[order[1:]] == key[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _launched_by(called: Ints, key: Ints, order: Ints) -> Ints:
    """The earliest launch of what comes later on each piece's stream; -1 where none is known."""
    far = np.iinfo(np.int64).max
    times = np.where(called[order] >= 0, called[order], far)[::-1]
    answer = np.empty(len(key), dtype=np.int64)
    edges = np.flatnonzero(np.diff(key[order][::-1], prepend=-1))
    for low, high in zip(edges.tolist(), [*edges[1:].tolist(), len(times)], strict=True):
        answer[order[::-1][low:high]] = np.minimum.accumulate(times[low:high])
    return np.where(answer == far, -1, answer)


def _told_events(trace: Trace, rows: Ints, key: Ints) -> tuple[Ints, Bools]:
    """What sync events say: the work on another stream behind whose event the work was queued."""
    event, told = np.full(len(rows), -1, dtype=np.int64), np.zeros(len(rows), dtype=bool)
    table = trace.side["syncs"]
    waits = table.filter(table["sync"].str.contains("Wait")) if table.height else table
    if not waits.height:
        return event, told
    correlation, stream, device = trace.column("correlation"), trace.column("stream"), trace.column("device")
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & (correlation > 0))
    time_of = dict(zip(correlation[calls].tolist(), trace.ts[calls].tolist(), strict=True))
    launched = np.where(trace.launches.launch_rows >= 0, trace.ts[np.maximum(trace.launches.launch_rows, 0)], -1)
    by_call = np.argsort(launched, kind="stable")
    by_call = by_call[launched[by_call] >= 0]
    lanes: dict[tuple[int, int], Ints] = {}
    for one in np.unique(key[by_call]).tolist():
        mine = by_call[key[by_call] == one]
        lanes[int(device[rows[mine[0]]]), int(stream[rows[mine[0]]])] = mine
    for row, other, record in waits.select("row", "wait_on_stream", "wait_on_record").iter_rows():
        waited, recorded = time_of.get(int(correlation[row])), time_of.get(record)
        mine, source = lanes.get((int(device[row]), int(stream[row]))), lanes.get((int(device[row]), other))
        if waited is None or recorded is None or mine is None or source is None:
            continue
        to = int(np.searchsorted(launched[mine], waited))
        before = int(np.searchsorted(launched[source], recorded)) - 1
        if to < len(mine) and before >= 0:
            event[mine[to]], told[mine[to]] = source[before], True
    return event, told


def _asked_to_wait(trace: Trace, rows: Ints, launch: Ints, previous: Ints) -> Bools:
    """Whether the host made the stream wait for an event between the launch before this one on the stream and it."""
    answer = np.zeros(len(rows), dtype=bool)
    waits = np.array(["StreamWaitEvent" in n for n in trace.names], dtype=bool)
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & waits[trace.column("name")])
    if not len(calls):
        return answer
    thread = trace.column("thread")
    before = np.where(previous >= 0, launch[np.maximum(previous, 0)], -1)
    since = np.where(before >= 0, trace.ts[np.maximum(before, 0)], trace.span[0])
    for one in np.unique(thread[launch[launch >= 0]]):
        times = np.sort(trace.ts[calls[thread[calls] == one]])
        mine = np.flatnonzero((launch >= 0) & (thread[np.maximum(launch, 0)] == one))
        until = trace.ts[launch[mine]]
        answer[mine] = np.searchsorted(times, until) > np.searchsorted(times, np.minimum(since[mine], until))
    return answer


def _asked_events(start: Ints, end: Ints, key: Ints, called: Ints, linked: Bools, event: Ints, asked: Bools) -> Ints:
    """Where a wait was asked for and nobody says for what: the work that was launched last on another stream, if it was
    done by then.
    """
    by_call = np.flatnonzero(linked)
    by_call = by_call[np.argsort(called[by_call], kind="stable")]
    if not asked.any():
        return event
    changes = np.flatnonzero(key[by_call[1:]] != key[by_call[:-1]])  # the last of each run of launches on one stream
    run = np.searchsorted(changes, np.arange(len(by_call))) - 1
    other = np.full(len(start), -1, dtype=np.int64)
    other[by_call[run >= 0]] = by_call[changes[run[run >= 0]]]
    take = asked & (other >= 0) & (end[np.maximum(other, 0)] <= start)
    return np.where(take, other, event)


def _guessed_events(
    start: Ints,
    end: Ints,
    since: Ints,
    held: npt.NDArray[np.uint8],
    event: Ints,
    told: Bools,
    asked: Bools,
    by: Ints,
    late_ns: int,
) -> Ints:
    """For work that begins later than stream, launch and known events allow: the work that ended last before it, where
    the host asked for a wait, or where it ended right before.
    """
    by_end = np.argsort(end, kind="stable")
    ends = end[by_end]
    known = np.maximum(since, np.where(event >= 0, end[np.maximum(event, 0)], 0))
    late = np.flatnonzero(~told & (start - known > EVENT_WAIT_NS) & (held != Held.NOTHING))
    at = np.searchsorted(ends, start[late], side="right") - 1
    found = (at >= 0) & (ends[np.maximum(at, 0)] > known[late])
    late, source = late[found], by_end[at[found]]
    near, wait = start[late] - end[source], start[late] - known[late]
    # Where waits for events are in the trace, work that nobody asked to wait is late for reasons of its own.
    mine = by[late] == by[source]
    unasked = ~(asked | told).any() & ((wait > late_ns) | ((near <= 1_000) & (2 * wait > late_ns)))
    by_guess = (mine & ((held[late] != Held.LAUNCH) | unasked)) | (wait > LATENCY_NS)
    take = asked[late] | ((near <= np.minimum(BETWEEN_KERNELS_NS, wait - near)) & by_guess)
    take &= source != late
    event = event.copy()
    event[late[take]] = source[take]
    return event


def _causes(
    trace: Trace, rows: Ints, since: Ints, held: npt.NDArray[np.uint8], previous: Ints, launch: Ints, asked: Bools
) -> npt.NDArray[np.uint8]:
    start = trace.ts[rows]
    wait = start - since
    graph = np.array([is_graph_launch(n) for n in trace.names], dtype=bool)[trace.column("name")[np.maximum(launch, 0)]]
    same_graph = (launch >= 0) & graph & (previous >= 0) & (launch[np.maximum(previous, 0)] == launch)
    short = wait <= BETWEEN_KERNELS_NS
    cause = np.full(len(rows), NUMBER["queued_unknown"], dtype=np.uint8)
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
    """Disjoint stretches in order in which some thread was in a call that blocks: start, end, row of the call. They are
    the cause of what would be `queued_unknown` meanwhile.
    """
    cause = trace.stacks.cause == CAUSES_OF_HOST.index("blocking_call")
    calls = np.flatnonzero((trace.kind == Kind.RUNTIME) & cause & (trace.dur > 0))
    calls = calls[np.argsort(trace.ts[calls], kind="stable")]
    end = trace.end[calls]
    start = np.maximum(trace.ts[calls], np.concatenate([trace.ts[calls][:1], np.maximum.accumulate(end)[:-1]]))
    keep = end > start
    return start[keep], end[keep], calls[keep]
