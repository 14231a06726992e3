"""What the machine did beyond our processes: CPU time of others and of the hypervisor (`/proc/stat`), waiting
(our cgroup's `cpu.pressure`, else the machine's `/proc/pressure/cpu`), throttling by a cgroup's quota (`cpu.stat`), and
by heat (`thermal_throttle` of x86 cores).

The counters tick in hundredths of a second, so they are read over half a second at least. A source that is missing, or
that runs backwards, is NaN and decides nothing. Formats: the kernel's *proc* and *Control Group* documentation.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import psutil

from fettle.measure._load import Load, gpus_in_use, with_gpu
from fettle.procs.limits import affinity, control_groups

_WINDOW_S = 0.5
_TICKS = 100.0  # USER_HZ of /proc/stat
_STAT, _LOAD, _PRESSURE = Path("/proc/stat"), Path("/proc/loadavg"), Path("/proc/pressure/cpu")
_CORES = Path("/sys/devices/system/cpu")
_LONGEST = 1 << 18
"""More than the lines on cores in `/proc/stat` take."""
_LOOKED_AT = 4
"""Cores whose clock and heat are read: a machine may have hundreds, and each takes its time."""
_JUST_NOW_S = 0.02
"""`Surroundings` make no mark again so soon: one thing ends where the next begins, and a mark takes 2 ms."""
WAIT_S = 30.0
"""Longest that `Surroundings` wait for a quiet machine, all in all."""
T = TypeVar("T")


@dataclass(frozen=True)
class Reading:
    """The machine's counters at one moment; None where it does not have one."""

    at_s: float
    """Monotonic seconds, which stand still while the machine is suspended."""
    boot_s: float
    """Seconds since boot, which do not."""
    process_s: float = 0.0
    """CPU seconds of this process."""
    busy_s: float | None = None
    """CPU seconds of all processes on our cores."""
    steal_s: float | None = None
    pressure_s: float | None = None
    throttled_s: float | None = None
    clock_mhz: float | None = None
    overheated: float | None = None
    """How often heat has throttled a core so far."""
    cores: int = 1
    """Cores that we may use, which `busy_s` and `steal_s` are of."""


def read_machine() -> Reading:
    """The counters now."""
    busy_s, steal_s, cores = _cpu_times()
    boot = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
    return Reading(
        at_s=time.monotonic(),
        boot_s=boot,
        process_s=time.process_time(),
        busy_s=busy_s,
        steal_s=steal_s,
        pressure_s=_pressure_s(),
        throttled_s=throttled_s(),
        clock_mhz=max(_core_values("cpufreq/scaling_cur_freq"), default=0.0) / 1e3 or None,
        overheated=sum(_core_values("thermal_throttle/*_throttle_count")),
        cores=cores,
    )


class Watch:
    """Follows the machine while our processes are timed. `own_s` is told what CPU time they had."""

    def __init__(self, read: Callable[[], Reading] | None = None, stopped: Callable[[], bool] = lambda: False) -> None:
        self.stopped = stopped
        """Whether somebody wants an end: nothing is waited for then."""
        self.gpus: Sequence[str] = ()
        """What is looked at beside the cores, by UUID;"""
        self.own: set[int] = set()
        """our processes that use them."""
        self._read = read or read_machine
        self._own_s = 0.0
        self._fastest_mhz = 0.0
        self._readings: deque[tuple[Reading, float]] = deque()
        self.mark()

    def mark(self, own_s: float = 0.0) -> None:
        """A slice begins, or ends after `own_s` more CPU seconds of our processes."""
        self._own_s += own_s
        now = self._read()
        self._fastest_mhz = max(self._fastest_mhz, now.clock_mhz or 0.0)
        self._readings.append((now, self._own_s + now.process_s))
        while len(self._readings) > 2 and now.at_s - self._readings[1][0].at_s >= _WINDOW_S:
            self._readings.popleft()

    def restart(self) -> None:
        """Forget what was before: processes were started, whose time was not reported."""
        self._readings.clear()
        self.mark()

    def load(self, waits: float = math.nan) -> Load:
        """What others took since half a second before the last mark, or since the mark before it if that is longer
        ago; `waits` is what the slice itself says."""
        (first, first_own_s), (last, last_own_s) = self._readings[0], self._readings[-1]
        before = self._readings[-2][0] if len(self._readings) > 1 else first
        # A clock alone says nothing: idle cores have a low one, and a single busy core a higher one than many.
        is_hot = last.clock_mhz is not None and _difference(last.overheated, before.overheated) > 0
        load = replace(
            _load_between(first, last, last_own_s - first_own_s, since=before),
            waits=waits,
            pressure=_share(last.at_s - first.at_s)(_difference(last.pressure_s, first.pressure_s)),
            clock=(last.clock_mhz or 0.0) / self._fastest_mhz if is_hot else math.nan,
        )
        for gpu in self.gpus:
            load = with_gpu(load, gpu, self.own, last.at_s - first.at_s)
        return load

    def wait_for_quiet(self, most_s: float) -> bool:
        """Wait, all our processes stopped, until nobody else is busy; whether that came within `most_s`."""
        end = time.monotonic() + most_s
        self.restart()
        while time.monotonic() < end and not self.stopped():
            time.sleep(min(0.3, max(0.0, end - time.monotonic())))
            self.mark()
            load = self.load()
            if load.is_quiet and not load.pressure > 0.2:
                return True
            if len(self._readings) > 2:
                self._readings.popleft()
        return False


@dataclass
class Patience:
    """How long may be waited for a quiet machine. What is used up is gone; a machine that was not quiet for as long as
    one wait may last is taken to be never quiet, until a quiet slice is seen."""

    left_s: float = 0.0
    longest_s: float = 25.0
    """One wait: as long as a burst of work that one would sit out."""
    waited_s: float = 0.0
    given_up: bool = False

    def may_wait(self) -> bool:
        """Whether to wait at all."""
        return self.left_s > 0.5 and not self.given_up

    def wait(self, watch: Watch, deadline: float) -> bool:
        """Wait for a quiet machine, the deadline in mind; whether it came."""
        began = time.monotonic()
        quiet = watch.wait_for_quiet(min(self.left_s, self.longest_s, deadline - began))
        spent_s = time.monotonic() - began
        self.left_s, self.waited_s = self.left_s - spent_s, self.waited_s + spent_s
        self.given_up = not quiet
        return quiet


def neighbours() -> int:
    """How many threads want a core now, beside the one that asks; 0 where the system does not say."""
    try:
        return max(0, int(_LOAD.read_bytes().split()[3].partition(b"/")[0]) - 1)
    except (OSError, ValueError, IndexError):
        return 0


def _load_between(first: Reading, last: Reading, own_s: float, since: Reading) -> Load:
    """What others took between two readings, in which our processes had `own_s`; what stands still now and then, the
    machine or our cgroup, from a later one on."""
    share = _share((last.at_s - first.at_s) * min(first.cores, last.cores))
    spent_s = last.at_s - since.at_s
    return Load(
        others=share(_difference(last.busy_s, first.busy_s) - own_s) if first.cores == last.cores else math.nan,
        steal=share(_difference(last.steal_s, first.steal_s)),
        throttled=_share(spent_s)(_difference(last.throttled_s, since.throttled_s)),
        slept=(last.boot_s - since.boot_s) - spent_s > 0.1,
        replugged=last.cores != since.cores,
        cores=last.cores,
    )


def _difference(after: float | None, before: float | None) -> float:
    """How far a counter has come; NaN where it is missing or ran backwards."""
    if after is None or before is None or after < before:
        return math.nan
    return after - before


def _share(of_s: float) -> Callable[[float], float]:
    return lambda seconds: max(0.0, seconds / of_s) if of_s > 0 else math.nan


def _cpu_times() -> tuple[float | None, float | None, int]:
    """CPU seconds of all processes, stolen ones, and the cores that both are of: ours, where we may not use all."""
    try:
        said = itertools.takewhile(lambda line: line.startswith(b"cpu"), _read(_STAT).split(b"\n"))
        times = dict(line.split(b" ", 1) for line in said)
        every = times.keys() - {b"cpu"}
        ours = {b"cpu%d" % core for core in affinity()} or every
        busy, stolen = 0, 0
        for name in ours if ours < every else {b"cpu"}:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, times[name].split()[:8])
            busy, stolen = busy + user + nice + system + irq + softirq, stolen + steal
    except (OSError, ValueError, KeyError):
        return None, None, os.cpu_count() or 1
    return busy / _TICKS, stolen / _TICKS, len(ours if ours < every else every) or os.cpu_count() or 1


def _pressure_s() -> float | None:
    """Seconds in which a task of our cgroup, or else of the machine, waited for a core."""
    for path in (*_own_files("cpu.pressure"), _PRESSURE):
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = _read(path).split(b"\n", 1)[0].split()
            return int(words[-1].partition(b"total=")[2]) / 1e6
    return None


def throttled_s() -> float | None:
    """Seconds that our cgroup's quota has stopped its processes."""
    for path in _own_files("cpu.stat"):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split(b" ", 1) for line in _read(path).splitlines())
            for name, unit in ((b"throttled_usec", 1e-6), (b"throttled_time", 1e-9)):  # version 2, and 1
                if name in counts:
                    return int(counts[name]) * unit
    return None


def _read(path: Path) -> bytes:
    """What one of the kernel's files says now. It stays open: to open it takes five times as long as to read it."""
    return os.pread(_opened(path), _LONGEST, 0)


@lru_cache(maxsize=32)
def _opened(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


@lru_cache(maxsize=2)
def _own_files(name: str) -> list[Path]:
    """The files of this name in the cgroups that this process is in, the innermost first."""
    return [path for folder in control_groups("cpu") if (path := folder / name).is_file()]


def _core_values(name: str) -> list[float]:
    """What the files of that name say of a few of the cores that we may use."""
    values = []
    for path in _core_files(name):
        with contextlib.suppress(OSError, ValueError):
            values.append(float(_read(path)))
    return values


@lru_cache(maxsize=2)
def _core_files(name: str) -> list[Path]:
    cores = sorted(affinity()) or range(os.cpu_count() or 1)
    return [path for core in cores[:_LOOKED_AT] for path in sorted((_CORES / f"cpu{core}").glob(name))]


class Surroundings(Watch):
    """A watch over what is timed otherwise than in a race: by this process and its children, whose CPU time and GPUs it
    finds itself, as those of the processes `also` and theirs."""

    _before_s = 0.0

    def __init__(self, also: Collection[int] = (), stopped: Callable[[], bool] = lambda: False) -> None:
        self._also, self._patience = also, Patience(WAIT_S)
        super().__init__(stopped=stopped)

    def mark(self, own_s: float = 0.0) -> None:
        """Something begins, or ends."""
        family, family_s = _family(self._also)
        self.own |= family
        own_s += max(0.0, family_s - self._before_s)
        self._before_s = family_s
        super().mark(own_s)

    def look(self, waits: float = math.nan) -> Load:
        """What others took since the last mark, and half a second at least: of the GPUs, too, that our processes are on
        now. `waits` as for `load`."""
        self.mark()
        self.gpus = gpus_in_use(self.own)
        return self.load(waits)

    def watched(self, measure: Callable[[], T]) -> tuple[T, Load]:
        """What `measure` returns, and what others took meanwhile: of a second time where they disturbed the first and
        are gone. Waits for that, our processes at rest, while there is patience."""
        if time.monotonic() - self._readings[-1][0].at_s > _JUST_NOW_S:
            self.mark()
        found, load = measure(), self.look()
        if load.is_quiet:
            self._patience.given_up = False
        elif not load.is_quota and self._patience.may_wait() and self._patience.wait(self, math.inf):
            found, load = measure(), self.look()
        return found, load


def _family(also: Collection[int]) -> tuple[set[int], float]:
    """This process with its children, and the processes `also` with theirs: their numbers, and CPU seconds of all but
    this one, those that have ended included."""
    mine = os.times()
    total = mine.children_user + mine.children_system
    running = set[psutil.Process]()
    for pid in (os.getpid(), *also):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            running |= {process, *process.children(recursive=True)}
    for process in running:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            if process.pid != os.getpid():  # what it had is in each `Reading`
                total += times.user + times.system + times.children_user + times.children_system
    return {process.pid for process in running}, total
