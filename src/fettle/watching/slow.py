"""A slow step, looked at while it is still going on: its stack sampled, and written as a trace."""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from fettle.errors import is_program
from fettle.files import write_bytes

_MOST_SAMPLES = 20_000
_PERIOD_S, _SELDOM_S = 0.005, 0.05
"""Every wake-up takes the interpreter's lock, and a core, from the loop."""

Sample = tuple[int, tuple[tuple[str, str, int], ...]]
"""perf_counter_ns, and frames from the outermost in: function, file, line."""


class Sampler:
    """A thread that looks now and then whether a step is late, and then samples the loop's stack until it ends.

    The loop passes it nothing: `lateness` reads the account, and gives how many steps have ended and by how many
    nanoseconds the one that goes on is late. So a step costs nothing here. `thread` is the loop's.
    """

    def __init__(self, lateness: Callable[[], tuple[int, float]], thread: int) -> None:
        self._lateness, self._watched = lateness, thread
        self._samples: list[Sample] = []
        self._sampled = -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fettle-watch", daemon=True)

    def of(self, number: int) -> list[Sample]:
        """What was seen of the step with so many steps before it."""
        return list(self._samples) if self._sampled == number else []

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        wait_s = _PERIOD_S
        while not self._ended.wait(wait_s):
            number, late_ns = self._lateness()
            if late_ns < 0:
                wait_s = max(min(-late_ns / 1e9, 0.1), _SELDOM_S)
                continue
            wait_s = _PERIOD_S
            frame = sys._current_frames().get(self._watched)
            if self._lateness()[0] != number or frame is None:
                continue
            if self._sampled != number:
                self._samples, self._sampled = [], number
            if len(self._samples) < _MOST_SAMPLES:
                self._samples.append((time.perf_counter_ns(), _frames(frame)))
            del frame


def _frames(frame: FrameType | None) -> tuple[tuple[str, str, int], ...]:
    frames: list[tuple[str, str, int]] = []
    while frame is not None and len(frames) < 100:
        frames.append((frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(frames))


def hottest(samples: list[Sample]) -> str | None:
    """The innermost line outside installed packages and this package, over all samples."""
    counts = Counter[str]()
    for _, frames in samples:
        for _, file, line in reversed(frames):
            if is_program(file):
                counts[f"{file}:{line}"] += 1
                break
    if not counts:
        return None
    ((place, count),) = counts.most_common(1)
    return f"{place} ({count / len(samples):.0%} of samples)"


def numbered(path: Path, number: int) -> Path:
    """The trace of another slow step, beside that of the first at `path`."""
    ends = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return path.with_name(f"{path.name.removesuffix(ends)}-{number}{ends}")


def write_samples(path: Path, samples: list[Sample], number: int) -> None:
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

    for at, frames in samples:
        keys = [(name, file) for name, file, _ in frames]
        same = 0
        while same < min(len(keys), len(open_calls)) and open_calls[same][0] == keys[same]:
            same += 1
        close(same, at)
        open_calls.extend(((name, file), at, line) for name, file, line in frames[same:])
    close(0, samples[-1][0] + gap)
    data = {"traceEvents": events, "fettle": {"step": number, "sampled_every_ms": 5, "samples": len(samples)}}
    content = json.dumps(data).encode()
    write_bytes(path, gzip.compress(content) if path.suffix == ".gz" else content)
