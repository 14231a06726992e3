"""Timing calls in place, and settings held against what the calls themselves ask for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch


def timed(call: Callable[[], Any], device: str, seconds: float, least: int = 3) -> list[float]:
    """Seconds of each call: at least `least` calls, then more until `seconds` have passed or there are 200."""
    samples: list[float] = []
    began = time.perf_counter()
    while len(samples) < least or (time.perf_counter() - began < seconds and len(samples) < 200):
        started = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - started)
    return samples


@contextlib.contextmanager
def held(holder: Any, setter_name: str, value: Any, given: Any) -> Iterator[None]:
    """A process-wide setting at `value`, whatever the call itself asks for; then at `given` again."""
    setter = getattr(holder, setter_name)
    setter(value)
    setattr(holder, setter_name, lambda *_, **__: contextlib.nullcontext())
    try:
        yield
    finally:
        setattr(holder, setter_name, setter)
        setter(given)


def threads(count: int) -> contextlib.AbstractContextManager[None]:
    """Compute with so many threads, and then with as many as before."""
    return held(torch, "set_num_threads", count, torch.get_num_threads())
