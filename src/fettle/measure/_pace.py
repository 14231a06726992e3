"""Ends the preparation of a recipe that is far too slow to win, before a minute goes into judging and timing it.

On a CPU without bfloat16 a step in bfloat16 takes twenty times as long as one in float32, and judging its losses
took a fourth of a study's five minutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from fettle.measure._waits import Waits, waited_ns

FAR = 5.0
"""How many times the baseline's time ends a recipe. Interactions change a gain by less (`search/_evidence.py`)."""
_CALLS = 2
"""Calls that must all take that long: one may recompile, or meet a neighbour."""


class TooSlow(Exception):
    """A recipe cannot win, whatever more is measured of it."""


@dataclass
class Pace:
    """What warm calls may take. One that keeps the limit is enough: the recipe is not looked at again."""

    waits: Waits
    limit_ns: float = math.inf
    _over: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it is still to be seen that the recipe keeps the limit."""
        return self.limit_ns < math.inf

    def timed(self, call: Callable[[], int]) -> int:
        """The nanoseconds of `call`. Raises `TooSlow` after the second that is over the limit even without the time
        that its threads waited for a core."""
        if not self.is_open:
            return call()
        self.waits.refresh()
        before = self.waits.by_thread()
        ns = call()
        if ns - sum(waited_ns(before, self.waits.by_thread())) <= self.limit_ns:
            self.limit_ns = math.inf
            return ns
        self._over += 1
        if self._over >= _CALLS:
            raise TooSlow(
                f"a call takes {ns / 1e6:.0f} ms, more than {FAR:g} times as long as that of the workload as given: "
                "no more is measured of it"
            )
        return ns
