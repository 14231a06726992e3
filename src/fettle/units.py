"""Sizes, counts and times for people: 1.5 GiB for a reader, and "1.5GiB" from a command line."""

from __future__ import annotations

import math
import re

from fettle.errors import UsageError

_FACTORS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _FACTORS |= {_letter: 1024**_power, f"{_letter}IB": 1024**_power, f"{_letter}B": 1000**_power}


def size_text(size_bytes: float) -> str:
    """Bytes with a binary unit and three digits: ``11.6 GiB``."""
    value, sign = abs(float(size_bytes)), "-" if size_bytes < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{sign}{value:.0f} B"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{sign}{value:.{digits}f} {unit}"


def count_text(count: float, noun: str) -> str:
    """``1 event``, ``2,000 events``, ``1.5 cores``."""
    return (f"{count:,}" if isinstance(count, int) else f"{count:.3g}") + f" {noun}" + ("" if count == 1 else "s")


def rate_text(per_second: float) -> str:
    """Four digits without an exponent: ``44.23``, ``11,380``."""
    if not math.isfinite(per_second) or abs(per_second) < 1e4:
        return f"{per_second:.4g}"
    return f"{round(per_second, 3 - math.floor(math.log10(abs(per_second)))):,.0f}"


def seconds_text(seconds: float) -> str:
    """Seconds with a unit and three digits, ``12.3 ms``, ``12 min``, ``2 h 05 min``; a dash where there is none."""
    if not math.isfinite(seconds):
        return "-"
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    if 0 < seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def parse_size(text: str, option: str = "") -> int:
    """Bytes from ``512``, ``1.5GiB``, ``2 GB`` (2 * 10**9) or ``80M`` (MiB); `UsageError` for anything else, which
    names the option."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    factor = _FACTORS.get(match.group(2).upper()) if match else None
    if match is None or factor is None or len(match.group(1)) > 18:  # nothing has a size of more digits
        where = f"{option}: " if option else ""
        raise UsageError(f"{where}{text!r} is not a size: write 512, 80MiB, 1.5GiB or 2GB")
    return int(float(match.group(1)) * factor)
