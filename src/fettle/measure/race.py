"""The race: recipes measured in turn, interleaved, each in a process of its own, until the leader is known.

Read `race` from top to bottom: start the workers one after the other, then rounds of equal slices in random order,
with a look at the data now and then that drops what is certainly not the best. Where the rules ask for replicates and
starting them is cheap enough, an entry runs in several processes: what a process is given for life (where its memory
lies) makes two processes of the same code differ, and no number of rounds would show it.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from fettle.measure import _statistics
from fettle.measure._accuracy import judge
from fettle.measure._process import Worker, WorkerError
from fettle.measure._trial import Accuracy, Interval, Startup, Trial, nan_for_none
from fettle.recipe import Recipe

_DEAR_CALL_NS = 1_000_000_000


@dataclass(frozen=True)
class Entry:
    """A recipe at the start line: its source and what its process needs."""

    recipe: Recipe
    source: str
    environment: Mapping[str, str] = field(default_factory=dict)
    factor: int = 1
    """The batch is this many times larger."""
    calibrated: bool = False
    """Batches that calibrated it may not judge it."""
    ranks: int = 1
    """Processes that it is spread over."""


@dataclass(frozen=True)
class Rules:
    """How a race is run."""

    slice_s: float = 0.15
    """Length of one slice; a call that is longer is a slice of its own."""
    max_rounds: int = 48
    confidence: float = 0.95
    """Of the whole race: the looks share what is left."""
    indifference: float = 0.01
    """Differences below this are not worth more rounds."""
    precision: float | None = None
    """Go on until the leader's speed-up is known to within this share, half the interval's width: what an announced
    number needs. Only where a call of the baseline takes less than a second."""
    prepare_timeout_s: float = 900.0
    call_timeout_s: float = 120.0
    settle_verdicts: bool = False
    """Go on until each entry's verdict against the baseline is known, not only the leader: what `bench` wants."""
    replicates: int = 1
    """Processes for each entry, as far as `replicate_s` allows."""
    replicate_s: float = 60.0
    """What starting the second and further processes of all entries may take together, in seconds."""
    deadline: float = math.inf
    """`time.monotonic()` at which to stop: what has been measured by then counts."""

    @property
    def alpha(self) -> float:
        """Error rate of one look."""
        return (1 - self.confidence) / len(_statistics.LOOKS)


@dataclass(frozen=True)
class Judge:
    """Where the reference outputs lie, and what an answer may be off by."""

    path: str = ""
    max_error: float | None = None
    min_agreement: float | None = None
    max_metric_drop: float | None = None
    reference_metric: float = math.nan
    exempt_baseline: bool = True
    """The workload as given is measured also where its train mode makes its answers wrong."""


@dataclass(frozen=True)
class Progress:
    """What a race tells while it runs."""

    stage: str
    """``start`` a worker, ``round`` of the race, ``trial`` is known."""
    recipe: Recipe | None = None
    round: int = 0
    live: int = 0
    trial: Trial | None = None


@dataclass
class Held:
    """The baseline's process, kept from one race of a study to the next so that it is started once. Close it."""

    runner: _Runner | None = None

    def take(self) -> _Runner | None:
        """The runner, with nothing measured yet; None where there is none or it has died."""
        if self.runner is None or self.runner.failure:
            return None
        kept = self.runner
        return _Runner(kept.entry, kept.worker, kept.answer, kept.accuracy, kept.rejected, time.monotonic())

    def close(self) -> None:
        """End the process."""
        if self.runner is not None:
            self.runner.worker.close()
            self.runner = None


@dataclass
class _Runner:
    """One process of an entry."""

    entry: Entry
    worker: Worker
    answer: dict[str, Any]
    accuracy: Accuracy
    rejected: str
    began: float
    started_s: float = 0.0
    rounds_ms: dict[int, float] = field(default_factory=dict)
    samples_ns: list[int] = field(default_factory=list)
    energy_j: list[float] = field(default_factory=list)
    failure: str = ""

    @property
    def per_sample(self) -> dict[int, float]:
        """Log time of one row by round."""
        return {number: math.log(ms / self.answer["samples"]) for number, ms in self.rounds_ms.items()}


@dataclass
class _Entrant:
    """An entry in the race: its processes, the first of which speaks for all where they cannot differ."""

    runners: list[_Runner]
    live: bool = True

    @property
    def first(self) -> _Runner:
        return self.runners[0]

    @property
    def rejected(self) -> str:
        return next((runner.rejected for runner in self.runners if runner.rejected), "")

    @property
    def failure(self) -> str:
        return next((runner.failure for runner in self.runners if runner.failure), "")

    @property
    def per_sample(self) -> dict[int, float]:
        """Log time of one row by round, the mean over the processes."""
        logs = [runner.per_sample for runner in self.runners]
        return {number: statistics.fmean(log[number] for log in logs) for number in logs[0] if _in_all(number, logs)}


def race(
    target: Mapping[str, Any],
    fingerprint: str,
    entries: Sequence[Entry],
    judging: Judge,
    rules: Rules | None = None,
    *,
    log_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    tell: Callable[[Progress], None] = lambda progress: None,
    heat: int = 0,
    seed: int = 0,
    held: Held | None = None,
) -> list[Trial]:
    """Race `entries` on the workload of `target`; one trial each, in their order.

    The entry with the empty recipe is the baseline that every speed-up refers to; without one the first entry is.
    `target` is a `fettle.workload.Target` as plain data, `fingerprint` what it must build. Entries that were not
    begun when the deadline came are left out of the answer. With `held` the baseline's process outlives the race.
    """
    rules = rules or Rules()
    start = _Start(target, fingerprint, judging, rules, log_folder, environment or {}, heat, held)
    trials: dict[int, Trial] = {}
    with ExitStack() as stack:
        entrants = start.line_up(entries, trials, stack, tell)
        start.replicate(entrants, stack, tell)
        anchor = next((e for e in entrants.values() if not e.first.entry.recipe.levels), None) or next(
            iter(entrants.values()), None
        )
        if anchor is not None:
            _run_rounds(list(entrants.values()), anchor, rules, random.Random(seed * 1000 + heat), tell)
            if held is not None and anchor.failure:
                held.close()
        for index, entrant in entrants.items():
            trials[index] = _trial(entrant, anchor, rules, heat)
    for index in sorted(entrants):
        tell(Progress("trial", entries[index].recipe, trial=trials[index]))

    rest = list(entries[max(trials, default=-1) + 1 :])
    done = [trials[index] for index in sorted(trials)]
    if not rest or anchor is None or time.monotonic() > rules.deadline:
        return done
    # What did not fit into memory beside the others runs in a race of its own, the anchor in it again.
    later = race(target, fingerprint, [anchor.first.entry, *rest], judging, rules, log_folder=log_folder,
                 environment=environment, tell=tell, heat=heat, seed=seed + 1, held=held)  # fmt: skip
    return done + later[1:]


@dataclass(frozen=True)
class _Start:
    """What every worker of a race is started with."""

    target: Mapping[str, Any]
    fingerprint: str
    judging: Judge
    rules: Rules
    log_folder: Path | None
    environment: Mapping[str, str]
    heat: int
    held: Held | None

    def line_up(
        self, entries: Sequence[Entry], trials: dict[int, Trial], stack: ExitStack, tell: Callable[[Progress], None]
    ) -> dict[int, _Entrant]:
        """Start the workers one after the other; failures go into `trials`. Stops at the deadline, and when memory
        runs short: the entries after the last one touched have not been begun."""
        entrants: dict[int, _Entrant] = {}
        for index, entry in enumerate(entries):
            if index and time.monotonic() > self.rules.deadline:
                break
            is_held = self.held is not None and not entry.recipe.levels
            waiting = self.held.take() if self.held is not None and is_held else None
            if waiting is not None:
                entrants[index] = _Entrant([waiting])
                continue
            tell(Progress("start", entry.recipe))
            began = time.monotonic()
            try:
                runner = self.one(entry, f"{index:02d}")
            except WorkerError as error:
                if error.kind == "timeout" and time.monotonic() > self.rules.deadline:
                    break  # the budget ended it, not its own time limit: that says nothing about the recipe
                trials[index] = Trial(
                    entry.recipe, "failed", str(error), seconds=time.monotonic() - began, heat=self.heat
                )
                tell(Progress("trial", entry.recipe, trial=trials[index]))
                continue
            entrants[index] = _Entrant([runner])
            if self.held is not None and is_held:
                self.held.runner = runner
            else:
                stack.callback(runner.worker.close)
            if _memory_is_short() and len(entrants) > 1:
                break
        return entrants

    def replicate(self, entrants: Mapping[int, _Entrant], stack: ExitStack, tell: Callable[[Progress], None]) -> None:
        """Start the further processes of each entry that may win, a whole set at a time: as many sets as the rules ask
        for, and as time and memory allow."""
        able = {index: entrant for index, entrant in entrants.items() if not entrant.rejected}
        left_s = min(self.rules.replicate_s, self.rules.deadline - time.monotonic())
        for copy in range(1, self.rules.replicates):
            cost_s = sum(entrant.first.started_s for entrant in able.values())
            if len(able) < 2 or cost_s > left_s or _memory_is_short():
                return
            began = time.monotonic()
            for index, entrant in able.items():
                tell(Progress("start", entrant.first.entry.recipe))
                try:
                    runner = self.one(entrant.first.entry, f"{index:02d}-{copy}")
                except WorkerError as error:
                    entrant.first.failure, entrant.live = f"its process {copy + 1}: {error}", False
                    continue
                stack.callback(runner.worker.close)
                entrant.runners.append(runner)
            able = {index: entrant for index, entrant in able.items() if entrant.live}
            left_s -= time.monotonic() - began

    def one(self, entry: Entry, name: str) -> _Runner:
        """Start one process and pause it. Raises `WorkerError`, the process gone."""
        began = time.monotonic()
        log = self.log_folder / f"{self.heat:03d}-{name}.log" if self.log_folder else None
        worker = Worker({**self.environment, **entry.environment}, log, ranks=entry.ranks)
        try:
            runner = _start(worker, entry, self.target, self.fingerprint, self.judging, self.rules, began)
        except BaseException:
            worker.close()
            raise
        worker.pause()
        runner.started_s = time.monotonic() - began
        return runner


def _start(
    worker: Worker,
    entry: Entry,
    target: Mapping[str, Any],
    fingerprint: str,
    judging: Judge,
    rules: Rules,
    began: float,
) -> _Runner:
    built = worker.ask("build", rules.prepare_timeout_s, target=target)
    if fingerprint and built["fingerprint"] != fingerprint:
        raise WorkerError(
            "the factory built other weights or inputs than before: make it deterministic "
            "(seed every generator; fettle calls torch.manual_seed(0) first)"
        )
    timeout_s = max(10.0, min(rules.prepare_timeout_s, rules.deadline - time.monotonic() + 30.0))
    answer = worker.ask(
        "prepare",
        timeout_s,
        source=entry.source,
        label=str(entry.recipe),
        path=judging.path,
        factor=entry.factor,
        calibrated=entry.calibrated,
    )
    accuracy = msgspec.convert(nan_for_none(answer["accuracy"]), Accuracy)
    rejected = ""
    if judging.path and not (judging.exempt_baseline and not entry.recipe.levels):
        rejected = judge(
            accuracy,
            max_error=judging.max_error,
            min_agreement=judging.min_agreement,
            max_metric_drop=judging.max_metric_drop,
            reference_metric=judging.reference_metric,
        )
    return _Runner(entry, worker, answer, accuracy, rejected, began)


def _run_rounds(
    entrants: Sequence[_Entrant],
    anchor: _Entrant,
    rules: Rules,
    order: random.Random,
    tell: Callable[[Progress], None],
) -> None:
    """Slices in random order until the leader is certain, nothing is left to win, or time is up."""
    for number in range(1, rules.max_rounds + 1):
        turns = [(entrant, runner) for entrant in entrants if entrant.live for runner in entrant.runners]
        order.shuffle(turns)
        for entrant, runner in turns:
            if not entrant.live:
                continue
            try:
                timeout_s = rules.call_timeout_s + 20 * runner.answer["call_ns"] / 1e9 + rules.slice_s
                answer = runner.worker.ask("slice", timeout_s, seconds=rules.slice_s)
                runner.worker.pause()
            except WorkerError as error:
                entrant.live, runner.failure = False, str(error)
                continue
            samples = answer["samples_ns"]
            runner.samples_ns += samples
            runner.rounds_ms[number] = statistics.median(samples) / 1e6
            if answer["energy_j"] is not None:
                runner.energy_j.append(answer["energy_j"])
        tell(Progress("round", round=number, live=sum(entrant.live for entrant in entrants)))
        if number in _statistics.LOOKS and _decided(entrants, anchor, rules):
            return
        if time.monotonic() > rules.deadline and number >= _statistics.LOOKS[0]:
            return
        if not any(entrant.live for entrant in entrants):
            return


def _decided(entrants: Sequence[_Entrant], anchor: _Entrant, rules: Rules) -> bool:
    """Drop what is certainly not the best; say whether the race is over."""
    live = [entrant for entrant in entrants if entrant.live]
    if rules.settle_verdicts:
        for entrant in live:
            entrant.live = entrant is anchor or not _is_settled(anchor, entrant, rules)
        return all(not entrant.live for entrant in entrants if entrant is not anchor)
    for entrant in live:
        if entrant.rejected:  # shown with its speed, but it cannot win: the first look is enough
            entrant.live = False
    able = [entrant for entrant in live if not entrant.rejected]
    if not able:
        return True
    # Speed-ups refer to the anchor: it stays to the end, unless one call of it would cost as much as a round.
    anchor_stays = anchor.live and anchor.first.answer["call_ns"] < _DEAR_CALL_NS
    leader = min(able, key=lambda entrant: statistics.median(entrant.per_sample.values()))
    alpha = rules.alpha / max(1, len(able) - 1)
    for entrant in able:
        if entrant is leader or (entrant is anchor and anchor_stays):
            continue
        behind = _statistics.log_interval(log_ratios(entrant, leader), alpha)  # log(this / leader)
        if behind.low > 0 or behind.high < math.log(1 + rules.indifference):
            entrant.live = False
    in_doubt = sum(entrant.live for entrant in entrants if entrant is not anchor or entrant is leader)
    return in_doubt <= 1 and (leader is anchor or not anchor_stays or _is_precise(anchor, leader, rules))


def _is_settled(anchor: _Entrant, entrant: _Entrant, rules: Rules) -> bool:
    """Whether more rounds would tell no more of an entry against the anchor.

    With replicates the only question is how precise the rounds have become, whatever they say: a race that stops for
    its precision may be judged once, at the full error rate. With one process the verdict itself is waited for, and
    every look pays its share.
    """
    replicated = min(len(anchor.runners), len(entrant.runners)) > 1
    alpha = 1 - rules.confidence if replicated else rules.alpha
    found = _statistics.log_interval(log_ratios(anchor, entrant), alpha)
    precise = found.high - found.low < 2 * math.log(1 + rules.indifference)
    if replicated:
        return precise
    return precise and _statistics.verdict(_statistics.exp(found), rules.indifference) != "cannot tell"


def _is_precise(anchor: _Entrant, leader: _Entrant, rules: Rules) -> bool:
    """Whether the leader's speed-up is known as well as the rules ask."""
    found = _statistics.log_interval(log_ratios(anchor, leader), rules.alpha)
    return rules.precision is None or (found.high - found.low) / 2 <= rules.precision


def log_ratios(slower: _Entrant, faster: _Entrant) -> list[float]:
    """log(time of the first / time of the second) for each round that both took part in."""
    first, second = slower.per_sample, faster.per_sample
    return [first[number] - second[number] for number in first if number in second]


def _speedup(anchor: _Entrant, entrant: _Entrant, rules: Rules) -> Interval | None:
    """How many times faster than the anchor, with its interval: over the processes where each has several, else over
    the rounds."""
    ratios = log_ratios(anchor, entrant)
    if not ratios:
        return None
    if entrant is anchor or min(len(anchor.runners), len(entrant.runners)) < 2:
        return _statistics.exp(_statistics.log_interval(ratios, rules.alpha))
    slower, faster = ([runner.per_sample for runner in each.runners] for each in (anchor, entrant))
    return _statistics.exp(_statistics.replicate_interval(slower, faster, 1 - rules.confidence))


def _trial(entrant: _Entrant, anchor: _Entrant | None, rules: Rules, heat: int) -> Trial:
    first, runners = entrant.first, entrant.runners
    answer, entry = first.answer, first.entry
    if not first.rounds_ms:
        return Trial(
            entry.recipe,
            "failed",
            entrant.failure or "it was not measured",
            notes=answer["notes"],
            seconds=time.monotonic() - first.began,
            heat=heat,
        )
    times = sorted(sample for runner in runners for sample in runner.samples_ns)
    energy = [joule for runner in runners for joule in runner.energy_j]
    rounds_ms = [answer["samples"] * math.exp(value) for value in entrant.per_sample.values()]
    # A recipe that died half-way has numbers, but nobody should be handed it.
    reason = f"ended during the race: {entrant.failure}" if entrant.failure else entrant.rejected
    peaks = [runner.answer["peak_bytes"] for runner in runners if runner.answer["peak_bytes"] is not None]
    return Trial(
        recipe=entry.recipe,
        status="failed" if entrant.failure else "rejected" if entrant.rejected else "measured",
        reason=reason,
        time_ms=statistics.median(rounds_ms),
        p90_ms=times[min(len(times) - 1, int(0.9 * len(times)))] / 1e6,
        speedup=_speedup(anchor, entrant, rules) if anchor is not None else None,
        log_ratios=tuple(round(value, 6) for value in log_ratios(anchor, entrant)) if anchor is not None else (),
        round_ms=tuple(round(value, 6) for value in rounds_ms),
        processes=len(runners),
        samples=answer["samples"],
        peak_bytes=max(peaks, default=None),
        energy_j=statistics.median(energy) if energy else None,
        startup=Startup(answer["load_s"], answer["optimize_s"], answer["first_call_s"], answer["cache"]),
        accuracy=first.accuracy,
        phases_ms=answer.get("phases_ms", {}),
        notes=tuple(answer["notes"]),
        seconds=time.monotonic() - first.began,
        heat=heat,
    )


def _in_all(number: int, logs: Sequence[Mapping[int, float]]) -> bool:
    return all(number in log for log in logs)


def _memory_is_short() -> bool:
    memory = psutil.virtual_memory()
    return bool(memory.available < 0.25 * memory.total)
