"""Numbers as text, the same in the terminal, in the charts and on the page. A missing number is a dash."""

from __future__ import annotations

import math

from fettle.measure import Interval
from fettle.units import seconds_text, size_text

MISSING = "–"


def times(value: float | None) -> str:
    """A ratio: ``9.91x``; three significant digits, never more than two decimals."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.2f}x" if value < 100 else f"{value:.0f}x"


def interval(value: Interval | None) -> str:
    """A ratio with its interval: ``9.91x [9.60, 10.22]``, or ``too few rounds``."""
    return MISSING if value is None or not math.isfinite(value.estimate) else value.text


def ends(value: Interval | None) -> str:
    """The interval alone: ``9.60 to 10.22``; nothing where there is no ratio."""
    if value is None or not math.isfinite(value.estimate):
        return ""
    return f"{value.low:.2f} to {value.high:.2f}" if value.is_known else value.text


def milliseconds(value: float | None) -> str:
    """The time of one call: ``840 µs``, ``44.0 ms``, ``22.9 s``."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 1:
        return f"{_three(value * 1e3)} µs"
    return f"{_three(value)} ms" if value < 1e4 else f"{_three(value / 1e3)} s"


def seconds(value: float | None) -> str:
    """A duration for people: ``0.84 s``, ``38.2 s``, ``12 min``, ``2 h 05 min``."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{_three(value)} s" if value < 99.5 else seconds_text(value)


def size(value: float | None) -> str:
    """Bytes in binary units: ``412 MiB``."""
    return MISSING if value is None or not math.isfinite(value) else size_text(value)


def error(value: float | None) -> str:
    """A relative error: ``0.0081``, ``3.1e-07``."""
    if value is None or not math.isfinite(value):
        return MISSING
    if value == 0:
        return "0"
    return f"{value:.1e}" if abs(value) < 1e-3 else f"{value:.2g}"


def number(value: float | None, digits: int = 4) -> str:
    """Any other number, to some significant digits; a large one without an exponent."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.0f}" if 10**digits <= abs(value) < 1e9 else f"{value:.{digits}g}"


def share(value: float | None) -> str:
    """A share as a percentage: ``99.8%``; a hundred only when it is all of them."""
    if value is None or not math.isfinite(value):
        return MISSING
    text = f"{value * 100:.1f}%"
    return "100%" if value == 1 else ("99.9%" if text == "100.0%" and value < 1 else text)


def rate(value: float | None) -> str:
    """Samples per second: ``181/s``."""
    return MISSING if value is None or not math.isfinite(value) else f"{_three(value)}/s"


def count(value: float) -> str:
    """A whole number with thin groups: ``12,400``; two significant digits from a thousand on."""
    if value >= 1000:
        step = 10 ** (math.floor(math.log10(value)) - 1)
        value = round(value / step) * step
    return f"{math.ceil(value):,}"


def joules(value: float | None) -> str:
    """An energy."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{_three(value)} J" if value >= 1 else f"{_three(value * 1e3)} mJ"


def _three(value: float) -> str:
    """Three significant digits without an exponent."""
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, digits):.{max(0, digits)}f}"
