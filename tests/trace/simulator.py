"""Host threads, streams and queues in a model of their own, whose truth is known: it knows nothing of the analysis.

A `Program` is what the host does; `simulate` says when everything happens, and why. Running it again with a `Change` is
the truth about a what-if; following the reasons back is the truth about the critical path. `write` makes a trace of it
as the profiler would. Times are microseconds.
"""

from __future__ import annotations

import json
import random
from bisect import insort
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CLASSES = {"gemm": "compute", "norm": "compute", "ncclDevKernel_AllReduce": "communication"}


@dataclass(frozen=True)
class Op:
    """One thing that a host thread does: `host` time, `data` loading, `launch`, `graph`, `record` and `wait` (events),
    `sync_stream`, `sync_device`, `item` (a copy to the host and a synchronise), `copy` (a blocking copy), `hand` (the
    other thread goes on), `step`.
    """

    kind: str
    us: float = 0.0  # of the host
    stream: int = 7
    kernels: tuple[tuple[str, float], ...] = ()  # names and lengths
    event: int = -1
    thread: int = 1
    latency: float = 4.0
    gap: float = 1.0


@dataclass(frozen=True)
class Program:
    """What happens on the main thread and the one it hands over to, in order; beside them, threads of their own."""

    ops: tuple[Op, ...]
    beside: tuple[Op, ...] = ()
    depth: int = 1024
    shared: bool = False  # one queue for all streams
    told: bool = False  # sync events are in the trace


@dataclass(frozen=True)
class Change:
    """Kernels with `part` in their name (`*`: all) take `factor` of their time; no call blocks; data is ready."""

    part: str = "none"
    factor: float = 1.0
    blocking: bool = True
    loading: bool = True


@dataclass
class Work:
    name: str
    start: float
    end: float
    stream: int
    number: int  # of its launch
    why: tuple[str, Any]  # ("host", thread, time) or ("work", index)


@dataclass
class Outcome:
    """Times: host calls (category, name, thread, start, end, correlation), device work, and why each thread waited."""

    calls: list[tuple[str, str, int, float, float, int]] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    stops: dict[int, list[tuple[float, float, tuple[str, Any], float]]] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    syncs: list[dict[str, Any]] = field(default_factory=list)
    end: float = 0.0

    @property
    def length(self) -> float:
        return self.end - self.steps[0]


class _Machine:
    """Runs one program: all that a piece of work depends on is launched before it, so its times are known at once."""

    def __init__(self, program: Program, change: Change) -> None:
        self.program, self.change, self.out = program, change, Outcome()
        self.now = {1: 0.0, 2: 0.0, 3: 0.0}
        self.last: dict[int, int] = {}  # by stream
        self.begins: dict[int, list[float]] = {}  # by queue, in order
        self.recorded: dict[int, tuple[int, int, int]] = {}  # event: work, its stream, the record's number
        self.waits: dict[int, tuple[int, dict[str, Any]]] = {}  # stream: work of another one
        self.number = 100

    def call(self, category: str, name: str, thread: int, start: float, end: float, number: int = 0) -> None:
        self.out.calls.append((category, name, thread, start, end, number))

    def run(self, ops: tuple[Op, ...]) -> None:
        for op in ops:
            getattr(self, "_" + op.kind)(op)

    def _step(self, op: Op) -> None:
        self.out.steps.append(self.now[1])

    def _host(self, op: Op, name: str = "aten::reshape", kind: str = "cpu_op") -> None:
        start = self.now[op.thread]
        self.now[op.thread] += op.us
        name = f"autograd::engine::evaluate_function: {name}" if op.thread == 2 else name
        self.call(kind, name, op.thread, start, self.now[op.thread])

    def _data(self, op: Op) -> None:
        if self.change.loading:
            self._host(op, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "user_annotation")

    def _queue(self, stream: int) -> list[float]:
        return self.begins.setdefault(-1 if self.program.shared else stream, [])

    def _launch(self, op: Op, name: str = "cudaLaunchKernel") -> int:
        start, queue = self.now[op.thread] + 0.5, self._queue(op.stream)
        self.number += 1
        end = start + op.us
        free = len(queue) - self.program.depth  # so many must have begun for a slot to be free
        if free >= 0 and queue[free] > end:
            index = min(i for i, w in enumerate(self.out.work) if w.start == queue[free])
            self._stop(op.thread, start, queue[free] + 1.0, ("begin", index), queue[free])
            end = queue[free] + 1.0
        self.now[op.thread] = end + 0.5
        self.call("cpu_op", "aten::op" if op.thread != 2 else "autograd::engine::evaluate_function: Op",
                  op.thread, start - 0.5, end + 0.5)  # fmt: skip
        self.call("cuda_runtime", name, op.thread, start, end, self.number)
        for i, (kernel, length) in enumerate(op.kernels):
            length *= self.change.factor if self.change.part == "*" or self.change.part in kernel else 1.0
            reasons: list[tuple[float, tuple[str, Any]]] = [(end + op.latency, ("host", (op.thread, end)))]
            if op.stream in self.last:
                before = self.last[op.stream]
                reasons.append((self.out.work[before].end + (op.gap if i == 0 else 0.7), ("work", before)))
            if i == 0 and op.stream in self.waits:
                other, told = self.waits.pop(op.stream)
                reasons.append((self.out.work[other].end + 1.0, ("work", other)))
                self.out.syncs.append(told)
            begins, why = max(reasons)
            self.last[op.stream] = len(self.out.work)
            self.out.work.append(Work(kernel, begins, begins + length, op.stream, self.number, why))
            if i == 0:  # a graph is one entry
                insort(queue, begins)
        return self.last[op.stream]

    def _graph(self, op: Op) -> None:
        self._launch(op, "cudaGraphLaunch")

    def _record(self, op: Op) -> None:
        start = self.now[op.thread]
        self.now[op.thread] += 1.5
        self.number += 1
        self.call("cuda_runtime", "cudaEventRecord", op.thread, start, start + 1.5, self.number)
        if op.stream in self.last:
            self.recorded[op.event] = (self.last[op.stream], op.stream, self.number)

    def _wait(self, op: Op) -> None:
        start = self.now[op.thread]
        self.now[op.thread] += 1.5
        self.number += 1
        self.call("cuda_runtime", "cudaStreamWaitEvent", op.thread, start, start + 1.5, self.number)
        if op.event in self.recorded:
            work, other, record = self.recorded[op.event]
            told = {"ts": start + 1.5, "name": "Stream Wait Event", "stream": op.stream, "correlation": self.number}
            told |= {"wait_on_stream": other, "wait_on_cuda_event_record_corr_id": record}
            self.waits[op.stream] = (work, told)

    def _block(self, op: Op, name: str, works: list[int], number: int = 0) -> None:
        start = self.now[op.thread]
        end = start + 2.0
        ends = [(self.out.work[w].end, w) for w in works]
        if ends and self.change.blocking and max(ends)[0] + 2.0 > end:
            last, work = max(ends)
            end = last + 2.0
            self._stop(op.thread, start, end, ("work", work), last)
        self.now[op.thread] = end
        self.number += 1
        self.call("cuda_runtime", name, op.thread, start, end, number or self.number)
        if name == "cudaStreamSynchronize":
            self.out.syncs.append({"ts": start, "name": "Stream Sync", "stream": op.stream, "correlation": self.number})

    def _sync_stream(self, op: Op) -> None:
        self._block(op, "cudaStreamSynchronize", [self.last[op.stream]] if op.stream in self.last else [])

    def _sync_device(self, op: Op) -> None:
        now = self.now[op.thread]
        launched = {c[5] for c in self.out.calls if c[0] == "cuda_runtime" and c[3] < now}
        self._block(op, "cudaDeviceSynchronize", [i for i, w in enumerate(self.out.work) if w.number in launched])

    def _item(self, op: Op) -> None:
        self._launch(op, "cudaMemcpyAsync")
        self._sync_stream(op)

    def _copy(self, op: Op) -> None:
        now, calls = self.now[op.thread], len(self.out.calls)
        work = self._launch(op, "cudaMemcpy")
        end = self.now[op.thread] - 0.5
        if self.change.blocking:
            end = max(end, self.out.work[work].end + 2.0)
            self._stop(op.thread, now, end, ("work", work), self.out.work[work].end)
        for i in range(calls, len(self.out.calls)):
            category, name, thread, start, stop, number = self.out.calls[i]
            after = end + (0.5 if category == "cpu_op" else 0.0)
            self.out.calls[i] = (category, name, thread, start, max(stop, after), number)
        self.now[op.thread] = end + 0.5

    def _hand(self, op: Op) -> None:
        to = 3 - op.thread
        before = self.now[op.thread]
        self._stop(to, self.now[to], before + op.us, ("host", (op.thread, before)), before)
        self.now[to] = before + op.us

    def _stop(self, thread: int, start: float, end: float, why: tuple[str, Any], when: float) -> None:
        self.out.stops.setdefault(thread, []).append((start, end, why, when))


def simulate(program: Program, change: Change | None = None) -> Outcome:
    """What happens, and when."""
    machine = _Machine(program, change or Change())
    machine.run(program.beside)
    machine.run(program.ops)
    beside = {c[5] for c in machine.out.calls if c[2] == 3}
    ends = [w.end for w in machine.out.work if w.number not in beside]
    machine.out.end = max(machine.now[1], *ends)  # without calls that block, the device has yet to finish
    return machine.out


def composition(outcome: Outcome) -> dict[str, float]:
    """The true critical path from the end of the main thread: shares of compute, communication, copy, host, waiting."""
    spent = dict.fromkeys(("compute", "communication", "copy", "host", "waiting"), 0.0)
    low, time = outcome.steps[0], outcome.end
    place: tuple[str, Any] = ("host", 1)
    while time > low:
        if place[0] == "work":
            work = outcome.work[place[1]]
            start = max(min(work.start, time), low)
            spent[CLASSES.get(work.name, "copy")] += time - start
            kind, reason = work.why
            after = reason[1] if kind == "host" else outcome.work[reason].end
            spent["waiting"] += max(start - max(after, low), 0.0)
            time, place = min(after, start), ("host", reason[0]) if kind == "host" else ("work", reason)
            continue
        stops = [s for s in outcome.stops.get(place[1], []) if s[1] <= time and s[1] > low and s[3] < time]
        stops = [s for s in stops if s[1] > s[3]]
        if not stops:
            spent["host"] += time - low
            break
        _, end, (kind, reason), when = max(stops, key=lambda s: s[1])
        spent["host"] += time - end
        spent["waiting" if kind != "host" else "host"] += end - max(when, low)
        time, place = when, ("host", reason[0]) if kind == "host" else ("work", reason)
    total = outcome.end - low
    return {name: value / total for name, value in spent.items()}


def document(program: Program, outcome: Outcome, origin: float = 1_000_000.0) -> dict[str, Any]:
    """The trace, as the profiler writes it."""
    events: list[dict[str, Any]] = []

    def add(cat: str, name: str, pid: Any, tid: Any, start: float, end: float, **args: Any) -> None:
        where = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid}
        events.append(where | {"ts": round(origin + start, 3), "dur": round(end - start, 3), "args": args})

    for i, start in enumerate(outcome.steps):
        end = outcome.steps[i + 1] - 0.01 if i + 1 < len(outcome.steps) else outcome.end
        add("user_annotation", f"ProfilerStep#{i}", 1, 1, start, end)
    for category, name, thread, start, end, number in outcome.calls:
        add(category, name, 1, thread, start, end, **({"correlation": number} if number else {}))
    for work in outcome.work:
        cat = "gpu_memcpy" if work.name.startswith("Memcpy") else "kernel"
        where = {"device": 0, "stream": work.stream, "correlation": work.number}
        add(cat, work.name, 0, work.stream, work.start, work.end, **where)
    for told in outcome.syncs if program.told else ():
        args = {k: v for k, v in told.items() if k not in ("ts", "name")} | {
            "device": 0,
            "cuda_sync_kind": told["name"],
        }
        add("cuda_sync", told["name"], 0, told["stream"], told["ts"], told["ts"] + 1.0, **args)
    return {"distributedInfo": {"rank": 0}, "traceEvents": events}


def write(program: Program, outcome: Outcome, path: Path) -> Path:
    """The trace in a file."""
    path.write_text(json.dumps(document(program, outcome)))
    return path


def random_program(seed: int) -> Program:
    """A training loop of some sort: host-bound, device-bound or in between, with all that a machine may have."""
    draw = random.Random(seed)
    depth = draw.choice((2, 3, 4, 8, 16, 32, 64, 128, 512, 1022, 1024, 4096))
    host, device = draw.uniform(2, 30), draw.choice((0.3, 0.8, 1.0, 1.3, 3.0, 8.0))
    layers, steps = draw.randint(4, 40), draw.randint(2, 6)
    if depth > 100 and draw.random() < 0.5:  # enough work to fill a deep queue
        layers, steps = min(120, 1 + depth // 4), 8
    streams, backward = draw.random() < 0.5, draw.random() < 0.5
    ends, inside = draw.choice(("", "sync", "item")), draw.choice(("", "", "item", "copy", "graph"))
    loading = draw.choice((0.0, 0.0, 50.0, 500.0))
    layer_us = host + 8.0

    def length(scale: float = 1.0) -> float:
        return max(1.0, layer_us * device * scale * draw.lognormvariate(0, 0.5))

    def launch(name: str, us: float, stream: int = 7, thread: int = 1, **more: Any) -> Op:
        latency, gap = draw.uniform(3, 7), draw.uniform(0.6, 1.6)
        return Op("launch", draw.uniform(3, 6), stream, ((name, us),), thread=thread, latency=latency, gap=gap, **more)

    def layer(thread: int, number: int) -> list[Op]:
        ops = [Op("host", draw.lognormvariate(0, 0.4) * host, thread=thread)]
        ops.append(launch(draw.choice(("gemm", "norm")), length(), thread=thread))
        if streams and number % 4 == 3:  # communication beside, behind what was computed
            ops += [Op("record", event=number, thread=thread), Op("wait", event=number, stream=20, thread=thread)]
            ops.append(launch("ncclDevKernel_AllReduce", length(draw.uniform(0.5, 3)), 20, thread))
            ops.append(Op("record", event=1000 + number, stream=20, thread=thread))
        return ops

    ops: list[Op] = []
    for _ in range(steps):
        ops.append(Op("step"))
        if loading:
            ops.append(Op("data", loading * draw.uniform(0.5, 1.5)))
            ops.append(launch("Memcpy HtoD (Pinned -> Device)", draw.uniform(5, 60)))
        for number in range(layers):
            ops += layer(1, number)
        if inside == "item":
            ops.append(Op("item", 4.0, kernels=(("Memcpy DtoH (Device -> Pinned)", 2.0),)))
        elif inside == "copy":
            ops.append(Op("copy", 4.0, kernels=(("Memcpy DtoH (Device -> Pageable)", draw.uniform(2, 40)),)))
        elif inside == "graph":
            ops.append(Op("graph", 12.0, kernels=tuple(("gemm", length(0.5)) for _ in range(draw.randint(2, 12)))))
        if backward:
            ops.append(Op("hand", draw.uniform(10, 40), thread=1))
            for number in range(layers):
                ops += layer(2, number)
            ops.append(Op("hand", draw.uniform(5, 20), thread=2))
        if streams:
            ops += [Op("wait", event=1000 + layers // 4 * 4 - 1)]
        ops += [Op("host", host), launch("norm", length())]
        if ends == "sync":
            ops.append(Op("sync_stream"))
        elif ends == "item":
            ops.append(Op("item", 4.0, kernels=(("Memcpy DtoH (Device -> Pinned)", 2.0),)))
    ops.append(Op("sync_device"))
    beside: list[Op] = []
    if draw.random() < 0.2:
        for _ in range(layers * steps // 2):
            beside += [Op("host", draw.uniform(20, 80), thread=3)]
            beside.append(launch("Memcpy DtoD (Device -> Device)", draw.uniform(1, 10), 30, 3))
    return Program(tuple(ops), tuple(beside), depth, draw.random() < 0.3 and not beside, draw.random() < 0.4)


def random_change(seed: int) -> tuple[str, dict[str, Any], Change]:
    """A question for `fettle.trace.what_if`, and the change that it asks about."""
    draw = random.Random(seed * 7 + 1)
    kind = draw.choice(("kernels", "kernels", "kernels", "no_syncs", "data_ready"))
    if kind == "no_syncs":
        return kind, {}, Change(blocking=False)
    if kind == "data_ready":
        return kind, {}, Change(loading=False)
    part, factor = draw.choice(("gemm", "norm", "nccl", "")), draw.choice((0.0, 0.25, 0.5, 0.8, 1.5, 2.0, 4.0))
    if not part:
        return kind, {"kernels": "gemm|norm|nccl|Memcpy", "factor": factor}, Change("*", factor)
    return kind, {"kernels": part, "factor": factor}, Change(part, factor)
