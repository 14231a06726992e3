"""The race: recipes measured in turn, interleaved, each in a process of its own, until the leader is known.

Read `race` from top to bottom: start the workers one after the other, then rounds of equal slices in random order,
with a look at the data now and then that drops what is certainly not the best. Where the rules ask for replicates and
starting them is cheap enough, a candidate runs in several processes: what a process is given for life (where its memory
lies) makes two processes of the same code differ, and no number of rounds would show it.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fettle.estimates import Interval, nearest_rank
from fettle.generate.speed import Generation, figures
from fettle.measure import _statistics
from fettle.measure._candidates import Start
from fettle.measure._load import mean_load
from fettle.measure._process import close_each
from fettle.measure._rounds import Rounds, log_ratios
from fettle.measure._rules import Candidate, Judge, OnProgress, Progress, Rules
from fettle.measure._runners import Held, Runner, Started
from fettle.measure._trial import Startup, Trial, fetching
from fettle.measure._watch import Patience
from fettle.procs.forks import ForkServer
from fettle.procs.nodes import Nodes
from fettle.workload import Target


def race(
    target: Target,
    fingerprint: str,
    candidates: Sequence[Candidate],
    judging: Judge,
    rules: Rules | None = None,
    *,
    log_folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    on_progress: OnProgress = lambda progress: None,
    number: int = 0,
    seed: int = 0,
    held: Held | None = None,
    nodes: Nodes | None = None,
    forks: ForkServer | None = None,
    patience: Patience | None = None,
) -> list[Trial]:
    """Race `candidates` on the workload of `target`; one trial each, in their order.

    The candidate with the empty recipe is the baseline that every speed-up refers to; without one the first one is.
    Where it cannot be started there are no speed-ups.
    `fingerprint` is what `target` must build. `number` is the race's place in its study. Candidates that were
    not begun when the deadline came are left out of the answer. With `held` the processes outlive the race: those in it
    that have a recipe of `candidates` run it, and all others join them. Candidates of several ranks are spread over the
    `nodes`. Processes begin as `forks` where these serve their environment. `patience` is how long the race may wait
    for a quiet machine, not at all by default.
    """
    start = Start(
        target, fingerprint, judging, rules or Rules(), log_folder, environment or {}, number, held, nodes, forks,
        on_progress,
    )  # fmt: skip
    return _race(start, candidates, patience or Patience(), seed)


def _race(start: Start, candidates: Sequence[Candidate], patience: Patience, seed: int, before: int = 0) -> list[Trial]:
    """The race, and another one of those that there was no memory for. Rounds are counted from `before` + 1."""
    rules, held = start.rules, start.held
    baseline = next((place for place, one in enumerate(candidates) if not one.recipe.levels), 0)
    try:
        begun = start.line_up(candidates)
        running = [one for one in begun if isinstance(one, Started)]
        start.replicate(running, rules.replicates)
        given = [started for started in running if started.number == baseline]
        anchor = next(iter([*given, *running]), None)
        if anchor is not None:
            rounds = Rounds(rules, random.Random(seed * 1000 + start.race), start.on_progress, patience)
            with _ended_by_interrupt(start, running):
                rounds.run(running, anchor, before)
            for started in running:
                started.trial = _trial(started, anchor, start)
            with _ended_by_interrupt(start, running):
                for wanted in rules.further:
                    if not _go_on(start, rounds, running, anchor, wanted):
                        break
                for started in running:
                    started.trial = _with_rows(started.trial, start.row_rates(started))
            for started in () if given else running:
                started.trial = replace(started.trial, speedup=None, elapsed_speedup=None)
            if held is not None:
                held.keep({started.first.candidate.recipe for started in running if not started.failure})
    finally:
        close_each(start.workers)
        start.workers.clear()

    trials = [one.trial if isinstance(one, Started) else one for one in begun]
    rest = candidates[len(begun) :]
    if not rest or anchor is None or rules.is_stopped or time.monotonic() > rules.deadline:
        return trials
    # What did not fit into memory beside the others runs in a race of its own, the anchor in it again.
    if held is not None:
        held.keep({anchor.first.candidate.recipe})
    last = max((one.round for trial in trials for one in trial.slices), default=before)
    later: list[Trial] = []
    with _ended_by_interrupt(start, running):
        again = replace(start, logs_before=start.logs_before + len(begun))
        later = _race(again, [candidates[baseline], *rest], patience, seed + 1, last)
    if later and baseline < len(trials):  # the baseline's slices connect the two races
        trials[baseline] = replace(trials[baseline], slices=(*trials[baseline].slices, *later[0].slices))
    return [*trials, *later[1:]]


@contextmanager
def _ended_by_interrupt(start: Start, running: Iterable[Started]) -> Iterator[None]:
    """Let an interrupt end what runs inside, where there is something to show; see `Stop`."""
    try:
        yield
    except KeyboardInterrupt:
        if start.held is not None:
            start.held.close()  # in the middle of a slice, whose answer is still to come
        rounds = [len({one.round for one in each.first.slices}) for each in running if not each.failure]
        stop = start.rules.stop
        if stop is None or stop.asked or min(rounds, default=0) < stop.fewest_rounds:
            raise
        stop.asked = True


def _with_rows(trial: Trial, tokens_per_s: Mapping[str, float]) -> Trial:
    """The same with tokens a second at further numbers of rows."""
    known = trial.generation
    if known is None or not tokens_per_s:
        return trial
    return replace(trial, generation=replace(known, tokens_per_s={**tokens_per_s, **known.tokens_per_s}))


def _go_on(start: Start, rounds: Rounds, running: Sequence[Started], anchor: Started, wanted: int) -> bool:
    """Where a speed-up is vague: more processes of all that have several, as many rounds again, and what is known then;
    whether there were more.

    How wide an interval is decides this, not what it says: the error rate stays what it was. Rules that do look at what
    it says have their own `is_enough`, and a confidence for that many looks.
    """
    rules, had = start.rules, len(anchor.runners)
    if rules.is_stopped or anchor.failure or had >= wanted or time.monotonic() > rules.deadline:
        return False
    if not _is_vague([started.trial for started in running], rules):
        return False
    start.on_progress(Progress("not certain yet: a few more processes of each"))
    again = [started for started in running if started.trial.ok and started.trial.processes > 1]
    for started in again:
        started.live = True
    start.replicate(again, wanted)
    if len(anchor.runners) == had:
        return False
    rounds.run(again, anchor, max(one.round for runner in anchor.runners for one in runner.slices))
    for started in again:
        if started.failure:
            started.trial = replace(started.trial, status="failed", reason=_ended(started))
        elif not anchor.failure:
            started.trial = _trial(started, anchor, start)
    return True


def _again_s(runners: Sequence[Runner]) -> float:
    """What the processes after the first took to start."""
    starts_s = [runner.answer.optimize_s + runner.answer.first_call_s for runner in runners[1:]]
    return statistics.median(starts_s) if starts_s else math.nan


def _is_vague(trials: Sequence[Trial], rules: Rules) -> bool:
    """Whether the processes leave open how fast one is. What ran in one process has an interval of its rounds alone."""
    several = [trial for trial in trials if trial.ok and trial.processes > 1]
    if rules.is_enough is not None:
        return bool(several) and not rules.is_enough(trials)
    return any(trial.speedup is not None and _statistics.is_vague(trial.speedup) for trial in several)


def _ended(started: Started) -> str:
    return f"ended during the race: {started.failure}"


def _speedup(anchor: Started, started: Started, rules: Rules) -> Interval | None:
    """How many times faster than the anchor, with its interval: over the processes where each has several, else over
    the rounds."""
    if started is anchor:
        return Interval(1.0, 1.0, 1.0)
    slower, faster = anchor.process_logs(), started.process_logs()
    if min(len(slower), len(faster)) > 1:
        return _statistics.exp(_statistics.contrast_interval([slower, faster], (1, -1), 1 - rules.confidence))
    ratios = log_ratios(anchor, started)
    return _statistics.ratio_interval(ratios, rules.alpha) if ratios else None


def _elapsed_speedup(anchor: Started, started: Started, rules: Rules) -> Interval | None:
    """The ratio of times elapsed over the rounds in which others had the machine."""
    slower, faster = (
        {-key: log for runner in each.runners for key, log in runner.log_times(elapsed=True).items() if key < 0}
        for each in (anchor, started)
    )
    ratios = _statistics.paired(slower, faster)
    return _statistics.ratio_interval(ratios, rules.alpha) if len(ratios) > 1 else None


def _generation(runners: Sequence[Runner]) -> Generation | None:
    """The figures of the texts of all processes."""
    known = runners[0].answer.generation
    texts = [text for runner in runners for text in (*runner.answer.texts, *runner.texts)]
    return None if known is None else figures(texts, known)


def _trial(started: Started, anchor: Started, start: Start) -> Trial:
    first, runners, rules = started.first, started.runners, start.rules
    answer, candidate = first.answer, first.candidate
    if not first.slices:
        return Trial(
            candidate.recipe,
            "failed",
            started.failure or "it was not measured",
            notes=answer.notes,
            seconds=time.monotonic() - first.began,
            race=start.race,
        )
    samples_ns = [sample for runner in runners for sample in runner.samples_ns]
    energy = [joule for runner in runners for joule in runner.energy_j]
    logs = started.per_sample
    quiet = [value for number, value in logs.items() if number > 0]
    own = quiet if _statistics.are_quiet([logs], [logs]) else logs.values()
    # Where slices tell no time there may be no round that all processes have.
    timed = own or [value for log in started.process_logs() for value in log.values()]
    rounds_ms = [answer.samples * math.exp(value) for value in timed]
    beside = anchor if anchor.first.slices else started
    # A recipe that died half-way has numbers, but nobody should be handed it.
    reason = _ended(started) if started.failure else started.rejected
    peaks = [runner.answer.peak_bytes for runner in runners if runner.answer.peak_bytes is not None]
    loads = [load for runner in runners for load in runner.loads]
    slices = tuple(one for runner in runners for one in runner.slices)
    fetched = fetching(slices)
    return Trial(
        recipe=candidate.recipe,
        status="failed" if started.failure else "rejected" if started.rejected else "measured",
        reason=reason,
        time_ms=statistics.median(rounds_ms or [one.ms for one in first.slices]),
        p90_ms=nearest_rank(samples_ns, 0.9) / 1e6,
        speedup=_speedup(anchor, started, rules),
        elapsed_speedup=_elapsed_speedup(anchor, started, rules),
        is_quiet=_statistics.are_quiet(beside.process_logs(), started.process_logs()),
        load=mean_load(loads),
        slices=slices,
        processes=len(runners),
        samples=answer.samples,
        peak_bytes=max(peaks, default=None),
        peaks_bytes=tuple(peaks),
        fingerprint=first.worker.fingerprint,
        energy_j=statistics.median(energy) if energy else None,
        startup=Startup(answer.load_s, answer.optimize_s, answer.first_call_s, answer.cache, _again_s(runners)),
        accuracy=answer.accuracy,
        start_s=first.started_s,
        turn_s=statistics.fmean(first.turns_s) if first.turns_s else math.nan,
        phases_ms=answer.phases_ms,
        generation=_generation(runners),
        notes=(*answer.notes, *([fetched] if fetched else [])),
        learned=answer.learned,
        seconds=time.monotonic() - first.began,
        race=start.race,
    )
