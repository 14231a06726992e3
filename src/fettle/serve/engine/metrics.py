"""Prometheus metrics of the server. Workers send their timings with their answers, so one process holds them all."""

from __future__ import annotations

import contextlib
import functools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
MAX_NAMES = 100
"""The most names of a handler's own metrics."""
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256)
_LABELS = ("model", "version")
_HISTOGRAMS = {
    "requests": ("request_seconds", "From the request's arrival at the batcher to its answer"),
    "queue": ("queue_wait_seconds", "From arrival to dispatch"),
    "join": ("batch_join_seconds", "Putting a batch together in the worker"),
    "pre": ("preprocess_seconds", "A handler's step before the model, for one call"),
    "post": ("postprocess_seconds", "A handler's step after the model, for one call"),
    "model": ("model_seconds", "One call of the model"),
    "first_token": ("time_to_first_token_seconds", "From a text's arrival to its first token"),
    "next_token": ("inter_token_seconds", "Between two tokens of a text"),
    "rows": ("batch_rows", "Rows of a call, padding apart"),
}
"""Name and text of each `Tally` of a version."""
_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)


class Tally:
    """A histogram of one label set. Prometheus' own takes a lock and ten times as long, for every request."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value in the first bucket that holds it."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and number of values up to it, for each bucket."""
        return list(zip([*map(floatToGoString, self._bounds), "+Inf"], accumulate(self._counts), strict=True))


class Metrics(Collector):
    """What is counted of all versions. Of each the event loop's thread counts in its `ModelMetrics`; what is counted
    less often, Prometheus' own objects keep."""

    def __init__(self, limits_s: Iterable[float] = ()) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(Host())
        self.registry.register(self)
        self._versions: dict[tuple[str, str], ModelMetrics] = {}
        # Buckets close together around each limit: a percentile is as exact as the buckets beside it.
        factors = (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
        around = [round(limit_s * factor, 6) for limit_s in limits_s for factor in factors]
        self.seconds = tuple(sorted({*_SECONDS, *around} - {0.0}))

        def made(kind: type[_Kind], name: str, text: str, *more: str, **options: Any) -> _Kind:
            return kind(f"fettle_{name}", text, (*_LABELS, *more), registry=self.registry, **options)

        self.padding = made(Counter, "padding_rows", "Rows computed only to fill a batch")
        self.sheds = made(Counter, "shed", "Requests not served, by reason", "reason")
        self.restarts = made(Counter, "worker_restarts", "Workers replaced, by reason", "reason")
        self.violations = made(Counter, "limit_violations", "Answers slower than the latency limit")
        self.handler_events = made(Counter, "handler_events", "What a handler counted", "name")
        self.handler_s = made(Histogram, "handler_seconds", "What a handler timed", "name", buckets=self.seconds)
        self.handler_value = made(Gauge, "handler_value", "What a handler measured: bytes or percent", "name")
        self.queue_rows = made(Gauge, "queue_rows", "Rows that wait")
        self.inflight = made(Gauge, "inflight", "Requests with a worker")
        self.worker_bytes = made(Gauge, "worker_rss_bytes", "Resident memory of a worker", "worker")

    def of(self, model: str, version: str) -> ModelMetrics:
        """What is counted of a version. It goes on where another one takes its number over."""
        if (model, version) not in self._versions:
            self._versions[model, version] = ModelMetrics(self, model, version)
        return self._versions[model, version]

    def collect(self) -> Iterator[Metric]:
        for attribute, (name, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"fettle_{name}", text, labels=_LABELS)
            for labels, counted in self._versions.items():
                tally: Tally = getattr(counted, attribute)
                family.add_metric(labels, tally.buckets, tally.sum)
            yield family
        responses = CounterMetricFamily("fettle_responses", "Answers by HTTP status", labels=(*_LABELS, "code"))
        for labels, counted in self._versions.items():
            for code, count in counted.codes.items():
                responses.add_metric((*labels, str(code)), count)
        yield responses

    def forget(self, model: str, version: str) -> None:
        """Show a version no more: a server that runs for months sees hundreds go, and each has hundreds of lines."""
        self._versions.pop((model, version), None)
        for metric in vars(self).values():
            for values in [each for each in getattr(metric, "_metrics", ()) if each[:2] == (model, version)]:
                metric.remove(*values)


class ModelMetrics:
    """What is counted of one version."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self.all, self.labels = metrics, (model, version)
        self.requests, self.queue, self.join, self.model, self.pre, self.post, self.first_token, self.next_token = (
            Tally(metrics.seconds) for _ in range(8)
        )
        self.rows = Tally(_ROWS)
        self._padding = metrics.padding.labels(*self.labels)
        self._violations = metrics.violations.labels(*self.labels)
        self.codes: dict[int, int] = {}
        """Answers by HTTP status."""
        self._names: set[str] = set()
        self.by_size: dict[int, tuple[int, float, float]] = {}
        """Batch rows -> calls, seconds of joining, seconds of the model."""

    def request(self, seconds: float, queue_s: float, limit_s: float) -> None:
        self.requests.observe(seconds)
        self.queue.observe(queue_s)
        if 0 < limit_s < seconds:
            self._violations.inc()

    def piece(self, seconds: float, *, first: bool) -> None:
        """A text's next token came, so long after the one before; the first so long after it was asked for."""
        (self.first_token if first else self.next_token).observe(seconds)

    def batch(self, rows: int, size: int, join_s: float, model_s: float, calls: int = 1) -> None:
        """A call was made, or several like this one on average."""
        self.join.observe(join_s, calls)
        self.model.observe(model_s, calls)
        self.rows.observe(rows, calls)
        if size > rows:
            self._padding.inc(size - rows)
        before, joining, computing = self.by_size.get(rows, (0, 0.0, 0.0))
        self.by_size[rows] = (before + calls, joining + join_s * calls, computing + model_s * calls)

    def steps(self, pre_s: float, post_s: float) -> None:
        """A call went through a handler."""
        self.pre.observe(pre_s)
        self.post.observe(post_s)

    def response(self, code: int) -> None:
        self.codes[code] = self.codes.get(code, 0) + 1

    @property
    def failed(self) -> int:
        """Requests that were refused or failed."""
        return sum(count for code, count in self.codes.items() if code >= 400)

    def handler(self, measured: Sequence[tuple[str, str, float]]) -> None:
        """What a handler counted in one call. Names beyond the hundredth are not kept: each is a time series."""
        for kind, name, value in measured:
            if name not in self._names:
                if len(self._names) >= MAX_NAMES:
                    continue
                self._names.add(name)
            if kind == "counter":
                self.all.handler_events.labels(*self.labels, name).inc(value)
            elif kind == "seconds":
                self.all.handler_s.labels(*self.labels, name).observe(value)
            else:
                self.all.handler_value.labels(*self.labels, name).set(value)

    def shed(self, reason: str) -> None:
        """A request was not served."""
        self.all.sheds.labels(*self.labels, reason).inc()

    def restart(self, reason: str) -> None:
        self.all.restarts.labels(*self.labels, reason).inc()


class Host(Collector):
    """The machine's own metrics, its cores, memory and GPUs, looked up when Prometheus asks."""

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
            with contextlib.suppress(Exception):  # NVML raises its own types, and not every device tells everything
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
