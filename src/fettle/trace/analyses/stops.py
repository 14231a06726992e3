"""Where host threads waited: for device work, for a slot in a full queue, for one another."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from fettle.trace.analyses.launches import launch_rows, launched_work
from fettle.trace.analyses.slots import doubtful_waits, slot_waits
from fettle.trace.analyses.stacks import CAUSES_OF_HOST, host_stacks
from fettle.trace.intervals import merge
from fettle.trace.kinds import Kind
from fettle.trace.model import Bools, Ints, Trace, per_trace
from fettle.trace.ordering import last_before

# Old versions had no `autograd::engine` range: there the operators themselves show it.
BACKWARD = re.compile(r"^autograd::engine::evaluate_function|Backward\d*$")
_WHOLE_DEVICE = re.compile(r"(Device|Ctx|Context)Synchronize")
CLOCKS_NS = 5_000
"""Work may end this much later than the call that waited for it, as clocks differ."""


class Why(IntEnum):
    """What a host thread waited in."""

    SYNC = 0  # a call that blocks
    COPY = 1  # a copy that makes the host wait for itself
    SLOT = 2  # a launch call, for a slot in a full queue
    THREAD = 3  # silence: for another thread


@dataclass(frozen=True)
class Stops:
    """Stretches in which a host thread waited, in no order; columns of one length.

    A stretch goes from `start` to `end` on `thread`; `row` is the call, -1 where the thread was silent. What it waited
    for came at `when`: the end of device work (`work`, a position in `trace.device_rows`), its begin (where `begins`),
    or another thread (`other`, -1 for none). A call that blocks and met nothing to wait for has a `work` too, and `met`
    is false: with other times it would wait. `whole`: for all work of all streams.
    """

    thread: Ints
    start: Ints
    end: Ints
    row: Ints
    work: Ints
    why: Ints
    begins: Bools
    other: Ints
    when: Ints
    met: Bools
    whole: Bools


@per_trace
def main_thread(trace: Trace) -> int:
    """The thread that runs the steps; else the one that launches most; else the one with most host events; -1: none."""
    thread = trace.column("thread")
    for rows in (
        np.flatnonzero((trace.kind == Kind.ANNOTATION) & trace.named(lambda name: name.startswith("ProfilerStep#"))),
        launched_work(trace)[1],
        np.flatnonzero(trace.is_host),
    ):
        if len(rows):
            return int(np.bincount(thread[rows]).argmax())
    return -1


@per_trace
def autograd_threads(trace: Trace) -> list[int]:
    """Threads that run backward operators."""
    rows = np.flatnonzero((trace.kind == Kind.OPERATOR) & trace.named(BACKWARD.search))
    return [int(t) for t in np.unique(trace.column("thread")[rows])]


@per_trace
def host_stops(trace: Trace, doubtful: bool = False) -> Stops:
    """All of them; where asked, launch calls that may have waited for a slot too."""
    copies = _own_copies(trace)
    rows = [*copies, *_blocking(trace, copies), *_hand_overs(trace)]
    slots = [slot_waits(trace), *([doubtful_waits(trace)] if doubtful else [])]
    calls, freed = (np.concatenate(column) for column in zip(*slots, strict=True))
    begins = trace.ts[trace.device_rows[freed]]
    thread = trace.column("thread")[calls]
    for values in zip(thread, trace.ts[calls], trace.end[calls], calls, freed, begins, strict=True):
        *place, work, when = (int(v) for v in values)
        rows.append((*place, work, Why.SLOT, 1, -1, when, 1, 0))
    table = np.array(rows, dtype=np.int64).reshape(-1, 11)
    columns: list[Ints] = list(table.T)
    where, start, end, call, waited, why, at_begin, other, came, met, whole = columns
    return Stops(where, start, end, call, waited, why, at_begin > 0, other, came, met > 0, whole > 0)


def _own_copies(trace: Trace) -> list[tuple[int, ...]]:
    """Copies that return only when they are done or have begun: pageable memory is staged inside the call."""
    stacks, has = host_stacks(trace), np.flatnonzero(launch_rows(trace) >= 0)
    work, calls = launched_work(trace)
    waited = (stacks.cause[calls] == CAUSES_OF_HOST.index("blocking_call")) & (trace.kind[work] == Kind.MEMCPY)
    waited &= trace.ts[work] < trace.end[calls]
    thread = trace.column("thread")
    stops: list[tuple[int, ...]] = []
    for i in np.flatnonzero(waited).tolist():
        call, start, end = int(calls[i]), int(trace.ts[work[i]]), int(trace.end[work[i]])
        stop = int(trace.end[call])
        place = (int(thread[call]), int(trace.ts[call]), stop, call)
        begins = end > stop
        stops.append((*place, int(has[i]), Why.COPY, int(begins), -1, start if begins else end, 1, 0))
    return stops


def _blocking(trace: Trace, copies: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Calls that block: until the work that ended last inside them, of what had been launched before they began. One
    that waits for a stream, and no sync event says for which, waits for the one that its thread launched on last, if it
    returned as soon as that was through.
    """
    blocking = host_stacks(trace).cause == CAUSES_OF_HOST.index("blocking_call")
    calls = np.flatnonzero(blocking & (trace.kind == Kind.RUNTIME) & (trace.dur > 0))
    copied = {row[3] for row in copies}
    device_rows = trace.device_rows
    if not len(device_rows):
        return []
    end = trace.end[device_rows]
    by_end = np.argsort(end, kind="stable")
    launch = launch_rows(trace)
    called = np.where(launch >= 0, trace.ts[np.maximum(launch, 0)], np.iinfo(np.int64).min)
    by = np.where(launch >= 0, trace.column("thread")[np.maximum(launch, 0)], -1)
    by_call = np.argsort(called, kind="stable")
    whole = trace.named(_WHOLE_DEVICE.search)
    places, correlation, thread = _recorded_places(trace), trace.column("correlation"), trace.column("thread")
    device, stream = trace.column("device")[device_rows].tolist(), trace.column("stream")[device_rows].tolist()
    last_launched = np.searchsorted(called[by_call], trace.ts[calls], side="left") - 1
    last_ended = np.searchsorted(end[by_end], trace.end[calls] + CLOCKS_NS, side="right") - 1
    known = np.flatnonzero(launch >= 0)
    own = np.append(known, -1)[last_before(by[known], called[known], thread[calls], trace.ts[calls] - 1)]
    over = end[own]
    soon = (own >= 0) & (over > trace.ts[calls]) & (over <= trace.end[calls]) & (trace.end[calls] - over <= CLOCKS_NS)
    own = np.where(soon & trace.named(lambda name: "StreamSynchronize" in name, calls), own, -1)

    def lies_on(work: int, on_device: int, on_stream: int) -> bool:
        return on_device in (-1, device[work]) and on_stream in (-1, stream[work])

    stops: list[tuple[int, ...]] = []
    each = (calls.tolist(), last_launched.tolist(), last_ended.tolist(), own.tolist())
    for call, at, ended, latest in zip(*each, strict=True):
        if call in copied:
            continue
        start, stop = int(trace.ts[call]), int(trace.end[call])
        on_device, on_stream = places.get(int(correlation[call]), (-1, -1))
        place = (int(thread[call]), start, stop, call)
        mine, any_one = latest if on_stream < 0 else -1, -1
        while ended >= 0 and end[by_end[ended]] > start and mine < 0:
            work = int(by_end[ended])
            if called[work] <= start and lies_on(work, on_device, on_stream):
                any_one = work if any_one < 0 else any_one
                if on_stream >= 0 or whole[call] or by[work] == thread[call]:
                    mine = work
            ended -= 1
        work = mine if mine >= 0 else any_one  # a stream's synchronising waits for what the thread itself launched
        if work >= 0:
            when = min(int(end[work]), stop)
            stops.append((*place, work, Why.SYNC, 0, -1, when, 1, int(whole[call])))
        else:
            while at >= 0 and not lies_on(int(by_call[at]), on_device, on_stream):
                at -= 1
            if at >= 0 and end[by_call[at]] <= stop:
                stops.append((*place, int(by_call[at]), Why.SYNC, 0, -1, start, 0, int(whole[call])))
    return stops


def _recorded_places(trace: Trace) -> dict[int, tuple[int, int]]:
    """The device and the stream (-1: all of them) that each synchronising call waits for, by correlation number, where
    sync events say so."""
    table = trace.side["syncs"]
    if not table.height:
        return {}
    table = table.filter(table["sync"].str.contains("(Stream|Context) Sync"))
    rows, of_stream = table["row"].to_numpy(), table["sync"].str.contains("Stream Sync").to_numpy()
    stream = np.where(of_stream, trace.column("stream")[rows], -1).tolist()
    places = zip(trace.column("device")[rows].tolist(), stream, strict=True)
    return dict(zip(trace.column("correlation")[rows].tolist(), places, strict=True))


def _hand_overs(trace: Trace) -> list[tuple[int, ...]]:
    """Silence on one of the threads that share the step's work, while another of them works. Without operators these
    are all that launch work, and what is before a thread's first call is silence."""
    stacks, thread_of = host_stacks(trace), trace.column("thread")
    has_operators = bool((trace.kind == Kind.OPERATOR).any())
    sharing = autograd_threads(trace) if has_operators else np.unique(thread_of[launched_work(trace)[1]]).tolist()
    group = sorted({*sharing, main_thread(trace)} - {-1})
    if len(group) < 2:
        return []
    silent_python = trace.named(lambda name: "run_backward" in name or "_engine_run" in name)
    works = (trace.kind == Kind.OPERATOR) | (trace.kind == Kind.RUNTIME)
    events = np.flatnonzero(works & np.isin(thread_of, group))
    low, high = trace.span
    silences: dict[int, tuple[Ints, Ints]] = {}
    for thread in group:
        start, end, row, _ = stacks.over(thread, np.array([low]), np.array([high]))
        kind = np.where(row >= 0, trace.kind[row], 0)
        silent = (row < 0) | (kind == Kind.ANNOTATION) | ((kind == Kind.PYTHON) & silent_python[row])
        start, end = merge(start[silent], end[silent])
        first = slice(None) if has_operators else slice(int((start == low).any()))
        silences[thread] = start[first], end[first]
    found: list[tuple[int, ...]] = []
    for thread, (start, end) in silences.items():
        others = events[thread_of[events] != thread]
        if not len(others):
            continue
        others = others[np.argsort(trace.end[others], kind="stable")]
        ends = trace.end[others]
        at = np.searchsorted(ends, end, side="right") - 1
        for i in np.flatnonzero((at >= 0) & (ends[np.maximum(at, 0)] > start)).tolist():
            other = int(thread_of[others[at[i]]])
            begins, stops = silences[other]  # events that were cut may end in their own thread's silence
            when = int(ends[at[i]])
            around = int(np.searchsorted(begins, when, side="right")) - 1
            if around >= 0 and stops[around] > when:
                when = int(begins[around])
            place = (thread, int(start[i]), int(end[i]), -1, -1)
            found.append((*place, Why.THREAD, 0, other, when, 1, 0))
    return found
