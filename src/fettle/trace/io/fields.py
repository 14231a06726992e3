"""From what JSON holds to numbers and text that fit the columns, whatever it holds."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt

_INT64_MAX = 2**63 - 1


def say(value: Any, limit: int | None = None) -> str:
    """Any value as text that can be stored: cut, and without lone surrogates."""
    return str(value)[:limit].encode("utf-8", "replace").decode()


def to_array(values: list[Any]) -> npt.NDArray[np.float64]:
    """Numbers as float64: NaN for what is missing, or too large even for that."""
    try:
        return np.array(values, dtype=np.float64)
    except OverflowError:
        return np.array([number(value) for value in values], dtype=np.float64)


def to_ns(values: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Microseconds to nanoseconds, exactly, and which values are not a time: not finite, or beyond 9e15."""
    bad = ~np.isfinite(values) | (np.abs(values) > 9e15)
    safe = np.where(bad, 0.0, values)
    whole = np.floor(safe)
    ns = whole.astype(np.int64) * 1000 + np.rint((safe - whole) * 1000.0).astype(np.int64)
    return ns, bad


def integers(values: list[Any]) -> npt.NDArray[np.int64]:
    """Integers that are there or -1, at once where they are plain."""
    try:
        return np.array([-1 if v is None else v for v in values], dtype=np.int64)
    except (OverflowError, ValueError, TypeError):
        return np.array([integer(v) for v in values], dtype=np.int64)


def integer(value: Any, missing: int = -1) -> int:
    """An integer that fits in 64 bits, from whatever JSON held; `missing` where there is none."""
    if isinstance(value, str):
        try:
            value = int(value, 0) if len(value) < 25 else missing
        except ValueError:
            return missing
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) else missing
    if not isinstance(value, int) or abs(value) > _INT64_MAX:
        return missing
    return int(value)


def number(value: Any) -> float | None:
    """A finite number; None where there is none."""
    try:
        real = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return real if math.isfinite(real) else None


def small_number(value: Any) -> int:
    """A device number: -1 for what is not one (a process id, for one, where the device is not recorded)."""
    number = integer(value)
    return number if -1 <= number <= 10_000 else -1


def stream_number(value: Any) -> int:
    """A stream number; text such as `stream 7` counts, and the unsigned 32-bit -1 of sync events means none."""
    if isinstance(value, str):
        value = value.rsplit(" ", 1)[-1]
    whole = integer(value)
    return -1 if whole in (2**32 - 1, 2**64 - 1) else whole


def whole_ns(microseconds: Decimal | None) -> int:
    """Decimal microseconds to the nearest nanosecond. Raises `OverflowError` for more than 64 bits hold."""
    nanoseconds = (microseconds or Decimal(0)) * 1000
    if nanoseconds.adjusted() > 18:  # writing out 1e999999 would take minutes
        raise OverflowError
    return int(nanoseconds.to_integral_value())
