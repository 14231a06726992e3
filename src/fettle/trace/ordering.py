"""Sorting millions of rows by several keys: the keys and the row number packed into one integer where they fit."""

from __future__ import annotations

import itertools

import numpy as np

from fettle.trace.intervals import Ints


def order_by(*keys: Ints) -> Ints:
    """The stable order by the first key, then the second, and so on.

    Sorting packed integers in place is several times faster than `numpy.lexsort`, which sorts once for each key.
    """
    count = len(keys[0])
    if not count:
        return np.zeros(0, dtype=np.int64)
    lows, row_bits = [int(key.min()) for key in keys], (count - 1).bit_length()
    bits = [(int(key.max()) - low).bit_length() for key, low in zip(keys, lows, strict=True)]
    if sum(bits) + row_bits > 63:
        return np.lexsort(keys[::-1])
    packed = np.zeros(count, dtype=np.int64)
    for key, low, width in zip(keys, lows, bits, strict=True):
        packed <<= width
        packed |= key - low if low else key
    packed <<= row_bits
    packed |= np.arange(count)
    packed.sort()
    packed &= (1 << row_bits) - 1
    return packed


def last_before(key: Ints, time: Ints, of_key: Ints, of_time: Ints) -> Ints:
    """For each `of_key` and `of_time`: which moment `time` with the same `key` is the last up to then; -1 for none."""
    count = len(key)
    asks = np.repeat([0, 1], [count, len(of_key)])
    order = order_by(np.concatenate([key, of_key]), np.concatenate([time, of_time]), asks)
    place = np.maximum.accumulate(np.where(order < count, np.arange(len(order)), -1))
    last = np.empty_like(order)
    last[order] = np.where(place >= 0, order[place], -1)
    last = last[count:]
    return np.where((last >= 0) & (np.append(key, -1)[last] == of_key), last, -1)


def in_groups(values: Ints) -> list[tuple[int, Ints]]:
    """Each value that occurs, and where, both in order: one sort, however many values there are."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    edges = itertools.pairwise([*first.tolist(), len(order)])
    return [(value, order[low:high]) for value, (low, high) in zip(ordered[first].tolist(), edges, strict=True)]
