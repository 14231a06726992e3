"""Which event encloses another, by the parents of events."""

from __future__ import annotations

import numpy as np

from fettle.trace.intervals import Ints


def nearest(parent: Ints, flags: np.ndarray, rows: Ints) -> Ints:
    """By row, the nearest event at or above each of `rows` that is flagged; -1 for none.

    Each row's `parent` is followed in doubling steps.
    """
    answer = np.where(flags, np.arange(len(flags)), -1)
    above = parent.copy()
    active = rows[(answer[rows] < 0) & (above[rows] >= 0)]
    while len(active):
        own = answer[above[active]]
        hit = own >= 0
        # The whole stretch above has been searched only once its own answer is settled, so take the nearest known one.
        answer[active[hit]] = own[hit]
        rest = active[~hit]
        above[rest] = above[above[rest]]
        active = rest[above[rest] >= 0]
    return answer
