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
    packed = pack(*keys, np.arange(count, dtype=np.int64))
    if packed is None:
        order: Ints = np.lexsort(keys[::-1])
        return order
    packed.sort()
    packed &= (1 << (count - 1).bit_length()) - 1
    return packed


def in_groups(values: Ints) -> list[tuple[int, Ints]]:
    """Each value that occurs, and where, both in order: one sort, however many values there are."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    edges = itertools.pairwise([*first.tolist(), len(order)])
    return [(value, order[low:high]) for value, (low, high) in zip(ordered[first].tolist(), edges, strict=True)]


def pack(*keys: Ints) -> Ints | None:
    """One integer a row that sorts as the keys do, the last key in its lowest bits; None where 63 bits are too few."""
    if not len(keys[0]):
        return np.zeros(0, dtype=np.int64)
    lows = [int(key.min()) for key in keys[:-1]] + [0]
    bits = [(int(key.max()) - low).bit_length() for key, low in zip(keys, lows, strict=True)]
    if sum(bits) > 63:
        return None
    packed = np.zeros(len(keys[0]), dtype=np.int64)
    for key, low, width in zip(keys, lows, bits, strict=True):
        packed <<= width
        packed |= key - low if low else key
    return packed
