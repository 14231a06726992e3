"""Sets of half-open intervals [start, end) in integer nanoseconds, as pairs of sorted arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Intervals = tuple[Ints, Ints]


def merge(start: Ints, end: Ints) -> Intervals:
    """The union of intervals as disjoint ones in order; touching ones join, empty ones vanish."""
    keep = end > start
    start, end = start[keep], end[keep]
    if not len(start):
        return start, end
    if np.any(start[1:] < start[:-1]):
        order = np.argsort(start, kind="stable")
        start, end = start[order], end[order]
    reach = np.maximum.accumulate(end)
    opens = np.ones(len(start), dtype=bool)
    opens[1:] = start[1:] > reach[:-1]
    first = np.flatnonzero(opens)
    last = np.append(first[1:], len(start)) - 1
    return start[first], reach[last]


def clip(intervals: Intervals, low: int, high: int) -> Intervals:
    """The part of disjoint intervals inside [low, high)."""
    start, end = np.maximum(intervals[0], low), np.minimum(intervals[1], high)
    keep = end > start
    return start[keep], end[keep]


def gaps(intervals: Intervals, low: int, high: int) -> Intervals:
    """What disjoint intervals leave free in [low, high)."""
    start, end = clip(intervals, low, high)
    begins = np.concatenate([[low], end]).astype(np.int64)
    stops = np.concatenate([start, [high]]).astype(np.int64)
    keep = stops > begins
    return begins[keep], stops[keep]


def total(intervals: Intervals) -> int:
    """Summed length, ns."""
    return int((intervals[1] - intervals[0]).sum())


def length_before(intervals: Intervals, times: Ints) -> Ints:
    """How much of the disjoint intervals lies before each time, ns."""
    start, end = intervals
    index = np.searchsorted(start, times, side="right")
    behind = np.where(index > 0, np.append(end, 0)[index - 1] - times, 0)  # of the interval that a time lies in
    return np.append(0, np.cumsum(end - start))[index] - np.maximum(behind, 0)


def length_within(intervals: Intervals, low: Ints, high: Ints) -> Ints:
    """How much of the disjoint intervals lies in each window [low, high), ns."""
    return length_before(intervals, high) - length_before(intervals, low)


def in_turn(start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Intervals in order of their begin, each without what those before it cover: start, end, and which it is."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    start = np.maximum(start, np.concatenate([start[:1], np.maximum.accumulate(end)[:-1]]))
    keep = end > start
    return start[keep], end[keep], order[keep]


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """Where both sets of disjoint intervals are."""
    pieces = split(a, b)
    return pieces[0], pieces[1]


def split(pieces: Intervals, windows: Intervals) -> tuple[Ints, Ints, Ints, Ints]:
    """Cut disjoint pieces at disjoint windows.

    Returns start, end, index of the piece and index of the window of every overlap, in order of pieces.
    """
    (start, end), (low, high) = pieces, windows
    first = np.searchsorted(high, start, side="right")
    last = np.searchsorted(low, end, side="left")
    count = np.maximum(last - first, 0)
    piece = np.repeat(np.arange(len(start)), count)
    window = np.arange(len(piece)) + np.repeat(first - (np.cumsum(count) - count), count)
    begins, stops = np.maximum(start[piece], low[window]), np.minimum(end[piece], high[window])
    keep = stops > begins
    return begins[keep], stops[keep], piece[keep], window[keep]


def levels(start: Ints, end: Ints, weight: npt.NDArray[Any]) -> tuple[Intervals, npt.NDArray[Any]]:
    """The pieces between all begins and ends of some intervals, and the summed weight of those that are there."""
    times = np.concatenate([start, end])
    order = np.argsort(times, kind="stable")
    level = np.cumsum(np.concatenate([weight, -weight])[order])[:-1]
    return (times[order][:-1], times[order][1:]), level


def combinations(classes: dict[str, Intervals]) -> dict[tuple[str, ...], int]:
    """How long exactly which of some classes of disjoint intervals are there together, where they ever are, ns."""
    points = np.unique(np.concatenate([part for pair in classes.values() for part in pair]))
    low, high = points[:-1], points[1:]
    key = np.zeros(len(low), dtype=np.int64)
    for intervals in classes.values():
        key = 2 * key + (length_within(intervals, low, high) > 0)
    lengths = np.bincount(key, high - low, 2 ** len(classes)).astype(np.int64).tolist()
    chosen = itertools.product((False, True), repeat=len(classes))
    names = (tuple(itertools.compress(classes, some)) for some in chosen)
    return {together: ns for together, ns in zip(names, lengths, strict=True) if together and ns}
