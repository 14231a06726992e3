"""How long would the step be if ...? The step replayed with a change, between bounds that do not depend on the replay.

The replay keeps the order of everything. A launch happens when the host gets there, work starts when its launch and its
stream (and the event it waited for) allow, a blocking call returns when its work is done. What is unexplained in a
measured gap stays in it. The unchanged replay is compared with the measured step: its error is part of the answer.

Bounds: a step cannot become shorter than its critical path without the time that the change takes off that path, nor
than what each device and the host have left to do; and it is taken not to become longer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fettle.errors import UsageError
from fettle.trace.account import device_classes
from fettle.trace.critical import WAITS, CriticalPath, critical_path
from fettle.trace.idle import main_thread
from fettle.trace.intervals import Intervals, clip, length_within, merge, total
from fettle.trace.kernels import class_of_row
from fettle.trace.model import Trace
from fettle.trace.stacks import CAUSES_OF_HOST

_UPLOAD = re.compile(r"memcpy\s*(HtoD|H2D|HostToDevice)", re.IGNORECASE)
QUESTIONS = {
    "kernels": "these kernels took another time",
    "no_syncs": "no call blocked the host",
    "perfect_overlap": "communication and copies held nothing up",
    "graph": "one graph launched the whole step",
    "data_ready": "the data had been ready",
}


@dataclass(frozen=True)
class WhatIf:
    """The answer to one question, ns: measured wall time, estimate, and bounds; `replay_error` is the unchanged
    replay's.
    """

    change: str
    wall_ns: int
    estimate_ns: int
    low_ns: int
    high_ns: int
    replay_error: float

    @property
    def saving_share(self) -> float:
        return 1 - self.estimate_ns / max(self.wall_ns, 1)

    @property
    def question(self) -> str:
        return QUESTIONS[self.change]


def what_if(
    trace: Trace,
    change: str,
    *,
    kernels: str = "",
    factor: float = 0.0,
    step: int | None = None,
    path: CriticalPath | None = None,
) -> WhatIf:
    """Answer one question about a step (or all steps together).

    Args:
        change: `kernels` (those whose name matches the expression `kernels` take `factor` of their time), `no_syncs`
            (no call blocks), `perfect_overlap` (communication and copies hold nothing up), `graph` (the step's launches
            as one: no host time between kernels, save for data loading and the time right before a copy to the device,
            which may make its data), `data_ready` (the main thread never loads or waits for data). Without device work
            only `data_ready` changes anything.
        path: The step's critical path where it is known already.
    """
    if change not in QUESTIONS:
        raise UsageError(f"unknown change '{change}': one of {', '.join(QUESTIONS)}")
    if not 0 <= factor <= 1000:
        raise UsageError("the factor must be between 0 and 1000")
    path = path or critical_path(trace, step)
    low, high = path.start_ns, path.end_ns
    if not trace.device_keys and change != "data_ready":  # nothing is launched, overlapped or waited for
        return WhatIf(change, path.wall_ns, path.wall_ns, path.wall_ns, path.wall_ns, 0.0)
    replay = _Replay(trace, low, high)
    scale = np.ones(len(replay.rows))
    classes = class_of_row(trace, replay.rows)
    if change == "kernels":
        try:
            pattern = re.compile(kernels)
        except re.error as error:
            raise UsageError(f"not a regular expression: {kernels} ({error})") from error
        hit = np.array([bool(pattern.search(n)) for n in trace.names], dtype=bool)
        scale[hit[trace.column("name")[replay.rows]]] = factor
    elif change == "perfect_overlap":
        scale[classes != 0] = 0.0
    base = replay.run(np.ones(len(scale)))
    changed = replay.run(
        scale, blocking=change != "no_syncs", launching=change != "graph", loading=change != "data_ready"
    )
    wall = path.wall_ns
    estimate = round(wall * changed / base) if base > 0 else wall
    floor = _floor(trace, path, replay, scale, classes, change)
    ceiling = wall if change != "kernels" or factor <= 1 else round(wall + (factor - 1) * _matched_ns(replay, scale))
    if change == "kernels" and factor > 1:
        floor = wall
    return WhatIf(
        change, wall, int(min(max(estimate, floor), ceiling)), int(floor), int(ceiling), base / max(wall, 1) - 1
    )


def _matched_ns(replay: _Replay, scale: np.ndarray) -> float:
    return float(replay.duration[scale != 1].sum())


def _floor(trace: Trace, path: CriticalPath, replay: _Replay, scale, classes, change: str) -> int:  # type: ignore[no-untyped-def]
    """No step is shorter than this after the change."""
    low, high = path.start_ns, path.end_ns
    pieces = path.pieces
    length = (pieces["end_ns"] - pieces["start_ns"]).to_numpy()
    factor_of = dict(zip(replay.rows.tolist(), scale.tolist(), strict=True))
    rest = np.array([factor_of.get(r, 1.0) for r in pieces["row"].to_list()])
    category = pieces["category"].to_numpy()
    on_device = np.isin(category, ["compute", "communication", "copy"])
    floors = []
    if change in ("kernels", "perfect_overlap"):
        off = float((length[on_device] * (1 - np.minimum(rest[on_device], 1))).sum())
        if change == "perfect_overlap":  # gaps and waits around what is hidden may go with it
            off += float(length[np.isin(category, WAITS)].sum())
        floors.append(path.wall_ns - off)
    for device in trace.device_keys:
        sets = device_classes(trace, device)
        if change == "perfect_overlap":
            floors += [float(total(clip(one, low, high))) for one in sets]
        elif change != "kernels":
            starts = np.concatenate([s[0] for s in sets])
            ends = np.concatenate([s[1] for s in sets])
            # Without blocking calls streams could overlap better: then the busiest class is what must remain.
            floors.append(
                float(max(total(clip(one, low, high)) for one in sets))
                if change == "no_syncs"
                else float(total(clip(merge(starts, ends), low, high)))
            )
    if change == "data_ready":
        floors.append(path.wall_ns - float(length[category == "data_loading"].sum()))
    if change == "graph":
        floors.append(float(total(_data_loading(trace, low, high))))
    if change == "no_syncs":
        thread = main_thread(trace)
        start, end, row, _ = trace.stacks.over(thread, np.array([low]), np.array([high]))
        cause = np.where(row >= 0, trace.stacks.cause[row], 0)
        busy = (cause != CAUSES_OF_HOST.index("blocking_call")) & (cause != 0)
        floors.append(float((end - start)[busy].sum()))
    return int(min(max(floors, default=0), path.wall_ns))


def _data_loading(trace: Trace, low: int, high: int) -> Intervals:
    """When the main thread was loading data."""
    start, end, row, _ = trace.stacks.over(main_thread(trace), np.array([low]), np.array([high]))
    mine = (
        np.where(row >= 0, trace.stacks.cause[row], 0) == CAUSES_OF_HOST.index("data_loading")
        if len(trace.stacks.cause)
        else row > 0
    )
    return merge(start[mine], end[mine])


class _Replay:
    """The launches, blocking calls and device work of a window, in the order in which the host got to them."""

    def __init__(self, trace: Trace, low: int, high: int) -> None:
        links = trace.launches
        has = links.launch_rows >= 0
        calls_in = np.zeros(len(has), dtype=bool)
        calls_in[has] = (trace.ts[links.launch_rows[has]] >= low) & (trace.ts[links.launch_rows[has]] < high)
        self.rows = links.device_rows[calls_in]
        launch = links.launch_rows[calls_in]
        self.duration = trace.dur[self.rows].astype(np.float64)
        self.low, self.high = low, high
        cause = trace.stacks.cause
        blocking = np.flatnonzero(
            (cause == CAUSES_OF_HOST.index("blocking_call")) & trace.is_host & (trace.ts >= low) & (trace.ts < high)
        )
        blocking = np.setdiff1d(blocking, launch)
        anchors = np.union1d(np.unique(launch), blocking)
        anchors = anchors[np.argsort(trace.ts[anchors], kind="stable")]
        start, end = trace.ts[anchors], np.minimum(trace.end[anchors], high)
        reach = np.maximum.accumulate(np.concatenate([[low], end]))
        self.gap = np.maximum(start - reach[:-1], 0).tolist()
        # Data loading stays even where launches cost nothing, and so does what may make the data of an upload.
        loading = _data_loading(trace, low, high)
        self.loading_gap = length_within(loading, reach[:-1], np.maximum(start, reach[:-1])).tolist()
        uploads = np.array([bool(_UPLOAD.search(n)) for n in trace.names], dtype=bool)
        feeds = np.isin(anchors, launch[uploads[trace.column("name")[self.rows]]])
        self.kept_gap = np.where(feeds, self.gap, self.loading_gap).tolist()
        self.kept_tail = int(length_within(loading, reach[-1:], np.maximum(reach[-1:], high))[0])
        self.call = np.maximum(end - np.maximum(start, reach[:-1]), 0).tolist()
        self.tail = max(high - int(reach[-1]), 0)
        self.is_blocking = np.isin(anchors, blocking).tolist()
        self._work(trace, anchors, launch)
        self._blocking(trace, anchors)

    def _work(self, trace: Trace, anchors, launch) -> None:  # type: ignore[no-untyped-def]
        at = {row: i for i, row in enumerate(anchors.tolist())}
        self.work_of: list[list[int]] = [[] for _ in at]
        for i, call in enumerate(launch.tolist()):
            self.work_of[at[call]].append(i)
        rows = self.rows
        key = trace.column("device")[rows].astype(np.int64) * 2**40 + trace.column("stream")[rows] % 2**40
        self.stream = np.unique(key, return_inverse=True)[1].tolist()
        previous_end: dict[int, int] = {}
        self.latency, self.lag, waits = [], [], []
        ends = np.sort(trace.end[rows])
        by_end = np.argsort(trace.end[rows], kind="stable")
        for i, (row, call) in enumerate(zip(rows.tolist(), launch.tolist(), strict=True)):
            start, called = int(trace.ts[row]), int(trace.ts[call])
            free = previous_end.get(self.stream[i])
            stream_bound = free is not None and free >= called
            event = -1
            ready = max(free if free is not None else called, int(trace.end[call]))
            if start - ready > 2000:
                j = int(np.searchsorted(ends, start, side="right")) - 1
                if j >= 0 and ends[j] > ready and by_end[j] != i:
                    event = int(by_end[j])
            waits.append(event)
            self.latency.append(float(max(start - called, 0)) if not stream_bound and event < 0 else -1.0)
            self.lag.append(float(max(start - free, 0)) if stream_bound and event < 0 and free is not None else -1.0)
            previous_end[self.stream[i]] = max(int(trace.end[row]), free or 0)
        self.event = waits
        known = [x for x in self.latency if x >= 0]
        self.usual_latency = float(np.percentile(known, 10)) if known else 5000.0
        known = [x for x in self.lag if x >= 0]
        self.usual_lag = float(np.percentile(known, 25)) if known else 1000.0

    def _blocking(self, trace: Trace, anchors) -> None:  # type: ignore[no-untyped-def]
        """The work that each blocking call waited for, and how long it took to return after it; copies block
        themselves.
        """
        ends = trace.end[self.rows]
        order = np.argsort(ends, kind="stable")
        sorted_ends = ends[order]
        self.target, self.return_lag = [], []
        for i, row in enumerate(anchors.tolist()):
            start, end = int(trace.ts[row]), int(trace.end[row])
            target = -1
            own = self.work_of[i]
            if own and int(ends[own[-1]]) <= end and "emcpy" in trace.names[int(trace.column("name")[row])]:
                target = own[-1]
            elif self.is_blocking[i]:
                at = int(np.searchsorted(sorted_ends, end, side="right")) - 1
                if at >= 0 and sorted_ends[at] > start:
                    target = int(order[at])
            self.target.append(target)
            self.return_lag.append(float(end - ends[target]) if target >= 0 else 0.0)

    def run(self, scale: np.ndarray, *, blocking: bool = True, launching: bool = True, loading: bool = True) -> float:
        """Length of the window in ns with durations scaled, without blocking, without host time for launches, or
        without data loading.
        """
        durations = (self.duration * scale).tolist()
        host = 0.0
        free: dict[int, float] = {}
        done = [0.0] * len(durations)
        for i, (gap, call) in enumerate(zip(self.gap, self.call, strict=True)):
            host += (gap if loading else gap - self.loading_gap[i]) if launching else self.kept_gap[i]
            begun = host
            target = self.target[i]
            if launching and target < 0:
                host += call
            for k in self.work_of[i]:
                latency = self.latency[k] if self.latency[k] >= 0 else self.usual_latency
                lag = self.lag[k] if self.lag[k] >= 0 else self.usual_lag
                ready = begun + (latency if launching else 0.0)
                if self.stream[k] in free:
                    ready = max(ready, free[self.stream[k]] + lag)
                if self.event[k] >= 0 and done[self.event[k]]:
                    ready = max(ready, done[self.event[k]] + self.usual_lag)
                done[k] = ready + durations[k]
                free[self.stream[k]] = done[k]
            if target >= 0:
                own = min(call, self.return_lag[i])
                host = max(host + own, done[target] + self.return_lag[i]) if blocking else host + own
        end = host + ((self.tail if loading else self.tail - self.kept_tail) if launching else self.kept_tail)
        return max(end, max(done, default=0.0)) if not blocking or not launching else end
