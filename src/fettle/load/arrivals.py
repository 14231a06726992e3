"""When requests are due: independent arrivals, even ones, or those of a file."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np

from fettle.errors import UsageError
from fettle.files import read_text


def poisson(rate: float, seconds: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Moments at which requests are due, seconds from the start: independent arrivals, at least one."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1.0 / rate, int(rate * seconds + 6 * math.sqrt(rate * seconds) + 16))
    moments = np.cumsum(gaps)
    moments = moments[moments < seconds]
    return moments if len(moments) else np.zeros(1)


def constant(rate: float, seconds: float) -> np.ndarray[Any, Any]:
    """Moments at even distances."""
    return np.arange(max(1, int(rate * seconds))) / rate


def read_schedule(path: Path) -> np.ndarray[Any, Any]:
    """Moments from a file: one number of seconds a line. Raises `UsageError`."""
    try:
        text = read_text(path, 256 << 20)
        moments = np.loadtxt(io.StringIO(text), dtype=np.float64, ndmin=1) if text.strip() else np.array([])
        if moments.ndim != 1 or not len(moments) or not np.isfinite(moments).all() or (moments < 0).any():
            raise ValueError
    except ValueError as error:
        raise UsageError(f"{path} is not a schedule: it needs one number of seconds a line") from error
    moments = np.sort(moments)
    return np.asarray(moments - moments[0])
