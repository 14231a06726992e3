"""Whether clients that were just answered ask again at once, so that a free worker is worth holding back a moment.

Eight clients that each wait for their answer should share calls of eight. Without a moment's patience they fall into
groups that take turns: whenever a batch is answered, those that missed it are sent off, and never meet the others. A
window from the first arrival does not help, as they have waited longer than that already. So what is awaited is the
return of those that were just answered: known from disk scheduling as anticipation (Iyer and Druschel, SOSP 2001).

Awaited is a share of the last call's time, and as long as they keep coming: where a call takes less time than reading
its requests and writing its answers, the clients are back before we are through with that, and a worker that was sent
off meanwhile would have torn them apart. When nothing has come for a few turns of the event loop that is over.
"""

from __future__ import annotations

SHARE = 0.2
"""A client of whom nothing is seen yet is awaited for this share of the last call's time."""
MOST_S = 0.005
"""The longest that a free worker is held back, and so the most that it can cost."""
TRUST = 0.5
"""Share of the answered clients that must return in time on average. Independent arrivals do not."""
QUIET = 3
"""Turns of the event loop without an arrival: answers are written in the first, what comes is read after the second,
and counted in the third."""
_SMOOTHING = 0.3


class Anticipation:
    """Sees answers, arrivals and turns of the event loop; says until when to wait. No clock: moments are handed in."""

    def __init__(self) -> None:
        self.share = 0.0
        """Share of the answered requests that were followed by another one in time: a moving average."""
        self._answered = self._due = 0
        self._until_s = self._end_s = 0.0
        """Until when others are awaited once it is quiet, and as it is now."""
        self._quiet = 0

    def answered(self, requests: int, took_s: float, now_s: float) -> None:
        """A call of so many requests has been answered."""
        if self._answered:
            self.share += _SMOOTHING * ((self._answered - self._due) / self._answered - self.share)
        self._answered = self._due = requests
        self._until_s, self._end_s = now_s + min(SHARE * took_s, MOST_S), now_s + MOST_S
        self._quiet = 0

    def arrived(self, now_s: float) -> None:
        """A request has come."""
        self._quiet = 0
        if self._due and now_s < self._end_s:
            self._due -= 1

    def turn(self) -> bool:
        """The event loop has done what it had to; whether to report its next turn, too."""
        self._quiet += 1
        if self._due > 0 and self._quiet < QUIET:
            return True
        self._end_s = self._until_s
        return False

    def hold_s(self, now_s: float) -> float:
        """Until when others are awaited at the longest; 0 when nobody is."""
        return self._end_s if self._due and self.share > TRUST and now_s < self._end_s else 0.0
