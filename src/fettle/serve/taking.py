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
from collections.abc import Sequence
from typing import Any

import numpy as np

LOADS = (0.1, 0.3, 0.5, 0.7, 0.85)
"""Of the rate that the cheapest rows allow: where a policy is found, and where it must not be worse than greedy."""
_ALL = 32
"""Up to so many rows every number is a choice; above, those at which the cost bends."""
_STEPS = 12
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
    greedy = world.greedy()
    chosen, gain = greedy, math.log(1 - margin) * len(LOADS)
    by_greedy = [world.outcome(greedy, load) for load in LOADS]
    for load in LOADS:
        policy = world.improve(greedy, load)
        ratios = np.array([world.outcome(policy, load) for load in LOADS]) / by_greedy
        score = float(np.log(ratios[:, 0]).sum())
        if ratios.max() <= 1 + 1e-9 and score < gain:
            chosen, gain = policy, score
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
        self._arrivals: dict[tuple[float, int], _Array] = {}

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

    def outcome(self, policy: _Array, load: float) -> tuple[float, float]:
        """Mean number of rows in the system, and the mean of its square at the moments of a decision: the tail."""
        left, right = self._equations(policy, load)
        waiting = np.arange(self.top + 1)
        squares = np.append(waiting**2 * np.where(waiting > 0, self.gap[policy], 0.0), 0.0)
        found = np.linalg.solve(left, np.stack([right, squares], 1))
        return float(found[-1, 0]), float(found[-1, 1])

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
