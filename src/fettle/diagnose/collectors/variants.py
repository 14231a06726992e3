"""Timing calls in place, and what switching one process-wide thing brings, there and back between two calls."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fettle.measure import log_interval
from fettle.patches import replaced
from fettle.procs.limits import usable_cores
from fettle.workload import wait_for

SLOW_S = 2.0
"""A call that takes longer is made as seldom as can be."""


def variants(
    call: Callable[[], Any], wall_s: float, seconds: float, module: torch.nn.Module | None = None
) -> dict[str, tuple[float, float, float]]:
    """What switching one thing brings, tried in this process: share of time saved, and its 95% interval.

    Interleaved rounds; only what can be switched there and back between two calls. A slow call gets three rounds,
    once in each.
    """
    own = torch.get_num_threads()
    usable = usable_cores()  # what the rule takes for the number of cores
    switches: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {}
    if own != usable:
        switches[f"threads={usable}"] = lambda: threads(usable)
    if own > 1 and wall_s < 0.5:
        switches["threads=1"] = lambda: threads(1)
    if torch.is_grad_enabled():
        switches["grad=inference_mode"] = torch.inference_mode
    if module is not None and module.training and all(part.training for part in module.modules()):
        switches["mode=eval"] = lambda: _evaluating(module)
    if torch.is_anomaly_enabled():
        switches["anomaly=off"] = without_anomaly_checks
    if torch.are_deterministic_algorithms_enabled():
        warn = torch.is_deterministic_algorithms_warn_only_enabled()
        switches["deterministic=off"] = lambda: held(torch, "use_deterministic_algorithms", False, True, warn_only=warn)
    rounds = int(min(12, max(3, seconds / max(wall_s, 1e-4) / (len(switches) + 1) / 3)))
    least = 1 if wall_s > SLOW_S else 2
    logs: dict[str, list[float]] = {name: [] for name in switches}
    for _ in range(rounds):
        base = min(timed(call, "cpu", 0.0, least=least))
        for name in list(logs):
            try:
                with switches[name]():
                    logs[name].append(math.log(base / min(timed(call, "cpu", 0.0, least=2 * least - 1))))
            except Exception:
                del logs[name]  # it does not run so
    by_name: dict[str, tuple[float, float, float]] = {}
    for name, values in logs.items():
        interval = log_interval(values, 0.05)
        ends = (interval.estimate, interval.low, interval.high)
        saved = [1 - math.exp(-max(-50.0, min(end, 50.0))) for end in ends]
        by_name[name] = (saved[0], saved[1], saved[2])
    return by_name


@contextlib.contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    module.eval()
    try:
        yield
    finally:
        module.train()


def timed(call: Callable[[], Any], device: str, seconds: float, least: int = 3) -> list[float]:
    """Seconds of each call: at least `least` calls, then more until `seconds` have passed or there are 200."""
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < least or (time.perf_counter() - began < seconds and len(samples) < 200):
        started = time.perf_counter()
        call()
        wait_for(device)
        samples.append(time.perf_counter() - started)
    return samples


@contextlib.contextmanager
def held(holder: Any, setter_name: str, value: Any, original: Any, **more: Any) -> Iterator[None]:
    """A process-wide setting at `value`, whatever the call itself asks for; then at `original` again, with `more`."""
    setter = getattr(holder, setter_name)
    setter(value)
    try:
        with replaced(holder, setter_name, lambda _: lambda *_, **__: contextlib.nullcontext()):
            yield
    finally:
        setter(original, **more)


def without_anomaly_checks() -> contextlib.AbstractContextManager[None]:
    """Autograd's checks off, and then as before."""
    before, nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    return held(torch.autograd, "set_detect_anomaly", False, before, check_nan=nan)


def threads(count: int) -> contextlib.AbstractContextManager[None]:
    """Compute with so many threads, and then with as many as before."""
    return held(torch, "set_num_threads", count, torch.get_num_threads())
