"""Where do the steps of my own loop go?

    with fettle.watch() as steps:            # a loop over a DataLoader: nothing else to change
        for batch in loader:
            train_step(batch)

    for batch in fettle.step_timer(loader):  # any iterable
        train_step(batch)

    with fettle.watch() as steps:            # a serving loop: say where a step ends
        while True:
            answer(queue.get())
            steps.step()

Of each step's wall time, `data` is waiting for the next batch, `sync` the host waiting for the device, `gc` Python's
garbage collector, and `host` all the rest: on a CPU the work itself, on a GPU launching it. On a GPU, NVML tells
besides which share of the time no kernel ran. Nothing is profiled: a step is two reads of the clock and a
few additions. `bench/watch_overhead.py` measures what that costs.

With `slow_trace="slow.json"`, a step that has taken `slow_factor` times the median is looked at while
it is still going on: a second thread samples the loop's stack until the step ends, and writes what it saw as a trace
(Perfetto, chrome://tracing).

What it cannot see: waiting inside compiled or C++ code counts as `host`; so does data that the loop makes by itself.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TextIO, TypeVar

from fettle.errors import UsageError

T = TypeVar("T")
Part = Literal["data", "sync"]
_KEPT_STEPS = 100_000
_FEWEST_FOR_SLOW = 10
_MOST_SAMPLES = 20_000
_MOST_SLOW = 20
_RENEW = 16

# What makes the host wait for the device when its tensor is there. `.to` and operators that wait inside are not among
# them: they are called too often, or cannot be told from those that do not wait.
_WAITING_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")


@dataclass(frozen=True)
class SlowStep:
    """A step that took much longer than the others."""

    number: int
    wall_ms: float
    median_ms: float
    """Median of the steps before it."""
    largest_part: str
    trace: str | None = None
    """The file with the stacks sampled while it went on."""
    hottest: str | None = None
    """The source line most often on top of the loop's own code in those samples, with its share."""


@dataclass(frozen=True)
class StepReport:
    """Where the time of the watched steps went. The parts add up to the wall time."""

    steps: int
    wall_s: float
    data_s: float
    sync_s: float
    gc_s: float
    host_s: float
    median_ms: float
    p95_ms: float
    first_ms: float
    """The first step, which is in the sums but not in median and percentile: it loads and compiles."""
    syncs_per_step: float | None
    """None without a device."""
    device_idle: float | None
    """Share of the time in which no kernel ran, by NVML (any process's kernels count); None where NVML cannot tell."""
    data_bound: float
    """The most that a faster input could bring: wall time over wall time without waiting for data."""
    slow: tuple[SlowStep, ...] = ()

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        if not self.steps:
            return "no steps were seen: loop over a DataLoader or a step_timer, or call step() at the end of each"
        rows = [("data", self.data_s), ("sync", self.sync_s), ("gc", self.gc_s), ("host", self.host_s)]
        lines = [
            f"{self.steps} steps in {self.wall_s:.2f} s: median {self.median_ms:.2f} ms, "
            f"95% within {self.p95_ms:.2f} ms, the first {self.first_ms:.2f} ms"
        ]
        for name, seconds in rows:
            share = seconds / self.wall_s if self.wall_s else 0.0
            lines.append(
                f"  {name:<5}{'█' * round(30 * share):<31}{share:6.1%}  {seconds / self.steps * 1e3:9.3f} ms a step"
            )
        if self.syncs_per_step is not None:
            lines.append(f"  {self.syncs_per_step:.1f} calls a step made the host wait for the device")
        if self.device_idle is not None:
            lines.append(f"  no kernel ran for {self.device_idle:.0%} of the time (NVML)")
        if math.isfinite(self.data_bound) and self.data_bound > 1.05:
            lines.append(f"  a faster input could make it at most {self.data_bound:.2f}x as fast")
        for step in self.slow:
            lines.append(
                f"  step {step.number} took {step.wall_ms:.1f} ms, "
                f"{step.wall_ms / step.median_ms:.1f} times the median, mostly {step.largest_part}"
                + (f", at {step.hottest}" if step.hottest else "")
                + (f" -> {step.trace}" if step.trace else "")
            )
        return "\n".join(lines)


@dataclass
class Steps:
    """The running account, given to the body of `watch`. Times are nanoseconds of `perf_counter_ns`.

    What runs at every step finds the caches full of the loop's own data, so it is kept to a few plain integers.
    """

    slow_trace: Path | None = None
    slow_factor: float = 2.0
    report: StepReport | None = None
    """Set when the block ends."""
    _walls: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    _wall: int = 0
    _data: int = 0
    _sync: int = 0
    _gc: int = 0
    _before: tuple[int, int, int] = (0, 0, 0)
    """Data, sync and gc when the step began."""
    _count: int = 0
    _syncs: int = 0
    _started: int = 0
    _in: Part | None = None
    _slow_ns: float = math.inf
    """From how long on a step is slow; looked at anew every `_RENEW` steps."""
    _slow: list[SlowStep] = field(default_factory=list)
    _thread: int = field(default_factory=threading.get_ident)
    _sampler: _Sampler | None = None
    _on_gpu: bool = False
    _gc_started: int = 0

    def step(self) -> None:
        """The step ends here and the next begins."""
        self._end(time.perf_counter_ns())

    def _end(self, now: int) -> None:
        if not self._started:
            self._started = now
            return
        wall, self._started = now - self._started, now
        self._walls.append(wall)
        self._wall += wall
        self._count += 1
        if wall > self._slow_ns and len(self._slow) < _MOST_SLOW:
            self._note_slow(wall)
        self._before = (self._data, self._sync, self._gc)
        if self._count % _RENEW == 0 or self._count == _FEWEST_FOR_SLOW + 1:
            self._slow_ns = self.slow_factor * self._median()

    @contextlib.contextmanager
    def waiting(self, part: Part) -> Iterator[None]:
        """What runs inside counts as `part`; inside another part, it stays that part's."""
        if self._in is not None or threading.get_ident() != self._thread:
            yield
            return
        self._in, started, collecting = part, time.perf_counter_ns(), self._gc
        try:
            yield
        finally:
            self._in = None
            spent = time.perf_counter_ns() - started - (self._gc - collecting)
            if part == "data":
                self._data += spent
            else:
                self._sync += spent

    def summary(self) -> StepReport:
        """The account so far."""
        # What went on since the last step's end belongs to no step.
        data, sync, collecting = self._before
        first = self._walls[0] if self._walls else 0  # of those kept
        walls = sorted(itertools.islice(self._walls, 1, None)) or [first]
        without_data = self._wall - data
        return StepReport(
            steps=self._count,
            wall_s=self._wall / 1e9,
            data_s=data / 1e9,
            sync_s=sync / 1e9,
            gc_s=collecting / 1e9,
            host_s=(self._wall - data - sync - collecting) / 1e9,
            median_ms=statistics.median(walls) / 1e6,
            p95_ms=walls[min(len(walls) - 1, int(0.95 * len(walls)))] / 1e6,
            first_ms=first / 1e6,
            syncs_per_step=self._syncs / self._count if self._on_gpu and self._count else None,
            device_idle=None,
            data_bound=self._wall / without_data if without_data > 0 else 1.0,
            slow=tuple(self._slow),
        )

    def _begin_again(self) -> None:
        """Forget what was before the first step."""
        self._started, self._before = time.perf_counter_ns(), (0, 0, 0)
        self._data = self._sync = self._gc = 0

    def _median(self) -> float:
        """Of the last 51 steps, the very first apart; infinite while there are too few."""
        last = min(51, self._count - 1)
        recent = [self._walls[-number] for number in range(1, last + 1)]
        return statistics.median(recent) if last >= _FEWEST_FOR_SLOW else math.inf

    def _note_slow(self, wall: int) -> None:
        parts = dict(zip(("data", "sync", "gc"), (self._data, self._sync, self._gc), strict=True))
        for name, before in zip(parts, self._before, strict=True):
            parts[name] -= before
        parts["host"] = wall - sum(parts.values())
        samples = self._sampler.of(self._count - 1) if self._sampler else []
        path = hottest = None
        if samples and self.slow_trace is not None:
            target = self.slow_trace
            if self._slow:
                target = target.with_name(f"{target.stem}-{self._count}{target.suffix}")
            write_samples(target, samples, self._count)
            path, hottest = str(target), _hottest(samples)
        median = self._slow_ns / self.slow_factor / 1e6
        largest = max(parts, key=lambda key: parts[key])
        self._slow.append(SlowStep(self._count, wall / 1e6, median, largest, path, hottest))

    def _collected(self, phase: str, info: Any) -> None:
        # Callbacks run in whichever thread set the collector off; only the loop's own thread is held up in its account.
        if threading.get_ident() != self._thread:
            return
        if phase == "start":
            self._gc_started = time.perf_counter_ns()
        elif self._gc_started:
            self._gc += time.perf_counter_ns() - self._gc_started
            self._gc_started = 0


@contextlib.contextmanager
def watch(
    *,
    slow_trace: str | os.PathLike[str] | None = None,
    slow_factor: float = 2.0,
    json_to: str | os.PathLike[str] | None = None,
    to: TextIO | None = sys.stderr,
) -> Iterator[Steps]:
    """Watch the loop inside the block and print where its steps went when it ends, also with an exception.

    A step ends where the loop asks a `torch.utils.data.DataLoader` for the next batch, or where it says `step()`.
    `json_to` writes the report as JSON, `to` is where the summary goes (None: nowhere), `slow_trace` and `slow_factor`
    as in the module's text. The report is in `.report` afterwards. One watch at a time, in the thread of the loop.

    Raises `UsageError` if a folder to write to does not exist, `slow_factor` is not above 1, or a watch is running.
    """
    for path in (slow_trace, json_to):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise UsageError(f"{Path(path).parent}: no such folder")
    if not slow_factor > 1:
        raise UsageError(f"slow_factor must be above 1, not {slow_factor}")
    if not _ONE.acquire(blocking=False):
        raise UsageError("a watch is running already: one at a time")
    steps = Steps(Path(slow_trace) if slow_trace is not None else None, slow_factor)
    try:
        with contextlib.ExitStack() as stack:
            if steps.slow_trace is not None:
                steps._sampler = stack.enter_context(_Sampler(steps))
            stack.enter_context(_patched(steps))
            meter = stack.enter_context(_DeviceMeter(steps._on_gpu))
            steps.step()
            try:
                yield steps
            finally:
                report = steps.summary()
                idle = meter.idle()
                steps.report = report if idle is None else _with_idle(report, idle)
    finally:
        _ONE.release()
        if steps.report is not None:
            if json_to is not None:
                Path(json_to).write_text(steps.report.to_json())
            if to is not None:
                print(steps.report, file=to)


def step_timer(iterable: Iterable[T], **options: Any) -> Iterator[T]:
    """Iterate and time: getting the next item is `data`, the loop's body a step. Options as for `watch`."""
    with watch(**options) as steps:
        source = iter(iterable)
        while True:
            with steps.waiting("data"):
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item
            steps.step()


_ONE = threading.Lock()


def _with_idle(report: StepReport, idle: float) -> StepReport:
    return replace(report, device_idle=idle)


@contextlib.contextmanager
def _patched(steps: Steps) -> Iterator[None]:
    """Take note where loops over loaders and waiting for the device pass through Python."""
    with contextlib.ExitStack() as stack:
        gc.callbacks.append(steps._collected)
        stack.callback(gc.callbacks.remove, steps._collected)
        torch = sys.modules.get("torch")  # a loop that has not imported it has neither loader nor tensors
        if torch is not None:
            from torch.utils.data.dataloader import DataLoader, _BaseDataLoaderIter

            # Between epochs the loader starts its workers anew: that is waiting for data too.
            stack.enter_context(_replaced(DataLoader, "__iter__", functools.partial(_loader_iter, steps)))
            stack.enter_context(_replaced(_BaseDataLoaderIter, "__next__", functools.partial(_loader_next, steps)))
            if torch.cuda.is_available():
                steps._on_gpu = True
                for name in _WAITING_METHODS:
                    stack.enter_context(_replaced(torch.Tensor, name, functools.partial(_waits, steps, True)))
                for owner in (torch.cuda.Event, torch.cuda.Stream):
                    stack.enter_context(_replaced(owner, "synchronize", functools.partial(_waits, steps, False)))
                stack.enter_context(_replaced(torch.cuda, "synchronize", functools.partial(_waits, steps, False)))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` wrapped for the time being; an inherited method is inherited again afterwards."""
    own = name in vars(owner)
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def _loader_iter(steps: Steps, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        with steps.waiting("data"):
            return original(self)

    return iterate


def _loader_next(steps: Steps, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def next_batch(self: Any) -> Any:
        if steps._in is not None or threading.get_ident() != steps._thread:
            return original(self)
        started = time.perf_counter_ns()
        if not getattr(self, "_fettle_first", True):
            steps._end(started)
        else:  # what ran before the loop is no step of it
            self._fettle_first = False
            if steps._count == 0:
                steps._begin_again()
        steps._in, collecting = "data", steps._gc
        try:
            return original(self)
        finally:
            steps._in = None
            steps._data += time.perf_counter_ns() - started - (steps._gc - collecting)

    return next_batch


def _waits(steps: Steps, of_tensor: bool, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def waiting(*args: Any, **kwargs: Any) -> Any:
        if of_tensor and not args[0].is_cuda:
            return original(*args, **kwargs)
        if threading.get_ident() == steps._thread and steps._in is None:
            steps._syncs += 1
        with steps.waiting("sync"):
            return original(*args, **kwargs)

    return waiting


_Sample = tuple[int, tuple[tuple[str, str, int], ...]]
"""perf_counter_ns, and frames from the outermost in: function, file, line."""


class _Sampler:
    """A thread that looks now and then whether a step is late, and then samples the loop's stack until it ends.

    The loop tells it nothing: it reads the account. So a step costs nothing here.
    """

    def __init__(self, steps: Steps, period_s: float = 0.005) -> None:
        self._steps, self._period_s = steps, period_s
        self._samples: list[_Sample] = []
        self._sampled = -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fettle-watch", daemon=True)

    def of(self, number: int) -> list[_Sample]:
        """What was seen of the step with so many steps before it."""
        return list(self._samples) if self._sampled == number else []

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        steps, wait_s = self._steps, self._period_s
        while not self._ended.wait(wait_s):
            number, late_ns = steps._count, time.perf_counter_ns() - steps._started - steps._slow_ns
            if late_ns < 0 or len(steps._slow) >= _MOST_SLOW:
                # Seldom: every wake-up asks the loop for the interpreter's lock.
                wait_s = max(min(-late_ns / 1e9, 0.1), 10 * self._period_s) if late_ns > -math.inf else 0.1
                continue
            wait_s = self._period_s
            frame = sys._current_frames().get(steps._thread)
            if steps._count != number or frame is None:
                continue
            if self._sampled != number:
                self._samples, self._sampled = [], number
            if len(self._samples) < _MOST_SAMPLES:
                self._samples.append((time.perf_counter_ns(), _frames(frame)))
            del frame


def _frames(frame: FrameType | None) -> tuple[tuple[str, str, int], ...]:
    found: list[tuple[str, str, int]] = []
    while frame is not None and len(found) < 100:
        found.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(found))


def _hottest(samples: list[_Sample]) -> str | None:
    """The innermost line outside installed packages and this file, over all samples."""
    seen: dict[str, int] = {}
    for _, frames in samples:
        for _, file, line in reversed(frames):
            if (
                "site-packages" not in file
                and file != __file__
                and not file.startswith((sys.base_prefix + "/lib", "<"))
            ):
                seen[f"{file}:{line}"] = seen.get(f"{file}:{line}", 0) + 1
                break
    if not seen:
        return None
    place = max(seen, key=lambda key: seen[key])
    return f"{place} ({seen[place] / len(samples):.0%} of samples)"


def write_samples(path: Path, samples: list[_Sample], number: int) -> None:
    """Sampled stacks as a trace: a call that is in several samples in a row is one event from the first to the last."""
    base, gap = samples[0][0], 5_000_000
    events: list[dict[str, Any]] = []
    open_calls: list[tuple[tuple[str, str], int, int]] = []  # what, since when, its line

    def close(depth: int, at: int) -> None:
        while len(open_calls) > depth:
            (name, file), since, line = open_calls.pop()
            events.append(
                {
                    "ph": "X",
                    "cat": "python_function",
                    "name": f"{file}({line}): {name}",
                    "pid": os.getpid(),
                    "tid": 1,
                    "ts": (since - base) / 1e3,
                    "dur": max(at - since, 1) / 1e3,
                }
            )

    last = base
    for at, frames in samples:
        keys = [(name, file) for name, file, _ in frames]
        same = 0
        while same < min(len(keys), len(open_calls)) and open_calls[same][0] == keys[same]:
            same += 1
        close(same, at)
        open_calls.extend(((name, file), at, line) for name, file, line in frames[same:])
        last = at
    close(0, last + gap)
    data = {"traceEvents": events, "fettle": {"step": number, "sampled_every_ms": 5, "samples": len(samples)}}
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(data))
    partial.replace(path)


class _DeviceMeter:
    """NVML's utilisation, asked twice a second: the share of its last period in which a kernel ran."""

    def __init__(self, on_gpu: bool) -> None:
        self._busy: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fettle-nvml", daemon=True) if on_gpu else None

    def idle(self) -> float | None:
        """Share of the time without a kernel; None if NVML told nothing."""
        return 1 - statistics.fmean(self._busy) if self._busy else None

    def __enter__(self) -> _DeviceMeter:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        import torch

        while not self._stop.wait(0.5):
            try:
                self._busy.append(torch.cuda.utilization() / 100)
            except Exception:  # no NVML, or no right to ask it: the rest of the account stands without
                return
