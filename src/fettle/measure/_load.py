"""What others took of the machine while something was timed, as plain data, and when that is negligible."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

QUIET_WAITS = 0.03
"""Waiting for a core, in seconds a second, up to which a slice is quiet: a call may take so much longer. Chosen, not
fitted; beside a process on one of two cores two threads waited for more than half of the time."""
WAITS_FOR_OTHERS = 0.07
"""Over the root of the number of cores: the share of them that others must have had for waiting to be their doing.
Threads of one process that are more than the cores, as some runtimes have, wait for each other. All but one of 1,086
slices on a quiet machine with two cores had less (5%); what the ticks of many cores add up to varies with their root.
One busy process is more than that on up to 200 cores."""
QUIET_OTHERS = 0.08
"""Share of the machine's cores that others may have in a quiet slice whose threads did not wait. The most of those
slices was 5.3%. They may have as much of a GPU."""
QUIET_CLOCK = 0.9
"""A clock below this share of the fastest that was seen, while heat or a GPU's driver throttled it, is no quiet one."""


@dataclass(frozen=True)
class Load:
    """What others took while something was timed. NaN: this machine does not say."""

    waits: float = math.nan
    """Seconds that own threads were ready and had no core, summed over them, per second."""
    others: float = math.nan
    """CPU time of processes that are not ours, as a share of all cores."""
    steal: float = math.nan
    """Time that the hypervisor took, as a share of all cores."""
    pressure: float = math.nan
    """Share of the time in which any task of our cgroup, or else of the machine, waited for a core."""
    throttled: float = math.nan
    """Share of the time in which a cgroup's quota stopped us."""
    clock: float = math.nan
    """Clock of the cores over the fastest that was seen, where the machine says that heat has throttled it."""
    gpu: float = math.nan
    """Share that processes which are not ours had of a GPU of the slice, the most of several."""
    slept: bool = False
    """The machine was suspended meanwhile."""
    replugged: bool = False
    """Cores went or came meanwhile."""
    cores: int = 2
    """Cores that the shares are of."""

    @property
    def is_quiet(self) -> bool:
        """Whether what others took is negligible. What is not known counts as quiet."""
        return not (
            self.slept
            or self.replugged
            or (self.waits > QUIET_WAITS and not self.others <= WAITS_FOR_OTHERS / math.sqrt(self.cores))
            or self.others > QUIET_OTHERS
            or self.steal > QUIET_OTHERS
            or self.throttled > QUIET_WAITS
            or self.clock < QUIET_CLOCK
            or self.gpu > QUIET_OTHERS
        )

    @property
    def is_quota(self) -> bool:
        """Whether a cgroup's quota disturbed it and nothing else: waiting does not end that."""
        return self.throttled > QUIET_WAITS and replace(self, throttled=math.nan).is_quiet

    @property
    def under(self) -> str:
        """What figures that were measured under it are of, to stand before them; empty on a quiet machine."""
        return "" if self.is_quiet else f"On a busy machine ({self}): "

    @property
    def waiting_taken_out(self) -> str:
        """The same of figures without the time for which slices waited. The mean of all slices may be quiet."""
        load = "" if self.is_quiet else f" ({self})"
        return f"On a busy machine{load}, with the time spent waiting for a core taken out: "

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Load:
        """The inverse of `fettle.files.plain`: what is null, or is not there, was not known."""
        return msgspec.convert({name: value for name, value in data.items() if value is not None}, cls)

    def __str__(self) -> str:
        words = []
        if self.waits > QUIET_WAITS:
            words.append(f"its threads together waited {self.waits:.0%} of the time for a core")
        if self.others > QUIET_OTHERS / 2:
            words.append(f"others took {self.others:.0%} of the cores")
        if self.steal > QUIET_OTHERS / 2:
            words.append(f"the hypervisor took {self.steal:.0%}")
        if self.gpu > QUIET_OTHERS / 2:
            words.append(f"others took {self.gpu:.0%} of a GPU")
        if self.throttled > QUIET_WAITS:
            words.append(f"a cgroup's quota stopped it {self.throttled:.0%} of the time")
        if self.clock < QUIET_CLOCK:
            words.append(f"the clock was at {self.clock:.0%} of its fastest")
        if self.slept:
            words.append("the machine was suspended")
        if self.replugged:
            words.append("cores went or came")
        return " and ".join(words) or "nobody else took anything"


def mean_load(loads: Iterable[Load]) -> Load:
    """The mean of several, each figure over those that have it."""
    every = list(loads)

    def mean(name: str) -> float:
        values = [getattr(load, name) for load in every if not math.isnan(getattr(load, name))]
        return sum(values) / len(values) if values else math.nan

    names = ("waits", "others", "steal", "pressure", "throttled", "clock", "gpu")
    cores = max((load.cores for load in every), default=2)
    slept, replugged = any(load.slept for load in every), any(load.replugged for load in every)
    return Load(**{name: round(mean(name), 4) for name in names}, slept=slept, replugged=replugged, cores=cores)


def busy_load(loads: Iterable[Load]) -> Load:
    """The mean of those that are not quiet; of all, where none is."""
    every = list(loads)
    return mean_load([load for load in every if not load.is_quiet] or every)


def nvml_of(uuid: str) -> tuple[Any, Any]:
    """NVML, and the GPU of this `uuid` in it, which may be a part of one (MIG). Raises whatever NVML raises, and where
    it is absent altogether."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid.replace("GPU-", "MIG-"))


def gpu_memory(uuid: str) -> tuple[float, float]:
    """Free bytes of the GPU of this `uuid`, and all that it has; no end of the one where NVML does not say."""
    try:
        nvml, device = nvml_of(uuid)
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        return memory.free, memory.total
    except Exception:  # NVML raises its own types, and may be absent altogether
        return math.inf, 0.0


def gpus_in_use(own: Collection[int]) -> list[str]:
    """The GPUs that one of the processes `own` computes on, by UUID, as far as NVML says so."""
    used = []
    with contextlib.suppress(Exception):  # NVML raises its own types, and may be absent altogether
        import pynvml

        pynvml.nvmlInit()
        for number in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(number)
            if any(one.pid in own for one in pynvml.nvmlDeviceGetComputeRunningProcesses(device)):
                used.append(pynvml.nvmlDeviceGetUUID(device))
    return used


def with_gpu(load: Load, uuid: str, own: Collection[int], over_s: float = 1.0) -> Load:
    """`load` with that of the GPU of this `uuid` in the last `over_s` seconds, one at least, of which the processes
    `own` are ours; unchanged where NVML is not there or does not say.

    Calls: NVIDIA's *NVML API Reference Guide*, "Device Queries". NVML may know other process numbers than we do (in a
    container): where none of ours is on the device by its account, nothing is said of the others. Some drivers list
    processes by their numbers in the container and sample them by those outside (HAMi-core, issue 112): samples of no
    process that is listed decide nothing.
    """
    try:
        nvml, device = nvml_of(uuid)
        running = {process.pid for process in nvml.nvmlDeviceGetComputeRunningProcesses(device)}
    except Exception:
        return load
    others = running.difference(own)
    if others != running:
        try:
            since = int((time.time() - max(over_s, 1.0)) * 1e6)
            samples = nvml.nvmlDeviceGetProcessUtilization(device, since)
        except Exception:  # no samples since then: nobody used it
            samples = []
        busiest: dict[int, float] = {}
        for sample in samples:
            # One from a moment that is still to come was taken before the clock was set back.
            if sample.pid in others and sample.timeStamp <= time.time() * 1e6:
                busiest[sample.pid] = max(busiest.get(sample.pid, 0.0), sample.smUtil / 100)
        load = replace(load, gpu=max(sum(busiest.values()), load.gpu))  # the first where the second is NaN
    try:
        usual = (
            nvml.nvmlClocksThrottleReasonGpuIdle | nvml.nvmlClocksThrottleReasonApplicationsClocksSetting
            | nvml.nvmlClocksThrottleReasonSwPowerCap  # caused by the recipe's own power draw, not by a neighbour
        )  # fmt: skip
        slowed = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device) & ~usual
        now, most = (get(device, nvml.NVML_CLOCK_SM)
                     for get in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo))  # fmt: skip
    except Exception:
        return load
    clock = min(now / most, load.clock) if slowed and most else load.clock  # the first where the second is NaN
    return replace(load, clock=clock)
