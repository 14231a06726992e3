"""Calibration: what a call of a package costs for each batch size, measured in worker processes, without HTTP.

A size at which the workers fail (no memory, an error) ends the search for larger ones, not the calibration: what was
measured below it stands, and the reason is kept.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fettle.errors import UsageError
from fettle.files import plain
from fettle.measure import Load, Surroundings, busy_load
from fettle.package.manifest import Package
from fettle.package.settings import powers
from fettle.procs.child import ChildError, Request
from fettle.procs.limits import resident_bytes
from fettle.procs.parent import Parent, be_a_worker
from fettle.slo.stopping import Stoppable, Stopped
from fettle.units import count_text

T = TypeVar("T")
START_S, ANSWER_S = 1800.0, 300.0
"""The longest that loading, and that timing one batch size, may take."""
PAUSE_S = 0.02
"""Before every fourth call, at most: as long as the call itself. A server that keeps a limit pauses often, and a call
after a pause was seen to take a twelfth to a sixth longer."""
LEAST_RESTED = 4
"""Fewer calls after a pause say nothing of how such calls scatter."""


class Calibration(msgspec.Struct):
    """What calls cost on one machine, for so many workers that compute at once. Earlier versions kept more."""

    samples: dict[int, tuple[float, ...]] = {}
    """Seconds of a call, by rows. Empty where not even one row could be computed."""
    failures: dict[int, str] = {}
    """Why, by the rows at which the workers failed; 0: while loading."""
    memory_bytes: dict[int, int] = {}
    """Memory of all workers by rows of a call: resident, or on the device where it is not the CPU."""
    rested: dict[int, tuple[float, ...]] = {}
    """Seconds of a call after a pause, by rows. `samples` are of calls right after another."""
    loads: dict[int, dict[str, Any]] = {}
    """What others had of the machine meanwhile, by rows: a `Load` each, as plain data."""

    @property
    def load(self) -> Load:
        """What others had of the machine."""
        return busy_load(map(Load.from_json, self.loads.values()))

    def memory_at(self, rows: int) -> int:
        """Bytes of all workers where calls have up to so many rows; 0 where nothing is known."""
        return max((memory for size, memory in self.memory_bytes.items() if size <= rows), default=0)


def sizes_up_to(most: int) -> list[int]:
    """The batch sizes to begin with: 1, 2, 3, 4, 6, 8, 12, 16, ... and the largest."""
    return sorted({size for power in powers(most) for size in (power, power * 3 // 2) if size <= most})


def calibrate(
    package: Package, *, most: int, workers: int = 1, threads: int = 1, device: str = "cpu", limit_s: float = 0.0,
    seconds: float = 1.0, on_progress: Callable[[str], None] = lambda text: None, around: Surroundings | None = None,
) -> Calibration:  # fmt: skip
    """Samples of seconds a call, by rows, with so many workers computing at once.

    Between two sizes whose neighbours do not lie on a line the size in the middle is measured too: cost curves have
    steps. A package with buckets is timed at those. Sizes whose call alone takes longer than the limit are left out,
    but for the first. Failures of the workers are part of what is returned. A size that others disturbed is timed again
    once they are gone, as far as `around` waits for that. Raises `Stopped` once it is stopped.
    """
    calibration, around = Calibration(), around or Surroundings()
    if around.stopped():
        raise Stopped
    processes = _Workers(package, workers, threads, device, around.stopped)
    try:
        if not _started(processes, calibration):
            return calibration
        buckets = package.settings.buckets
        todo = [*buckets[: bisect_left(buckets, most) + 1]] or sizes_up_to(most)
        while todo:
            if around.stopped():
                raise Stopped
            size = todo.pop(0)
            on_progress(f"cost of {count_text(size, 'row')}, {workers} x {count_text(threads, 'thread')}, {device}")
            answers = _time_size(processes, calibration, size, seconds, around)
            if not calibration.samples:
                break
            if not answers or (limit_s and size > 1 and statistics.median(calibration.samples[size]) > limit_s):
                todo = [other for other in todo if other < size]
            least = statistics.median(calibration.samples[min(calibration.samples)])
            if not todo and not (limit_s and least > limit_s):
                todo = _steps(calibration, buckets)
            # A process that ran out of memory may be in any state: what is still to be measured gets new ones.
            if not answers and not (todo and _started(processes, calibration)):
                break
        calibration.samples = dict(sorted(calibration.samples.items()))
        return calibration
    finally:
        processes.close()


def _started(processes: _Workers, made: Calibration) -> bool:
    try:
        processes.start()
    except (ChildError, UsageError) as failure:  # a recipe that cannot work on this device, say: another may do
        made.failures.setdefault(0, str(failure))
        return False
    return True


def _time_size(processes: _Workers, made: Calibration, size: int, seconds: float, around: Surroundings) -> bool:
    """Time calls of this size; whether they answered."""
    try:
        timed, load = around.watched(lambda: processes.time(size, seconds))
    except ChildError as failure:
        made.failures[size] = str(failure)
        return False
    made.samples[size], rested, made.memory_bytes[size] = timed
    made.loads[size] = plain(load)
    if len(rested) >= LEAST_RESTED:
        made.rested[size] = rested
    return True


def _steps(made: Calibration, buckets: Sequence[int] = ()) -> list[int]:
    """Sizes to add that did not fail: in the middle of gaps beside a size that lies 8% off the line between its
    neighbours.

    None where calls have the sizes of `buckets` only.
    """
    if buckets:
        return []
    rows = sorted(made.samples)
    curve = {size: statistics.median(made.samples[size]) for size in rows}
    wanted = set()
    for left, middle, right in zip(rows, rows[1:], rows[2:], strict=False):
        share = (middle - left) / (right - left)
        line = curve[left] + share * (curve[right] - curve[left])
        if abs(curve[middle] - line) > 0.08 * line:
            wanted |= {(a + b) // 2 for a, b in ((left, middle), (middle, right)) if b - a > 1}
    return sorted(wanted - made.samples.keys() - made.failures.keys())


class _Load(Request, tag="loading"):
    folder: str
    threads: int
    device: str


class _Time(Request, tag="timing"):
    size: int
    seconds: float
    least: int


class _Timed(msgspec.Struct):
    samples: list[float]
    """Seconds of a call."""
    rested: list[float]
    """Times of a call after a pause."""
    memory: int


class _Workers:
    """Processes that compute at the same time, as they would when serving."""

    def __init__(
        self, package: Package, workers: int, threads: int, device: str, stopped: Callable[[], bool]
    ) -> None:  # fmt: skip
        self._load, self._workers, self._stopped = _Load(str(package.folder), threads, device), workers, stopped
        self._children: list[Stoppable] = []

    def start(self) -> None:
        """Begin, or begin anew. Raises `ChildError` where the package cannot be loaded."""
        self.close()
        variables = {"OMP_NUM_THREADS": str(self._load.threads), "PYTHONSAFEPATH": "1"}  # as a server's workers have
        for _ in range(self._workers):
            self._children.append(Stoppable("fettle.slo.calibrate", variables, self._stopped))
        self._ask(self._load, type(None), START_S)

    def time(self, size: int, seconds: float) -> tuple[tuple[float, ...], tuple[float, ...], int]:
        """Samples of all of them, those after a pause, and their memory."""
        self._ask(_Time(size, 0.0, 3), _Timed, START_S)  # the first calls may compile
        answers = self._ask(_Time(size, seconds, 3 * LEAST_RESTED + 1), _Timed, ANSWER_S)
        samples, rested = chain(*(one.samples for one in answers)), chain(*(one.rested for one in answers))
        return tuple(samples), tuple(rested), sum(one.memory for one in answers)

    def close(self) -> None:
        for child in self._children:
            child.close()
        self._children = []

    def _ask(self, request: Request, answer: type[T], timeout_s: float) -> list[T]:
        """The answers of all, who work on it at the same time."""
        for child in self._children:
            child.send(request)
        return [child.receive(answer, timeout_s) for child in self._children]


# -- in each process ---------------------------------------------------------------------------------------------------


class _Worker:
    runner: Any
    device: str

    def answer(self, request: _Load | _Time) -> object:
        if isinstance(request, _Time):
            return self._timed(request)
        self._load(request)
        return None

    def _load(self, load: _Load) -> None:
        import torch

        from fettle.package.manifest import open_package
        from fettle.package.model_runner import ModelRunner

        torch.set_num_threads(load.threads)
        self.runner, self.device = ModelRunner(open_package(Path(load.folder)), load.device), load.device

    def _timed(self, request: _Time) -> _Timed:
        import torch

        on_gpu = self.device.startswith("cuda")
        if on_gpu and not request.seconds:  # the first calls of a size, whose memory is not the last size's
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        parts = [self.runner.sample(request.size)]
        samples: list[float] = []
        rested: list[float] = []
        took = 0.0
        end = time.perf_counter() + request.seconds
        while len(samples) < request.least or (time.perf_counter() < end and len(samples) < 1000):
            pause = request.seconds > 0 and len(samples) == 3 * (len(rested) + 1)
            if pause:
                time.sleep(min(took, PAUSE_S))
            began = time.perf_counter()
            self.runner.run(parts, 0)
            took = time.perf_counter() - began
            (rested if pause else samples).append(took)
        memory = resident_bytes()
        if on_gpu:
            memory = torch.cuda.max_memory_reserved(self.device)
        return _Timed(samples, rested, memory)


if __name__ == "__main__":
    be_a_worker()
    Parent().serve(_Load | _Time, _Worker().answer)
