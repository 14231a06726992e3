"""Whether clients that were just answered ask again at once, so that a free worker is worth holding back a moment.

Eight clients that each wait for their answer should share calls of eight. Without a moment's patience they fall into
groups that take turns: whenever a batch is answered, those that missed it are sent off, and never meet the others. A
window from the first arrival does not help, as they have waited longer than that already. So what is awaited is the
return of those that were just answered: known from disk scheduling as anticipation (Iyer and Druschel, SOSP 2001).
"""

from __future__ import annotations

SHARE = 0.2
"""Of the last call's time: the longest that a free worker is held back, and so the most that it can cost."""
MOST_S = 0.005
TRUST = 0.5
"""So many of the answered must be seen to return in time on average. Independent arrivals do not."""
_SMOOTHING = 0.3


class Returns:
    """Sees answers and arrivals; says until when to wait. No clock: every moment is handed in."""

    def __init__(self) -> None:
        self.share = 0.0
        """Of the answered requests, how many were followed by another one in time: a moving average."""
        self._answered = self._due = 0
        self._until_s = 0.0

    def answered(self, requests: int, took_s: float, now_s: float) -> None:
        """A call of so many requests has been answered."""
        if self._answered:
            self.share += _SMOOTHING * ((self._answered - self._due) / self._answered - self.share)
        self._answered = self._due = requests
        self._until_s = now_s + min(SHARE * took_s, MOST_S)

    def arrived(self, now_s: float) -> None:
        """A request has come."""
        if self._due and now_s < self._until_s:
            self._due -= 1

    def hold_s(self, now_s: float) -> float:
        """Until when others are awaited; 0 when nobody is."""
        return self._until_s if self._due and self.share > TRUST and now_s < self._until_s else 0.0
