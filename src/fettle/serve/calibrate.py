"""Calibration: what a call of a package costs for each batch size, measured in worker processes, without HTTP.

A size at which the workers fail (no memory, an error) ends the search for larger ones, not the calibration: what was
measured below it stands, and the reason is kept.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fettle.procs.parent import die_with_parent
from fettle.serve.package import Package

START_S, ANSWER_S = 600.0, 300.0
"""The longest that loading, and that timing one batch size, may take."""
PAUSE_S = 0.02
"""Before every fourth call, at most: as long as the call itself. A server that keeps a limit pauses often, and a call
after a pause was seen to take a twelfth to a sixth longer."""
LEAST_RESTED = 4
"""Fewer calls after a pause say nothing of how such calls scatter."""
PAD_ERROR = 0.02
"""Rows of a filled-up call may differ by this relative L2 error from the same rows alone: kernels round differently by
batch size. A model whose rows influence each other differs by far more."""


class Calibration(msgspec.Struct, forbid_unknown_fields=True):
    """What calls cost on one machine, for so many workers that compute at once."""

    samples: dict[int, tuple[float, ...]] = {}
    """Seconds of a call, by rows. Empty where not even one row could be computed."""
    failures: dict[int, str] = {}
    """Why, by the rows at which the workers failed; 0: while loading."""
    memory_bytes: dict[int, int] = {}
    """Of all workers after calls of so many rows: resident, or on the device where it is not the CPU."""
    pad_error: float = 0.0
    """Relative L2 error of rows in a call that was filled up with copies of the last, against the same rows alone."""
    rested: dict[int, tuple[float, ...]] = {}
    """Seconds of a call after a pause, by rows. `samples` are of calls right after another."""

    @property
    def may_pad(self) -> bool:
        """Whether adding rows to a call leaves the others' answers as they are."""
        return self.pad_error <= PAD_ERROR

    def memory_at(self, rows: int) -> int:
        """Bytes of all workers where calls have up to so many rows; 0 where nothing is known."""
        return max((memory for size, memory in self.memory_bytes.items() if size <= rows), default=0)


class Stopped(Exception):
    """Whoever asked for the measurement wants it no more."""


class WorkerFailure(Exception):
    """A calibrating process failed; the text is for people."""


def sizes_up_to(most: int) -> list[int]:
    """The batch sizes to begin with: 1, 2, 3, 4, 6, 8, 12, 16, ... and the largest."""
    found = {1, most}
    power = 1
    while power <= most:
        found |= {size for size in (power, power * 3 // 2) if size <= most}
        power *= 2
    return sorted(found - {0})


def calibrate(
    package: Package, *, most: int, workers: int = 1, threads: int = 1, device: str = "cpu", limit_s: float = 0.0,
    seconds: float = 1.0, tell: Callable[[str], None] = lambda text: None,
    stopped: Callable[[], bool] = lambda: False,
) -> Calibration:  # fmt: skip
    """Samples of seconds a call, by rows, with so many workers computing at once.

    Between two sizes whose neighbours do not lie on a line the size in the middle is measured too: cost curves have
    steps. A package with buckets is timed at those. Sizes whose call alone takes longer than the limit are left out,
    but for the first. Failures of the workers are part of what is returned. Raises `Stopped` between two sizes once
    `stopped` says so.
    """
    made = Calibration({}, {}, {}, rested={})
    if stopped():
        raise Stopped
    crew = _Crew(package, workers, threads, device)
    try:
        if not _started(crew, made):
            return made
        buckets = package.settings.buckets
        todo = [*buckets[: bisect_left(buckets, most) + 1]] or sizes_up_to(most)
        while todo:
            if stopped():
                raise Stopped
            size = todo.pop(0)
            tell(f"cost of {size} row{'s' if size > 1 else ''}, {workers} x {threads} threads, {device}")
            try:
                made.samples[size], rested, made.memory_bytes[size] = crew.time(size, seconds)
                if len(rested) >= LEAST_RESTED:
                    made.rested[size] = rested
            except WorkerFailure as failure:
                made.failures[size] = str(failure)
                todo = [other for other in todo if other < size]
                # A process that ran out of memory may be in any state: what is still to be measured gets new ones.
                todo = todo or _steps(made.samples, buckets)
                if not made.samples or not todo or not _started(crew, made):
                    break
                continue
            if limit_s and _median(made.samples[size]) > limit_s and size > 1:
                todo = [other for other in todo if other < size]
            if not todo and not (limit_s and _median(made.samples[1]) > limit_s):
                todo = _steps(made.samples, buckets)
        made.samples = dict(sorted(made.samples.items()))
        if made.samples:
            with contextlib.suppress(WorkerFailure):  # then nothing is said of padding, and nothing padded
                made.pad_error = 1e9
                made.pad_error = crew.pad_error(max(made.samples))
        return made
    finally:
        crew.close()


def _started(crew: _Crew, made: Calibration) -> bool:
    try:
        crew.start()
    except WorkerFailure as failure:
        made.failures.setdefault(0, str(failure))
        return False
    return True


def _steps(found: dict[int, tuple[float, ...]], buckets: Sequence[int] = ()) -> list[int]:
    """Sizes to add: in the middle of gaps beside a size that lies 8% off the line between its neighbours.

    None where calls have the sizes of `buckets` only.
    """
    if buckets:
        return []
    rows = sorted(found)
    curve = {size: _median(found[size]) for size in rows}
    wanted = set()
    for left, middle, right in zip(rows, rows[1:], rows[2:], strict=False):
        share = (middle - left) / (right - left)
        line = curve[left] + share * (curve[right] - curve[left])
        if abs(curve[middle] - line) > 0.08 * line:
            wanted |= {(a + b) // 2 for a, b in ((left, middle), (middle, right)) if b - a > 1}
    return sorted(size for size in wanted if size not in found)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


class _Crew:
    """Processes that compute at the same time, as they would when serving."""

    def __init__(self, package: Package, workers: int, threads: int, device: str) -> None:
        self._package, self._workers, self._threads, self._device = package, workers, threads, device
        self._processes: list[_Process] = []

    def start(self) -> None:
        """Begin, or begin anew. Raises `WorkerFailure` where the package cannot be loaded."""
        self.close()
        self._processes = [_Process(self._package, self._threads, self._device) for _ in range(self._workers)]
        for process in self._processes:
            process.read(START_S)

    def time(self, size: int, seconds: float) -> tuple[tuple[float, ...], tuple[float, ...], int]:
        """Samples of all of them, those after a pause, and their memory."""
        for process in self._processes:
            process.ask({"size": size, "seconds": 0.0, "least": 3})
        for process in self._processes:
            process.read(START_S)  # the first calls may compile
        for process in self._processes:
            process.ask({"size": size, "seconds": seconds, "least": 3 * LEAST_RESTED + 1})
        said = [process.read() for process in self._processes]
        samples, rested = (
            tuple(float(value) for answer in said for value in answer[which]) for which in ("samples", "rested")
        )
        return samples, rested, sum(int(answer["memory"]) for answer in said)

    def pad_error(self, size: int) -> float:
        """How much rows change when their call is filled up."""
        if size < 2:
            return 0.0
        self._processes[0].ask({"rows": size // 2, "size": size})
        return float(self._processes[0].read(START_S)["error_of_rows"])

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.close()
        self._processes = []


class _Process:
    """A process that times calls: asked in a line of JSON, it answers in one. Its first line says that it is loaded."""

    def __init__(self, package: Package, threads: int, device: str) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fettle.serve.calibrate", str(theirs.fileno()), str(package.folder), str(threads),
             device],
            pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._socket, self._file = ours, ours.makefile("rb")

    def ask(self, what: dict[str, Any]) -> None:
        """Begin to work on something."""
        with contextlib.suppress(OSError):  # it has ended: `read` says how
            self._socket.sendall(json.dumps(what).encode() + b"\n")

    def read(self, seconds: float = ANSWER_S) -> dict[str, Any]:
        """The answer. Raises `WorkerFailure` where the process failed, ended or hangs."""
        self._socket.settimeout(seconds)
        try:
            line = self._file.readline()
        except TimeoutError:
            raise WorkerFailure(f"the worker did not answer within {seconds:.0f} s") from None
        except OSError:
            line = b""
        if not line:
            raise WorkerFailure(_how_it_ended(self._process))
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise WorkerFailure(str(said["error"]))
        return said

    def close(self) -> None:
        """End it, and what it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._file.close()
        self._socket.close()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)
    code = process.returncode
    if code == -signal.SIGKILL:
        return "the worker was killed (signal 9): most often the machine had no memory left"
    return f"the worker ended with signal {-code}" if code is not None and code < 0 else "the worker ended"


def _serve() -> None:
    """In the process: load, say so, and answer each line."""
    die_with_parent()
    link = socket.socket(fileno=int(sys.argv[1]))
    file = link.makefile("rwb")

    def answer(said: object) -> None:
        file.write(json.dumps(said).encode() + b"\n")
        file.flush()

    from fettle.errors import first_line

    try:
        import torch

        from fettle.serve.package import open_package
        from fettle.serve.runner import Runner

        torch.set_num_threads(int(sys.argv[3]))
        runner = Runner(open_package(Path(sys.argv[2])), sys.argv[4])
    except Exception as error:
        answer({"error": first_line(error)})
        return
    answer({"loaded": True})
    for line in file:
        asked = json.loads(line)
        try:
            answer(_error_of_rows(runner, **asked) if "rows" in asked else _timed(runner, sys.argv[4], **asked))
        except Exception as error:
            answer({"error": first_line(error)})


def _timed(runner: Any, device: str, size: int, seconds: float, least: int) -> dict[str, Any]:
    from fettle.serve._worker import resident_bytes

    parts = [runner.sample(size)]
    samples: list[float] = []
    rested: list[float] = []
    took = 0.0
    end = time.perf_counter() + seconds
    while len(samples) < least or (time.perf_counter() < end and len(samples) < 1000):
        pause = seconds > 0 and len(samples) == 3 * (len(rested) + 1)
        if pause:
            time.sleep(min(took, PAUSE_S))
        began = time.perf_counter()
        runner.run(parts, 0)
        took = time.perf_counter() - began
        (rested if pause else samples).append(took)
    memory = resident_bytes()
    if device.startswith("cuda"):
        import torch

        memory = torch.cuda.max_memory_reserved(device)
    return {"samples": samples, "rested": rested, "memory": memory}


def _error_of_rows(runner: Any, rows: int, size: int) -> dict[str, Any]:
    """Rows that all differ (each is the sample's, rolled by its number), computed alone and in a call of `size`."""
    import numpy as np

    part = [
        np.stack([np.roll(row, number, axis=-1) if row.ndim else row for number, row in enumerate(array)])
        if spec.batched
        else array
        for array, spec in zip(runner.sample(rows), runner.inputs, strict=True)
    ]
    worst = 0.0
    for alone, filled in zip(runner.run([part], 0), runner.run([part], size), strict=True):
        if alone.dtype.kind == "f":
            apart = np.linalg.norm(filled.astype(float) - alone.astype(float))
            error = float(apart / max(float(np.linalg.norm(alone.astype(float))), 1e-12))
        else:
            error = float(alone.shape != filled.shape or (alone != filled).mean())
        worst = max(worst, error) if math.isfinite(error) else 1e9
    return {"error_of_rows": worst}


if __name__ == "__main__":
    _serve()
