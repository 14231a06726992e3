"""A look at the data of a race: who is certainly not the best, and whether the race is over."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from fettle.measure import _statistics
from fettle.measure._candidates import Started
from fettle.measure._rules import Rules

_EXPENSIVE_CALL_NS = 1_000_000_000


def decided(running: Sequence[Started], anchor: Started, rules: Rules) -> bool:
    """Drop what is certainly not the best; say whether the race is over."""
    live = [started for started in running if started.live]
    if rules.settle_verdicts:
        for started in live:
            started.live = started is anchor or not _is_settled(anchor, started, rules)
        return all(not started.live for started in running if started is not anchor)
    for started in live:
        if started.rejected:  # shown with its speed, but it cannot win: the first look is enough
            started.live = False
    able = [started for started in live if started.live and not started.rejected]
    if not able or (able == [anchor] and len(running) > 1):
        return True
    # Speed-ups refer to the anchor: it stays to the end, unless one call of it would cost as much as a round.
    anchor_stays = anchor.live and not is_expensive(anchor)
    leader = _fastest(able)
    alpha = rules.alpha / max(1, len(able) - 1)
    for started in able:
        if started is leader or (started is anchor and anchor_stays):
            continue
        behind = _statistics.log_interval(log_ratios(started, leader), alpha)  # log(this / leader)
        if behind.low > 0 or behind.high < math.log(1 + rules.indifference):
            started.live = False
    in_doubt = sum(started.live for started in running if started is not anchor or started is leader)
    return in_doubt <= 1 and (leader is anchor or not anchor_stays or _is_precise(anchor, leader, rules))


def is_expensive(started: Started) -> bool:
    """Whether one call costs as much as a round of small models."""
    return bool(started.first.answer.call_ns >= _EXPENSIVE_CALL_NS)


def _is_settled(anchor: Started, started: Started, rules: Rules) -> bool:
    """Whether more rounds would tell no more of a candidate against the anchor.

    With replicates the only question is how precise the rounds have become, whatever they say: a race that stops for
    its precision may be judged once, at the full error rate. With one process the verdict itself is waited for, and
    every look pays its share.
    """
    replicated = min(len(anchor.runners), len(started.runners)) > 1
    alpha = 1 - rules.confidence if replicated else rules.alpha
    found = _statistics.log_interval(log_ratios(anchor, started), alpha)
    precise = found.high - found.low < 2 * math.log(1 + rules.indifference)
    if replicated:
        return precise
    return precise and _statistics.verdict(_statistics.exp(found), rules.indifference) != "cannot tell"


def _is_precise(anchor: Started, leader: Started, rules: Rules) -> bool:
    """Whether the leader's speed-up is known as well as the rules ask."""
    found = _statistics.log_interval(log_ratios(anchor, leader), rules.alpha)
    return rules.precision is None or (found.high - found.low) / 2 <= rules.precision


def log_ratios(slower: Started, faster: Started) -> list[float]:
    """log(time of the first / time of the second) for each round that both took part in: see `_statistics.paired`."""
    return _statistics.paired(slower.per_sample, faster.per_sample)


def _fastest(able: Sequence[Started]) -> Started:
    """Whoever has the smallest median, over quiet rounds where all have enough of them."""
    logs = [started.per_sample for started in able]
    quiet = [[value for number, value in log.items() if number > 0] for log in logs]
    if min(map(len, quiet)) < _statistics.ENOUGH:
        quiet = [list(log.values()) for log in logs]
    middle = [statistics.median(values or [math.inf]) for values in quiet]
    return able[middle.index(min(middle))]
