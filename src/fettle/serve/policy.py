"""The batching decision: which waiting requests go to a worker now, or until when to wait.

No clock, no IO, no threads: every moment is handed in as `now_s`, so that the server and the simulation run this very
code. The order of use is

    queue.push(item)                  a request arrived (False: the queue is full)
    queue.discard(item)               its client went away
    queue.expire(now_s)               those whose deadline has passed, taken out
    queue.take(now_s, free_workers)   a `Batch` to dispatch now, or None
    queue.take_full()                 the batch that comes next whatever else arrives, or None
    queue.wake_s(now_s)               the next moment at which `take` or `expire` may do more without a new event

Call `take` whenever a request arrives, a worker becomes free, or `wake_s` has come, until it returns None.

Two policies. *greedy* takes all that wait, up to `max_rows`. *curve* chooses how many from the measured cost of each
batch size, because the cost is a step function more often than a line: on one CPU model 3 rows took 21 ms and 4 took
40, so 3 and then 1 beats 4.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, Literal, Protocol, TypeVar

from fettle.serve.taking import takes

PolicyName = Literal["greedy", "curve"]

MARGIN = 0.02
"""The curve policy leaves the greedy choice only for a predicted gain above this share: a curve is a measurement."""
MAX_ROWS, MAX_WORKERS = 1 << 14, 256
"""What a package may ask for: there are tables of as many rows, and as many processes."""
CURVE_ROWS = 256
"""Larger batches are greedy: finding the best choice for so many lengths of the queue takes minutes."""


@dataclass(frozen=True)
class CostCurve:
    """What one call costs by its number of rows, measured: seconds for each of the batch sizes in `rows`."""

    rows: tuple[int, ...]
    """Increasing, at least 1."""
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.rows or len(self.rows) != len(self.seconds):
            raise ValueError("a cost curve needs as many times as batch sizes, at least one")
        if self.rows[0] < 1 or any(b <= a for a, b in itertools.pairwise(self.rows)):
            raise ValueError("the batch sizes of a cost curve must increase from 1 or more")
        if any(not math.isfinite(value) or value <= 0 for value in self.seconds):
            raise ValueError("the times of a cost curve must be positive numbers")

    def at(self, rows: int) -> float:
        """Seconds for a call with that many rows: measured, else interpolated; beyond the last in proportion."""
        index = bisect_left(self.rows, rows)
        if index == len(self.rows):
            return self.seconds[-1] * rows / self.rows[-1]
        if self.rows[index] == rows or index == 0:
            return self.seconds[index]
        low, high = self.rows[index - 1], self.rows[index]
        share = (rows - low) / (high - low)
        return self.seconds[index - 1] * (1 - share) + self.seconds[index] * share


@dataclass(frozen=True)
class BatchSettings:
    """The knobs of one model's batcher."""

    max_rows: int = 8
    """Most rows in one call. A single request may not have more."""
    max_delay_s: float = 0.0
    """How long the first request of a batch may wait for others while a worker is free; 0 never lets one idle."""
    policy: PolicyName = "curve"
    """Without a cost curve both are greedy."""
    pad: bool = False
    """May add rows where a larger call costs less. Only for models whose rows do not influence each other."""
    buckets: tuple[int, ...] = ()
    """Where not empty: a call has one of these numbers of rows, filled up with padding (compiled shapes, graphs)."""
    max_queue_rows: int = 1024
    """Rows that may wait; beyond it requests are refused."""
    workers: int = 1

    def __post_init__(self) -> None:
        if not (1 <= self.max_rows <= MAX_ROWS and 1 <= self.workers <= MAX_WORKERS and self.max_queue_rows >= 1):
            raise ValueError(
                f"max_rows is 1 to {MAX_ROWS}, workers is 1 to {MAX_WORKERS}, max_queue_rows is at least 1"
            )
        if not 0 <= self.max_delay_s < math.inf:
            raise ValueError("max_delay_s must be a number of seconds, 0 or more")
        if self.buckets and (self.buckets[0] < 1 or any(b <= a for a, b in itertools.pairwise(self.buckets))):
            raise ValueError("buckets must increase from 1 or more")
        if self.buckets and self.buckets[-1] < self.max_rows:
            raise ValueError("the largest bucket must hold max_rows")


@dataclass(frozen=True)
class Plan:
    """The decision for every number of waiting rows, computed once from settings and curve."""

    take: tuple[int, ...]
    """``take[n]``: rows to take when n rows wait; the last entry holds for more."""
    size: tuple[int, ...]
    """``size[n]``: rows of the call that carries n rows, padding included."""
    waits: tuple[bool, ...]
    """``waits[n]``: whether n waiting rows should wait for more, within `max_delay_s`."""
    row_s: float = 0.0
    """Seconds a row costs at the best batch size with all workers busy; 0 when no curve is known."""


@lru_cache(maxsize=4096)
def plan(settings: BatchSettings, curve: CostCurve | None = None) -> Plan:
    """The tables of `settings` for a measured `curve`."""
    most = settings.max_rows
    if curve is None:
        size = [0, *(_bucket(settings, rows) for rows in range(1, most + 1))]
        take = tuple(range(most + 1))
        return Plan(take, tuple(size), tuple(rows < most for rows in range(most + 1)))
    size, cost = [0], [0.0]
    for rows in range(1, most + 1):
        sizes = [_bucket(settings, rows)]
        if settings.pad:
            sizes += [bucket for bucket in settings.buckets if bucket > rows] or range(rows, most + 1)
        chosen = min(sizes, key=lambda n: (curve.at(n), n))
        if curve.at(chosen) > (1 - MARGIN) * curve.at(sizes[0]):
            chosen = sizes[0]
        size.append(chosen)
        cost.append(curve.at(chosen))
    row_s = min(cost[rows] / rows for rows in range(1, most + 1)) / settings.workers
    if settings.policy == "greedy" or most > CURVE_ROWS:
        waits = tuple(rows < most for rows in range(most + 1))
        return Plan(tuple(range(most + 1)), tuple(size), waits, row_s)
    best = math.inf
    pays = [False] * (most + 1)  # would a larger batch cost less a row?
    for rows in range(most, 0, -1):
        pays[rows] = best < (1 - MARGIN) * cost[rows] / rows
        best = min(best, cost[rows] / rows)
    pays[0] = True
    take = takes(cost, settings.workers, MARGIN)
    while len(take) > most + 1 and take[-1] == take[-2]:  # so that plans which decide alike are equal
        take = take[:-1]
    return Plan(take, tuple(size), tuple(pays), row_s)


def _bucket(settings: BatchSettings, rows: int) -> int:
    """The size of a call for `rows` where only some sizes exist."""
    return settings.buckets[bisect_left(settings.buckets, rows)] if settings.buckets else rows


class Waiting(Protocol):
    """A request in the queue. Only the server's or the simulation's own object knows more."""

    arrival_s: float
    rows: int
    key: Hashable
    """Requests with equal keys may share a call: model version, dtypes, shapes without rows, parameters."""
    deadline_s: float
    """`math.inf` where there is none."""
    queued: bool
    """Kept by the queue: False again once it has been taken, discarded or expired."""


Item = TypeVar("Item", bound=Waiting)


@dataclass(frozen=True)
class Batch(Generic[Item]):
    """Requests that make one call."""

    items: Sequence[Item]
    rows: int
    size: int
    """Rows of the call: `rows` and the padding."""


@dataclass
class _Group(Generic[Item]):
    """Waiting requests of one key, oldest first. Those no longer queued are skipped when they reach the front."""

    items: deque[Item] = field(default_factory=deque)
    rows: int = 0


class BatchQueue(Generic[Item]):
    """The bounded queue of one model version, and the decision what leaves it. Rows count, not requests."""

    def __init__(self, settings: BatchSettings, curve: CostCurve | None = None) -> None:
        self.settings = settings
        self.plan = plan(settings, curve)
        self.rows = 0
        """Rows that wait now."""
        self.requests = 0
        """Requests that wait now."""
        self._groups: dict[Hashable, _Group[Item]] = {}
        self._deadlines: list[tuple[float, int, Item]] = []
        self._count = itertools.count()

    def change(self, settings: BatchSettings, curve: CostCurve | None = None) -> None:
        """Other settings for what waits and what comes; nothing is dropped."""
        self.settings, self.plan = settings, plan(settings, curve)

    def push(self, item: Item) -> bool:
        """Let a request wait. False when the queue is full. ValueError when it can never be served."""
        if not 1 <= item.rows <= self.settings.max_rows:
            raise ValueError(f"a request has {item.rows} rows; from 1 to {self.settings.max_rows} can be served")
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

    def discard(self, item: Item) -> bool:
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

    def expire(self, now_s: float) -> list[Item]:
        """Take out and return the requests whose deadline has come."""
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now_s or not self._deadlines[0][2].queued):
            item = heapq.heappop(self._deadlines)[2]
            if self.discard(item):
                expired.append(item)
        return expired

    def take(self, now_s: float, free_workers: int) -> Batch[Item] | None:
        """The batch to dispatch now; None when nothing should be. Call `expire` first: expired ones would be taken.

        Of the groups that are ready, the one whose first request is oldest.
        """
        if free_workers < 1 or not self.rows:
            return None
        chosen: _Group[Item] | None = None
        oldest = math.inf
        for group in self._groups.values():
            head = _head(group)
            if head.arrival_s < oldest and self._is_ready(group, head, now_s):
                chosen, oldest = group, head.arrival_s
        return None if chosen is None else self._taken(chosen)

    @property
    def has_full(self) -> bool:
        """Whether as many rows wait as a call may have; they need not share one."""
        return self.rows >= self.settings.max_rows

    def take_full(self) -> Batch[Item] | None:
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
        if self.settings.max_delay_s > 0:
            for group in self._groups.values():
                over_s = _head(group).arrival_s + self.settings.max_delay_s
                if over_s > now_s and self._may_wait(group.rows):
                    wake = min(wake, over_s)
        return wake

    def wait_s(self, ahead: int = 0) -> float:
        """How long a request that came now would about wait for its turn, behind rows that were taken before theirs.

        0 when no curve is known.
        """
        return (ahead + self.rows) * self.plan.row_s

    @property
    def gains_by_waiting(self) -> bool:
        """Whether some wait, and one more row would make their batch a better one."""
        take, rows = self.plan.take, self.rows
        return 0 < rows < len(take) - 1 and take[rows + 1] > take[rows] and self._may_wait(rows)

    def _may_wait(self, rows: int) -> bool:
        return rows < len(self.plan.waits) and self.plan.waits[rows]

    def _is_ready(self, group: _Group[Item], head: Item, now_s: float) -> bool:
        delay_s = self.settings.max_delay_s
        return delay_s <= 0 or not self._may_wait(group.rows) or now_s >= head.arrival_s + delay_s

    def _taken(self, group: _Group[Item]) -> Batch[Item]:
        take = self.plan.take
        wanted = take[group.rows] if group.rows < len(take) else take[-1]
        items: list[Item] = []
        rows = 0
        while group.items:
            item = group.items[0]
            if not item.queued:
                group.items.popleft()
                continue
            # The first always goes, also when it alone has more rows than the plan would take.
            if items and rows + item.rows > wanted:
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
        return Batch(items, rows, self.plan.size[rows])


def _head(group: _Group[Item]) -> Item:
    while not group.items[0].queued:
        group.items.popleft()
    return group.items[0]
