"""How many waiting rows to take, for every length of the queue: the batcher as a Markov decision process.

Whenever a worker becomes free and ``n`` rows wait, some ``b`` of them are taken. That call takes ``cost[b]``, during
which a Poisson number of rows arrives; then a worker is free again. What is minimised is the mean number of rows in the
system at a steady load, which by Little's law is the mean latency. Policy iteration (R. A. Howard, *Dynamic Programming
and Markov Processes*, 1960) starts from taking all that wait, and each of its steps can only lower the mean.

Looking only at the rows that wait now is not enough: it takes the cheapest call, and calls that are cheap for those who
wait can be dear a row, which those pay who come later.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from heapq import heapreplace
from typing import Any

import numpy as np

LOADS = (0.1, 0.3, 0.5, 0.7, 0.85)
"""Of the rate that the cheapest rows allow: where a policy is found, and where it must not be worse than greedy.

Where one row alone costs many times what a row does in the best batch, the lowest of them is no light load: there
`_World.loads` begins lower.
"""
_ALL = 32
"""Up to so many rows every number is a choice; above, those at which the cost bends."""
_STEPS = 12
_SEEN = 2000
"""Arrivals by which tails are compared,"""
_NOISE = 1.03
"""and how far apart those of equal policies may be."""
_Array = np.ndarray[Any, Any]


def takes(cost: Sequence[float], workers: int, margin: float) -> tuple[int, ...]:
    """``take[n]`` for 0 to four (for large batches two) times as many rows as a call may have.

    `cost` is in seconds by rows, ``cost[0]`` unused. Greedy where nothing lowers the mean latency by more than `margin`
    at some load, or what does raises it at another.
    """
    most = len(cost) - 1
    if most == 1:
        return tuple(min(n, 1) for n in range(5))
    world = _World(np.asarray(cost, dtype=float), workers)
    greedy, loads = world.greedy(), world.loads()
    means = [world.evaluate(greedy, load)[0] for load in loads]
    tails = [world.tail(greedy, load) for load in loads]

    def score(policy: _Array) -> float | None:
        """Sum of the logarithms of the means against greedy; None where it is worse at some load."""
        found = 0.0
        for load, mean in zip(loads, means, strict=True):
            its_mean = world.evaluate(policy, load)[0]
            if its_mean > mean * (1 + 1e-9):
                return None
            found += math.log(its_mean / mean)
        late = any(world.tail(policy, load) > tail * _NOISE for load, tail in zip(loads, tails, strict=True))
        return None if late else found

    chosen, gain = greedy, math.log(1 - margin) * len(LOADS)
    waiting = np.arange(world.top + 1)
    for load in loads:
        policy = world.improve(greedy, load)
        # The best at a heavy load may be bad at a light one, but few rows seldom wait at the heavy one: what is done
        # with few is then left as lighter loads want it.
        for few in (0, *(2**power for power in range(0, most.bit_length() + 1, 1 if most <= _ALL else 2))):
            mixed = np.where(waiting <= few, chosen, policy)
            if (mixed == chosen).all():
                break
            found = score(mixed)
            if found is not None:
                if found < gain:
                    chosen, gain = mixed, found
                break
    return tuple(int(rows) for rows in world.whole(chosen)[: (4 if most <= _ALL else 2) * most + 1])


class _World:
    """Queue lengths from 0 to `top`, as a worker finds them that has become free. Longer queues count as `top`."""

    def __init__(self, cost: _Array, workers: int) -> None:
        self.most = len(cost) - 1
        self.top = max(3 * self.most, min(8 * self.most, 512))
        self.cost = cost
        self.gap = cost / workers
        """Until one of the workers is free again, on average."""
        self.best_rate = float((np.arange(1, self.most + 1) / self.gap[1:]).max())
        self.choices = _choices(cost)
        self.workers = workers
        self._moments = np.random.default_rng(0).exponential(1.0, _SEEN).cumsum()
        self._arrivals: dict[tuple[float, int], _Array] = {}

    def loads(self) -> list[float]:
        """`LOADS`, and before them lighter ones until calls of one row would do."""
        found, single = [LOADS[0]], 1 / self.gap[1] / self.best_rate
        while found[0] > single / 2:
            found.insert(0, found[0] / 3)
        return [*found, *LOADS[1:]]

    def greedy(self) -> _Array:
        """All that wait, as far as that is a choice."""
        place = np.searchsorted(self.choices, np.arange(self.top + 1), side="right") - 1
        return np.where(place >= 0, self.choices[np.maximum(place, 0)], 0)

    def whole(self, policy: _Array) -> _Array:
        """A policy for every number of rows: where it takes all that is a choice, all that there are."""
        return np.where(policy == self.greedy(), np.minimum(np.arange(self.top + 1), self.most), policy)

    def arrivals(self, load: float, rows: int) -> _Array:
        """Probabilities of 0, 1, ... `top` rows during a call."""
        if (load, rows) not in self._arrivals:
            mean = load * self.best_rate * self.gap[rows]
            count = np.arange(self.top + 1)
            logs = count * math.log(mean) - mean - np.concatenate([[0.0], np.log(np.arange(1, self.top + 1)).cumsum()])
            self._arrivals[load, rows] = np.exp(logs)
        return self._arrivals[load, rows]

    def price(self, waiting: _Array | int, rows: int, load: float) -> Any:
        """Row seconds in the system until a worker is free again: of rows taken, left, and to come."""
        gap = self.gap[rows]
        return rows * self.cost[rows] + (waiting - rows) * gap + load * self.best_rate * gap**2 / 2

    def tail(self, policy: _Array, load: float) -> float:
        """The 99th percentile of the latency of `_SEEN` Poisson arrivals, the same for every policy."""
        arrivals = (self._moments / (load * self.best_rate)).tolist()
        take, cost, last = policy.tolist(), self.cost.tolist(), self.top
        free = [0.0] * self.workers  # when each worker is free
        first, latencies = 0, []
        while first < _SEEN:
            now = max(free[0], arrivals[first])
            rows = take[min(bisect_right(arrivals, now, first) - first, last)]
            end = now + cost[rows]
            heapreplace(free, end)
            latencies += [end - moment for moment in arrivals[first : first + rows]]
            first += rows
        return float(np.percentile(latencies, 99))

    def evaluate(self, policy: _Array, load: float) -> tuple[float, _Array]:
        """Mean number of rows in the system under a policy, and how much worse each queue length is than an empty one.

        Solves ``worse[n] = price - mean gap + sum of p worse[n']`` with ``worse[0] = 0``.
        """
        left, right = self._equations(policy, load)
        found = np.linalg.solve(left, right)
        return float(found[-1]), found[:-1]

    def _equations(self, policy: _Array, load: float) -> tuple[_Array, _Array]:
        size = self.top + 1
        left, right = np.zeros((size + 1, size + 1)), np.zeros(size + 1)
        left[:size, :size] = np.eye(size)
        left[0, 1] -= 1  # nobody waits: until somebody comes
        left[0, size] = 1 / (load * self.best_rate)
        for waiting in range(1, size):
            rows = int(policy[waiting])
            after, chance = waiting - rows, self.arrivals(load, rows)
            left[waiting, after:size] -= chance[: size - after]
            left[waiting, size - 1] -= max(0.0, 1.0 - chance[: size - after].sum())
            left[waiting, size] = self.gap[rows]
            right[waiting] = self.price(waiting, rows, load)
        left[size, 0] = 1
        return left, right

    def improve(self, policy: _Array, load: float) -> _Array:
        """Policy iteration until nothing changes."""
        for _ in range(_STEPS):
            mean, worse = self.evaluate(policy, load)
            values = np.full((len(self.choices), self.top + 1), np.inf)
            for index, rows in enumerate(self.choices.tolist()):
                waiting = np.arange(rows, self.top + 1)
                later = self._later(worse, load, rows)[: len(waiting)]
                values[index, rows:] = self.price(waiting, rows, load) - mean * self.gap[rows] + later
            now = values[np.searchsorted(self.choices, policy[1:]), np.arange(1, self.top + 1)]
            best = values[:, 1:].argmin(0)
            better = values[best, np.arange(1, self.top + 1)] < now - 1e-9 * np.abs(now)
            if not better.any():
                break
            policy = policy.copy()
            policy[1:][better] = self.choices[best[better]]
        return policy

    def _later(self, worse: _Array, load: float, rows: int) -> _Array:
        """Expected ``worse`` after a call, by the rows that were left."""
        chance = self.arrivals(load, rows)
        longer = np.concatenate([worse, np.full(self.top, worse[-1])])
        rest = max(0.0, 1.0 - float(chance.sum())) * worse[-1]
        expected: _Array = np.correlate(longer, chance, "valid") + rest
        return expected


def _choices(cost: _Array) -> _Array:
    """Numbers of rows worth a thought: all, or of many those at which the cost bends most."""
    most = len(cost) - 1
    if most <= _ALL:
        return np.arange(1, most + 1)
    bend = np.abs(np.diff(cost[1:], 2))  # of 2, 3, ... most - 1 rows
    bends = 2 + np.argsort(-bend, kind="stable")[: _ALL - 10]
    return np.unique(np.concatenate([np.arange(1, 9), bends, [most]]))
