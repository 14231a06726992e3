"""When requests are due: independent arrivals, even ones, or those of a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from fettle.errors import UsageError


def poisson(rate: float, seconds: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """Moments at which requests are due, seconds from the start: independent arrivals."""
    random = np.random.default_rng(seed)
    gaps = random.exponential(1.0 / rate, int(rate * seconds + 6 * math.sqrt(rate * seconds) + 16))
    moments = np.cumsum(gaps)
    return moments[moments < seconds]


def constant(rate: float, seconds: float) -> np.ndarray[Any, Any]:
    """Moments at even distances."""
    return np.arange(max(1, int(rate * seconds))) / rate


def read_schedule(path: Path) -> np.ndarray[Any, Any]:
    """Moments from a file: one number of seconds a line. Raises `UsageError`."""
    try:
        if path.stat().st_size > 256 << 20:
            raise UsageError(f"{path} is too large for a schedule")
        if not path.read_text().strip():
            raise ValueError
        moments = np.loadtxt(path, dtype=np.float64, ndmin=1, comments="#")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a schedule: one number of seconds a line is wanted") from error
    if moments.ndim != 1 or not len(moments) or not np.isfinite(moments).all() or (moments < 0).any():
        raise UsageError(f"{path} is not a schedule: one number of seconds a line is wanted")
    moments = np.sort(moments)
    return np.asarray(moments - moments[0])
