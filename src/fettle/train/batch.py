"""The largest batch that fits: double until it does not, then bisect."""

from __future__ import annotations

from collections.abc import Callable


def largest_that_fits(fits: Callable[[int], bool], *, most: int = 64, start: int = 1) -> int:
    """The largest size from `start` to `most` that fits, 0 where `start` does not.

    `fits` must not become true again once it was false. It is asked about log2(most / start) sizes twice at most.
    """
    if not fits(start):
        return 0
    good, bad = start, most + 1
    while good * 2 <= most:
        if not fits(good * 2):
            bad = good * 2
            break
        good *= 2
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
