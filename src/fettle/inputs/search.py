"""Which loader setting ends the waiting, in few interleaved runs.

Each run is a process of its own with a time limit, killed with its loader workers. The pipeline as given is always
among the settings. First the costs: how long a step takes alone, how long one worker needs for a batch; they say
whether workers can help at all and how many are worth trying. Then rounds in random order, and the smallest setting
within 3% of the best.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from fettle.errors import UsageError
from fettle.inputs.lints import Lint

WITHIN = 0.03
"""A smaller setting is taken where it is at most this much slower than the best."""
_ROUNDS = 3


@dataclass(frozen=True)
class Setting:
    """What a DataLoader is given. Workers, where there are any, persist from epoch to epoch."""

    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False

    @property
    def code(self) -> str:
        """The arguments as they are written."""
        pin = "pin_memory=True, " if self.pin_memory else ""
        if not self.num_workers:
            return f"{pin}num_workers=0"
        return f"{pin}num_workers={self.num_workers}, prefetch_factor={self.prefetch_factor}, persistent_workers=True"


@dataclass
class Measured:
    """One setting over its rounds, or why it failed."""

    setting: Setting
    rates: list[float] = field(default_factory=list)
    """Batches a second, one number a round."""
    waiting: list[float] = field(default_factory=list)
    """Share of the time spent waiting for the next batch, a round."""
    start_s: float = math.nan
    """To the first batch: workers start here."""
    failure: str = ""

    @property
    def rate(self) -> float:
        return statistics.median(self.rates) if self.rates else 0.0


@dataclass(frozen=True)
class Found:
    """What was found about a pipeline. Times in seconds."""

    target: str
    given: Measured
    best: Measured
    settings: Sequence[Measured]
    waiting: float
    """Share of a step spent waiting for data, as given."""
    step_s: float
    """A step alone on a batch that is there already; 0 where the target has no step."""
    batch_p50_s: float
    batch_p95_s: float
    """One batch produced by one process."""
    cores: int
    verdict: str
    lints: Sequence[Lint] = ()
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def bound(self) -> float:
        """The most that removing the wait could bring: 1 / (1 - waiting)."""
        return 1 / max(1e-9, 1 - self.waiting)

    @property
    def code(self) -> str:
        """The line to take away."""
        return f"DataLoader(dataset, ..., {self.best.setting.code})"


def measure_and_search(
    target: str,
    *,
    slice_s: float = 1.5,
    timeout_s: float = 120.0,
    ranks: int = 1,
    tell: Callable[[str], None] = lambda text: None,
) -> Found:
    """Measure the pipeline of `target` (``file.py:factory``) and search its setting.

    The factory returns a DataLoader, a dataset, or (either, step): `step` is called with each batch and stands for the
    rest of the loop. `ranks` is how many processes of the job share this host. Raises `UsageError` for a target that
    is none of these or whose given setting does not work.
    """
    began = time.monotonic()
    cores = usable_cores() // max(1, ranks) or 1
    tell("the pipeline as given")
    alone = run_once(target, Setting(), slice_s, timeout_s, step_alone=True)
    if "error" in alone:
        raise UsageError(f"the pipeline fails without workers: {alone['error']}")
    given_setting = Setting(int(alone["num_workers"]), int(alone["prefetch_factor"]), bool(alone["pin_memory"]))
    waits = sorted(alone["waits"])
    batch_p50, batch_p95 = statistics.median(waits), waits[min(len(waits) - 1, int(0.95 * len(waits)))]
    step_s = float(alone["step_s"] or 0.0)
    lone = Measured(Setting(), [float(alone["rate"])], [_share(alone)], float(alone["start_s"]))
    measured = {lone.setting: lone}
    why = cannot_help(batch_p50, step_s, cores, float(alone["cpu_share"]))
    tried = [given_setting] if why else candidates(alone, batch_p95, step_s, cores, given_setting)
    interrupted = False
    try:
        for number in range(_ROUNDS):
            live = [s for s in dict.fromkeys([given_setting, Setting(), *tried]) if _alive(measured, s, number)]
            random.Random(number).shuffle(live)
            for setting in live:
                tell(f"round {number + 1} of {_ROUNDS}: {setting.code}")
                _add(measured, setting, run_once(target, setting, slice_s, timeout_s))
    except KeyboardInterrupt:
        interrupted = True  # what is known is kept and shown
    given = measured.get(given_setting, lone)
    if given.failure:
        raise UsageError(f"the pipeline as given fails: {given.failure}")
    best = smallest_of_the_best(list(measured.values()), given)
    waiting = statistics.median(given.waiting)
    lints: list[Lint] = []
    if not interrupted:
        tell("looking for faults")
        answer = run_once(target, None, 0.0, timeout_s, do="lint")
        lints = [Lint(**item) for item in answer.get("lints", [])]
    return Found(
        target, given, best, list(measured.values()), waiting, step_s, batch_p50, batch_p95, cores,
        _verdict(given, best, waiting, why), lints, time.monotonic() - began, interrupted,
    )  # fmt: skip


def cannot_help(batch_s: float, step_s: float, cores: int, cpu_share: float) -> str:
    """Why workers cannot help, as a sentence; empty where they may."""
    if step_s and batch_s < WITHIN * step_s:
        return f"Workers cannot help: a batch takes {batch_s / (batch_s + step_s):.1%} of a step."
    if not step_s and batch_s < 2e-4:
        return f"Workers cannot help: a batch is there in {batch_s * 1e6:.0f} us, less than handing it over takes."
    if cores == 1 and cpu_share > 0.9:
        return "Workers cannot help: there is one core, and loading and stepping keep it busy."
    return ""


def candidates(alone: dict[str, Any], batch_p95: float, step_s: float, cores: int, given: Setting) -> list[Setting]:
    """Settings worth a run: around the number of workers whose batches would keep up with the step.

    Where producing a batch mostly waits (files, network), more workers than cores make sense; else the cores are the
    limit. What would not fit into memory or /dev/shm is left out.
    """
    waits_mostly = float(alone["cpu_share"]) < 0.5
    limit = 4 * cores if waits_mostly else cores
    wanted = math.ceil(batch_p95 / step_s) if step_s else limit
    numbers = sorted({max(1, min(limit, number)) for number in (1, wanted // 2, wanted, wanted + 1, 2 * wanted, limit)})
    uneven = statistics.median(alone["waits"]) * 3 < batch_p95
    prefetch = 4 if uneven else 2
    pin = bool(alone["cuda"])
    room = in_flight_limit()
    found = [Setting(number, prefetch, pin) for number in numbers]
    return [s for s in found if s.num_workers * s.prefetch_factor * int(alone["batch_bytes"]) <= room and s != given]


def in_flight_limit() -> int:
    """Bytes that batches under way may take: half of what /dev/shm and memory have free."""
    free = psutil.virtual_memory().available
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = min(free, shutil.disk_usage(shared).free)
    return int(free // 2)


def usable_cores() -> int:
    """Cores this process may use: its affinity and the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return cores


def smallest_of_the_best(measured: Sequence[Measured], given: Measured) -> Measured:
    """The setting with fewest workers within 3% of the fastest; the given one where that is among them."""
    able = [item for item in measured if item.rates and not item.failure]
    top = max(item.rate for item in able)
    near = [item for item in able if item.rate >= (1 - WITHIN) * top]
    if given in near:
        return given
    return min(near, key=lambda item: (item.setting.num_workers, item.setting.prefetch_factor))


def run_once(
    target: str,
    setting: Setting | None,
    seconds: float,
    timeout_s: float,
    *,
    do: str = "measure",
    step_alone: bool = False,
) -> dict[str, Any]:
    """One run in a process of its own, ended with its children. `error` in the answer says what went wrong."""
    import torch

    request = {
        "do": do, "target": target, "seconds": seconds, "step_alone": step_alone, "threads": torch.get_num_threads(),
        "setting": None if setting is None else vars(setting),
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "fettle.inputs._run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(json.dumps(request) + "\n", timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"timed out after {timeout_s:.0f} s: a worker may hang"}
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        return {"error": f"the process ended with code {process.returncode}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    if "usage" in answer:
        raise UsageError(answer["usage"])
    return answer


def _alive(measured: dict[Setting, Measured], setting: Setting, number: int) -> bool:
    """Whether a setting is worth another round: it works, and is within 15% of the best so far."""
    known = measured.get(setting)
    if known is None or number == 0:
        return True
    top = max(item.rate for item in measured.values())
    return not known.failure and known.rate >= 0.85 * top


def _add(measured: dict[Setting, Measured], setting: Setting, answer: dict[str, Any]) -> None:
    item = measured.setdefault(setting, Measured(setting))
    if "error" in answer:
        item.failure = str(answer["error"])
        return
    item.rates.append(float(answer["rate"]))
    item.waiting.append(_share(answer))
    item.start_s = float(answer["start_s"])


def _share(answer: dict[str, Any]) -> float:
    return float(sum(answer["waits"]) / max(sum(answer["walls"]), 1e-12))


def _verdict(given: Measured, best: Measured, waiting: float, why: str) -> str:
    if why:
        return why
    gain = best.rate / given.rate
    if best is given or gain < 1 + WITHIN:
        return f"No setting is more than 3% faster than the one given, which waits {waiting:.0%} of the time."
    return f"{gain:.2f}x the batches a second with {best.setting.code} ({waiting:.0%} of the time was waiting)."
