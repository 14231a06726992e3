"""The rounds of a race: slices in random order, each made again where others had the machine, with a look at the data
now and then."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fettle.measure import _statistics
from fettle.measure._load import QUIET_OTHERS, Load
from fettle.measure._priority import HIGHEST, READY, prefer
from fettle.measure._process import WorkerError
from fettle.measure._rules import OnProgress, Progress, Rules
from fettle.measure._runners import Runner, Started
from fettle.measure._statistics import LOOKS
from fettle.measure._trial import Slice
from fettle.measure._watch import Patience, Watch, neighbours
from fettle.measure.messages import SliceTaken, TakeSlice

_BUSY_S = 2.0
_CALL_TIMEOUT_S = 120.0
LITTLE_WAITING = 0.2
"""Seconds a second that threads of a slice that goes first may wait: elapsed time is nearer to a call's own than what
is left of it then, as threads that spin at a barrier wait as well (docs/measuring.md)."""

_TAKING_TURNS = 0.9
"""Seconds a second that threads of a slice that goes first wait where two of them share a core: for each other, each at
every barrier until the other has spun for its whole turn. What is left of the time then is none of the call's."""


@dataclass
class Rounds:
    """The rounds of one race, and what it has seen of the machine."""

    rules: Rules
    order: random.Random
    on_progress: OnProgress
    patience: Patience = field(default_factory=Patience)
    watch: Watch = field(default_factory=Watch)
    _busy_until: float = 0.0
    """Until when the machine is taken to be busy, after a slice in which others had it."""
    _first: set[int] = field(default_factory=set)
    """Processes that go first. They do so until none need to: what a group of tasks has had above its share grows with
    each change of its weight, and beside a busy process it then waited a tenth of a second at its next slice."""

    def run(self, running: Sequence[Started], anchor: Started, before: int = 0) -> None:
        """Run until the leader is certain, nothing is left to win, or time is up. `before`: rounds that have been run
        already, which are neither counted nor looked at again."""
        try:
            self._run(running, anchor, before)
        finally:
            self._nobody_first()

    def _run(self, running: Sequence[Started], anchor: Started, before: int) -> None:
        rules = self.rules
        self.watch.restart()
        for runner in [runner for started in running for runner in started.runners if runner.answer.gpu]:
            self.watch.own |= {one.pid for one in runner.worker.tree()}  # ranks are its children
        for count in range(1, (rules.equal_rounds or rules.max_rounds) + 1):
            turns = [(started, runner) for started in running if started.live for runner in started.runners]
            self.order.shuffle(turns)
            for started, runner in turns:
                if not started.live:
                    continue
                if count > 1 and rules.is_stopped:
                    return
                try:
                    self._turn(runner, before + count)
                except WorkerError as error:
                    started.live, runner.failure = False, str(error)
                    runner.worker.close()  # the others may need its memory
            live = sum(started.live for started in running)
            self.on_progress(Progress(f"round {before + count}, {live} in the race"))
            ends_early = not rules.equal_rounds and count in LOOKS
            if ends_early and count >= _fewest_rounds(running) and decided(running, anchor, rules):
                return
            if time.monotonic() > rules.deadline and count >= LOOKS[0]:
                return
            if rules.is_stopped:
                return
            if len(running) == 1 and is_expensive(anchor):
                return  # alone: every race in which it meets another recipe times it again
            if not any(started.live for started in running):
                return

    def _turn(self, runner: Runner, number: int) -> None:
        """A slice of a process. Where others had the machine it is made again: when they are gone, while there is
        patience left, else before them (`_priority`), else with its threads held apart (`_waits.one_core_each`)."""
        while True:
            first = self._is_busy() and self.rules.may_go_first
            load = self._slice(runner, number, first)
            if load.is_quiet or self.rules.under_load:
                return
            if self.patience.may_wait() and not load.is_quota:
                self.on_progress(Progress(f"the machine is busy ({load}): waiting for a quiet moment"))
                came = self.patience.wait(self.watch, self.rules.deadline)
                self._busy_until = 0.0 if came else time.monotonic() + _BUSY_S
                if came:
                    continue
            if first or not self.rules.may_go_first:
                return

    def _nobody_first(self) -> None:
        while self._first:
            prefer(self._first.pop(), READY)

    def _is_busy(self) -> bool:
        return time.monotonic() < self._busy_until and not self.rules.under_load

    def _slice(self, runner: Runner, number: int, first: bool) -> Load:
        began, apart = time.monotonic(), self._is_busy() and not first
        sample_s = runner.answer.calls * runner.answer.call_ns / 1e9
        timeout_s = _CALL_TIMEOUT_S + 20 * sample_s + self.rules.slice_s
        if not first:
            self._nobody_first()
        elif runner.worker.pid not in self._first:
            self._first.add(runner.worker.pid)
            prefer(runner.worker.pid, HIGHEST)
        wanting = neighbours() if self._is_busy() else 0  # our own processes all rest now
        answer = runner.worker.ask(TakeSlice(self.rules.slice_s, apart, wanting), SliceTaken, timeout_s)
        runner.worker.pause()
        runner.turns_s.append(time.monotonic() - began)
        self.watch.mark(answer.cpu_s)
        self.watch.gpus = answer.gpus
        load = self.watch.load(answer.waits)
        if not load.is_quiet:
            now = time.monotonic()
            self._busy_until = now + max(_BUSY_S, 4 * (now - began))  # or every long call would be made twice
        elif not first:
            self.patience.given_up = False
        runner.loads.append(load)
        elapsed = statistics.median(answer.samples_ns)
        unhindered = min(answer.unhindered_ns, elapsed)  # a few calls among many that waited can hold most of the time
        if not (load.is_quiet or first or apart or self.rules.under_load):
            unhindered = math.nan  # its threads may have shared a core: see `_waits.one_core_each`
        if first and load.waits <= LITTLE_WAITING:
            unhindered = elapsed
        elif first and load.waits > _TAKING_TURNS and not load.is_quota:
            unhindered = math.nan
        if load.gpu > QUIET_OTHERS:
            unhindered = math.nan  # nobody goes first on a GPU, nor says how long a call waited for it
        runner.samples_ns += answer.samples_ns
        runner.texts += answer.texts
        runner.slices.append(
            Slice(
                process=runner.process,
                round=number,
                ms=round(elapsed / 1e6, 6),
                unhindered_ms=None if math.isnan(unhindered) else round(unhindered / 1e6, 6),
                quiet=load.is_quiet and not (first or apart),
                waits=_rounded(load.waits),
                others=_rounded(load.others),
                pages=round(answer.pages),
                by_quota=load.is_quota,
            )
        )
        if answer.energy_j is not None:
            runner.energy_j.append(answer.energy_j)
        return load


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


_EXPENSIVE_CALL_NS, _CHEAP_CALL_NS = 1_000_000_000, 200_000_000


def decided(running: Sequence[Started], anchor: Started, rules: Rules) -> bool:
    """Drop what is certainly not the best; say whether the race is over."""
    live = [started for started in running if started.live]
    if rules.settle_verdicts:
        for started in live:
            started.live = started is anchor or not _is_settled(anchor, started, rules)
        return all(not started.live for started in running if started is not anchor)
    for started in live:
        if started.rejected:  # its speed is shown, but it cannot win: the first look is enough
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


def _fewest_rounds(running: Sequence[Started]) -> int:
    """Rounds before a race may end: of one alone as many as show whether its time swings, where calls are cheap."""
    alone = len(running) == 1 and len(running[0].runners) == 1
    return LOOKS[3] if alone and running[0].first.answer.call_ns < _CHEAP_CALL_NS else LOOKS[0]


def is_expensive(started: Started) -> bool:
    """Whether one call costs as much as a round of small models."""
    return bool(started.first.answer.call_ns >= _EXPENSIVE_CALL_NS)


def _is_settled(anchor: Started, started: Started, rules: Rules) -> bool:
    """Whether more rounds would tell no more of a candidate against the anchor.

    With replicates the only question is how precise the rounds have become, on their own or, with `Rules.narrow`,
    beside what the processes differ by, whatever they say: a race that stops for its precision may be judged once, at
    the full error rate. With one process the verdict itself is waited for, and every look pays its share.
    """
    slower, faster = anchor.process_logs(), started.process_logs()
    replicated = min(len(slower), len(faster)) > 1
    alpha = 1 - rules.confidence if replicated else rules.alpha
    interval = _statistics.log_interval(log_ratios(anchor, started), alpha)
    precise = interval.high - interval.low < 2 * math.log(1 + rules.indifference)
    if replicated:
        return precise or (rules.narrow > 0 and _statistics.is_exhausted(slower, faster, alpha, rules.narrow))
    return precise and _statistics.verdict(_statistics.exp(interval), rules.indifference) != "cannot tell"


def _is_precise(anchor: Started, leader: Started, rules: Rules) -> bool:
    """Whether the leader's speed-up is known as well as the rules ask."""
    interval = _statistics.log_interval(log_ratios(anchor, leader), rules.alpha)
    return rules.precision is None or (interval.high - interval.low) / 2 <= rules.precision


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
