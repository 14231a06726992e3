"""The machine's own metrics, its cores, memory and GPUs, looked up when Prometheus asks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Host(Collector):
    def collect(self) -> Iterator[Metric]:
        times, memory = psutil.cpu_times(), psutil.virtual_memory()
        busy = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
        yield CounterMetricFamily("fettle_host_cpu_seconds", "Time that all cores of the host were at work", busy)
        yield GaugeMetricFamily("fettle_host_cores", "Cores of the host", psutil.cpu_count() or 1)
        yield GaugeMetricFamily("fettle_host_memory_bytes", "Memory of the host", memory.total)
        yield GaugeMetricFamily("fettle_host_memory_available_bytes", "What of it is free or can be", memory.available)
        nvml, devices = gpus()
        used = GaugeMetricFamily("fettle_gpu_memory_used_bytes", "Memory of a GPU in use", labels=["gpu"])
        total = GaugeMetricFamily("fettle_gpu_memory_bytes", "Memory of a GPU", labels=["gpu"])
        share = GaugeMetricFamily("fettle_gpu_busy_share", "Of the last moments, those with a kernel", labels=["gpu"])
        for number, device in enumerate(devices):
            with suppress(Exception):  # NVML raises its own types, and not every device tells everything
                held = nvml.nvmlDeviceGetMemoryInfo(device)
                used.add_metric([str(number)], held.used)
                total.add_metric([str(number)], held.total)
                share.add_metric([str(number)], nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100)
        yield from (used, total, share)


@functools.cache
def gpus() -> tuple[Any, list[Any]]:
    """NVML and the GPUs that it knows; none where it does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except Exception:  # NVML raises its own types, and may be absent altogether
        return None, []
