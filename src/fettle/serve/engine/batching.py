"""The batching decision: which waiting requests go to a worker now, or until when to wait.

Greedy: a free worker takes all that wait, up to `max_rows`. No clock, no IO, no threads: every moment is handed in as
`now_s`. Call `expire` and `take` whenever a request was pushed, a worker has become free, or `wake_s` has come; `take`
until it returns None.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Hashable, Sequence

import msgspec

from fettle.package.settings import ServeSettings
from fettle.serve.engine.request import Request


class Batch(msgspec.Struct, frozen=True):
    """Requests that make one call."""

    items: Sequence[Request]
    rows: int
    size: int
    """Rows of the call: `rows` and the padding."""


class _Group(msgspec.Struct):
    """Waiting requests of one key, oldest first. Those no longer queued are skipped when they reach the front."""

    items: deque[Request] = msgspec.field(default_factory=deque)
    rows: int = 0


class BatchQueue:
    """The bounded queue of one model version, and the decision what leaves it. Rows count, not requests."""

    def __init__(self, settings: ServeSettings) -> None:
        self.change(settings)
        self.rows = 0
        """Rows that wait now."""
        self.requests = 0
        """Requests that wait now."""
        self._groups: dict[Hashable, _Group] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._count = itertools.count()

    def change(self, settings: ServeSettings) -> None:
        """Other settings for what waits and what comes; nothing is dropped."""
        self.settings, self._delay_s = settings, settings.delay_ms / 1e3

    def push(self, item: Request) -> bool:
        """Let a request wait. False when the queue is full."""
        if self.rows + item.rows > self.settings.max_queue_rows and self.rows:
            return False
        group = self._groups.get(item.key)
        if group is None:
            group = self._groups[item.key] = _Group()
        group.items.append(item)
        group.rows += item.rows
        self.rows += item.rows
        self.requests += 1
        item.queued = True
        if item.deadline_s < math.inf:
            heapq.heappush(self._deadlines, (item.deadline_s, next(self._count), item))
            if len(self._deadlines) > 4 * self.requests + 64:  # most of it has been served long ago
                self._deadlines = [entry for entry in self._deadlines if entry[2].queued]
                heapq.heapify(self._deadlines)
        return True

    def discard(self, item: Request) -> bool:
        """Take out a request nobody waits for any more. False when it has left the queue already."""
        if not item.queued:
            return False
        item.queued = False
        group = self._groups[item.key]
        group.rows -= item.rows
        self.rows -= item.rows
        self.requests -= 1
        if not group.rows:
            del self._groups[item.key]
        return True

    def expire(self, now_s: float) -> list[Request]:
        """Take out and return the requests whose deadline has come."""
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now_s or not self._deadlines[0][2].queued):
            item = heapq.heappop(self._deadlines)[2]
            if self.discard(item):
                expired.append(item)
        return expired

    def take(self, now_s: float, free_workers: int) -> Batch | None:
        """The batch to dispatch now; None when nothing should be. Call `expire` first: expired ones would be taken.

        Of the groups that are ready, the one whose first request is oldest.
        """
        if free_workers < 1 or not self.rows:
            return None
        chosen: _Group | None = None
        oldest = math.inf
        for group in self._groups.values():
            arrival_s = _head(group).arrival_s
            is_over = self._delay_s <= 0 or now_s >= arrival_s + self._delay_s
            if arrival_s < oldest and (is_over or group.rows >= self.settings.max_rows):
                chosen, oldest = group, arrival_s
        return None if chosen is None else self._taken(chosen)

    @property
    def has_full(self) -> bool:
        """Whether as many rows wait as a call may have; they need not share one."""
        return self.rows >= self.settings.max_rows

    def take_full(self) -> Batch | None:
        """The batch that the next free worker gets, where no arrival could change it; else None.

        So it may be sent to a worker that is busy still. Only the group whose first request is oldest is looked at.
        """
        if not self.has_full:
            return None
        oldest = min(self._groups.values(), key=lambda group: _head(group).arrival_s)
        return self._taken(oldest) if oldest.rows >= self.settings.max_rows else None

    def wake_s(self, now_s: float) -> float:
        """When `take` or `expire` may do more without another event; `math.inf` when never.

        Groups whose window is over wait for a worker, and that is an event: nobody need be woken for them.
        """
        wake = math.inf
        while self._deadlines and not self._deadlines[0][2].queued:
            heapq.heappop(self._deadlines)
        if self._deadlines:
            wake = self._deadlines[0][0]
        if self._delay_s > 0:
            for group in self._groups.values():
                over_s = _head(group).arrival_s + self._delay_s
                if over_s > now_s and group.rows < self.settings.max_rows:
                    wake = min(wake, over_s)
        return wake

    @property
    def gains_by_waiting(self) -> bool:
        """Whether some wait, and their batch has room for more."""
        return 0 < self.rows < self.settings.max_rows

    def _taken(self, group: _Group) -> Batch:
        most = self.settings.max_rows
        items: list[Request] = []
        rows = 0
        while group.items:
            item = group.items[0]
            if not item.queued:
                group.items.popleft()
                continue
            # The first always goes, also when the settings were changed to fewer rows than it has.
            if items and rows + item.rows > most:
                break
            group.items.popleft()
            item.queued = False
            items.append(item)
            rows += item.rows
        group.rows -= rows
        self.rows -= rows
        self.requests -= len(items)
        if not group.rows:
            del self._groups[items[0].key]
        return Batch(items, rows, self.settings.call_rows(rows))


def _head(group: _Group) -> Request:
    while not group.items[0].queued:
        group.items.popleft()
    return group.items[0]
