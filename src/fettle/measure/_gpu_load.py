"""What other processes had of a GPU while something was timed, its clock and what throttles it, from NVML.

Calls: NVIDIA's *NVML API Reference Guide*, "Device Queries". NVML may know other process numbers than we do (in a
container): where none of ours is on the device by its account, nothing is said of the others.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from fettle.measure._load import Load

_LOOK_BACK_US = 1_000_000


def with_gpu(load: Load, uuid: str, own: Collection[int]) -> Load:
    """`load` with that of the GPU of this `uuid`, of which the processes `own` are ours; unchanged where NVML is not
    there or does not tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        running = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(device)}
    except Exception:  # NVML raises its own types, and may be absent altogether
        return load
    others = load.others
    if running & set(own):
        try:
            since = int(time.time() * 1e6) - _LOOK_BACK_US
            samples = pynvml.nvmlDeviceGetProcessUtilization(device, since)
        except Exception:  # no samples since then: nobody used it
            samples = []
        busiest: dict[int, float] = {}
        for sample in samples:
            if sample.pid not in own:
                busiest[sample.pid] = max(busiest.get(sample.pid, 0.0), sample.smUtil / 100)
        others = max([sum(busiest.values()), *([others] if others > 0 else [])])
    try:
        idle = pynvml.nvmlClocksThrottleReasonGpuIdle | pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting
        slowed = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device) & ~idle
        now, most = (get(device, pynvml.NVML_CLOCK_SM)
                     for get in (pynvml.nvmlDeviceGetClockInfo, pynvml.nvmlDeviceGetMaxClockInfo))  # fmt: skip
    except Exception:
        return replace(load, others=others)
    return replace(load, others=others, clock=now / most if slowed and most else load.clock)
