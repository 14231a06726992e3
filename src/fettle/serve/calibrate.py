"""Calibration: what a call of a package costs for each batch size, measured in worker processes, without HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fettle.errors import UsageError
from fettle.serve.package import Package


def sizes_up_to(most: int) -> list[int]:
    """The batch sizes to begin with: 1, 2, 3, 4, 6, 8, 12, 16, ... and the largest."""
    found = {1, most}
    power = 1
    while power <= most:
        found |= {size for size in (power, power * 3 // 2) if size <= most}
        power *= 2
    return sorted(found - {0})


def calibrate(
    package: Package, *, most: int, workers: int = 1, threads: int = 1, limit_s: float = 0.0, seconds: float = 0.5,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[int, tuple[float, ...]]:  # fmt: skip
    """Samples of seconds a call, by rows, with so many workers computing at once.

    Between two sizes whose neighbours do not lie on a line the size in the middle is measured too: cost curves have
    steps. Sizes whose call alone takes longer than the limit are left out, but for the first.
    """
    crew = [_Process(package, threads, most) for _ in range(workers)]
    try:
        found: dict[int, tuple[float, ...]] = {}
        todo = sizes_up_to(most)
        while todo:
            size = todo.pop(0)
            if size in found:
                continue
            tell(f"cost of {size} row{'s' if size > 1 else ''}, {workers} x {threads} threads")
            found[size] = _together(crew, size, seconds)
            if limit_s and _median(found[size]) > limit_s and size > 1:
                todo = [other for other in todo if other < size]
            if not todo:
                todo = _steps(found, limit_s)
        return dict(sorted(found.items()))
    finally:
        for process in crew:
            process.close()


def _steps(found: dict[int, tuple[float, ...]], limit_s: float) -> list[int]:
    """Sizes to add: in the middle of gaps beside a size that lies 8% off the line between its neighbours."""
    rows = sorted(found)
    curve = {size: _median(found[size]) for size in rows}
    wanted = set()
    for left, middle, right in zip(rows, rows[1:], rows[2:], strict=False):
        share = (middle - left) / (right - left)
        line = curve[left] + share * (curve[right] - curve[left])
        if abs(curve[middle] - line) > 0.08 * line:
            wanted |= {(a + b) // 2 for a, b in ((left, middle), (middle, right)) if b - a > 1}
    return sorted(size for size in wanted if size not in found and not (limit_s and curve[rows[0]] > limit_s))


def _together(crew: Sequence[_Process], size: int, seconds: float) -> tuple[float, ...]:
    """Samples of all processes, which compute at the same time as they would when serving."""
    for process in crew:
        process.ask(size, 0.0, least=3)
    for process in crew:
        process.read()
    for process in crew:
        process.ask(size, seconds, least=8)
    samples = [sample for process in crew for sample in process.read()]
    return tuple(samples)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


class _Process:
    """A process that times calls: told a size and seconds, it answers with samples."""

    def __init__(self, package: Package, threads: int, most: int) -> None:
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fettle.serve.calibrate", str(theirs.fileno()), str(package.folder), str(threads)],
            pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": str(threads)}, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._file = ours.makefile("rwb")
        ours.close()

    def ask(self, size: int, seconds: float, least: int) -> None:
        """Begin to time calls of this size."""
        self._file.write(json.dumps({"size": size, "seconds": seconds, "least": least}).encode() + b"\n")
        self._file.flush()

    def read(self) -> list[float]:
        """The samples. Raises `UsageError` where the process failed."""
        said = json.loads(self._file.readline() or b'{"error": "it ended"}')
        if "error" in said:
            raise UsageError(f"the package cannot be measured: {said['error']}")
        return [float(value) for value in said["samples"]]

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._file.close()


def _serve() -> None:
    """In the process: answer each line with samples."""
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
        runner = Runner(open_package(Path(sys.argv[2])))
    except Exception as error:
        for _ in file:
            answer({"error": first_line(error)})
        return
    for line in file:
        asked = json.loads(line)
        try:
            parts = [runner.sample(asked["size"])]
            samples: list[float] = []
            end = time.perf_counter() + asked["seconds"]
            while len(samples) < asked["least"] or (time.perf_counter() < end and len(samples) < 1000):
                began = time.perf_counter()
                runner.run(parts, 0)
                samples.append(time.perf_counter() - began)
            answer({"samples": samples})
        except Exception as error:
            answer({"error": first_line(error)})


if __name__ == "__main__":
    _serve()
