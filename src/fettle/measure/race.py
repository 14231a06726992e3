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
from dataclasses import replace
from pathlib import Path
from typing import Any

from fettle.measure import _statistics
from fettle.measure._decide import decided, is_dear, log_ratios
from fettle.measure._entrants import Entrant, Held, Start
from fettle.measure._process import WorkerError
from fettle.measure._rules import Entry, Judge, Progress, Rules
from fettle.measure._trial import Interval, Startup, Trial
from fettle.procs.nodes import Nodes


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
    nodes: Nodes | None = None,
) -> list[Trial]:
    """Race `entries` on the workload of `target`; one trial each, in their order.

    The entry with the empty recipe is the baseline that every speed-up refers to; without one the first entry is.
    `target` is a `fettle.workload.Target` as plain data, `fingerprint` what it must build. Entries that were not
    begun when the deadline came are left out of the answer. With `held` the baseline's process outlives the race.
    Entries of several ranks are spread over the `nodes`.
    """
    rules = rules or Rules()
    start = Start(target, fingerprint, judging, rules, log_folder, environment or {}, heat, held, nodes)
    trials: dict[int, Trial] = {}
    with ExitStack() as stack:
        entrants = start.line_up(entries, trials, stack, tell)
        start.replicate(entrants, rules.replicates, stack, tell)
        anchor = next((e for e in entrants.values() if not e.first.entry.recipe.levels), None) or next(
            iter(entrants.values()), None
        )
        if anchor is not None:
            order = random.Random(seed * 1000 + heat)
            _run_rounds(list(entrants.values()), anchor, rules, order, tell)
            found = {index: _trial(entrant, anchor, rules, heat) for index, entrant in entrants.items()}
            found |= _go_on(start, entrants, found, anchor, order, stack, tell)
            trials |= found
            if held is not None and anchor.failure:
                held.close()
    for index in sorted(entrants):
        tell(Progress("trial", entries[index].recipe, trial=trials[index]))

    rest = list(entries[max(trials, default=-1) + 1 :])
    done = [trials[index] for index in sorted(trials)]
    if not rest or anchor is None or time.monotonic() > rules.deadline:
        return done
    # What did not fit into memory beside the others runs in a race of its own, the anchor in it again.
    later = race(target, fingerprint, [anchor.first.entry, *rest], judging, rules, log_folder=log_folder,
                 environment=environment, tell=tell, heat=heat, seed=seed + 1, held=held, nodes=nodes)  # fmt: skip
    return done + later[1:]


def _run_rounds(
    entrants: Sequence[Entrant],
    anchor: Entrant,
    rules: Rules,
    order: random.Random,
    tell: Callable[[Progress], None],
    before: int = 0,
) -> None:
    """Slices in random order until the leader is certain, nothing is left to win, or time is up. `before`: rounds that
    have been run already, which are neither counted nor looked at again."""
    for count in range(1, rules.max_rounds + 1):
        number = before + count
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
        if count in _statistics.LOOKS and decided(entrants, anchor, rules):
            return
        if time.monotonic() > rules.deadline and count >= _statistics.LOOKS[0]:
            return
        if len(entrants) == 1 and is_dear(anchor):
            return  # nobody to compare it with, and every race that it meets somebody in times it again
        if not any(entrant.live for entrant in entrants):
            return


def _go_on(
    start: Start,
    entrants: Mapping[int, Entrant],
    found: Mapping[int, Trial],
    anchor: Entrant,
    order: random.Random,
    stack: ExitStack,
    tell: Callable[[Progress], None],
) -> dict[int, Trial]:
    """Where a speed-up is vague: more processes of all that have several, as many rounds again, and what is known then.

    How wide an interval is decides this, not what it says, and it is done once: the error rate stays what it was.
    """
    rules, had = start.rules, len(anchor.runners)
    if anchor.failure or had >= rules.most_replicates or not any(map(_is_vague, found.values())):
        return {}
    tell(Progress("vague"))
    again = {index: entrants[index] for index, trial in found.items() if trial.ok and trial.processes > 1}
    for entrant in again.values():
        entrant.live = True
    start.replicate(again, rules.most_replicates, stack, tell)
    if len(anchor.runners) == had:
        return {}
    before = max(number for runner in anchor.runners for number in runner.rounds_ms)
    _run_rounds(list(again.values()), anchor, rules, order, tell, before)
    trials = {}
    for index, entrant in again.items():
        if entrant.failure:
            trials[index] = replace(found[index], status="failed", reason=_ended(entrant))
        elif not anchor.failure:
            trials[index] = _trial(entrant, anchor, rules, start.heat)
    return trials


def _is_vague(trial: Trial) -> bool:
    """Whether its processes leave open how fast it is. What ran in one process has an interval of its rounds alone."""
    return trial.ok and trial.processes > 1 and trial.speedup is not None and _statistics.is_vague(trial.speedup)


def _ended(entrant: Entrant) -> str:
    return f"ended during the race: {entrant.failure}"


def _speedup(anchor: Entrant, entrant: Entrant, rules: Rules) -> Interval | None:
    """How many times faster than the anchor, with its interval: over the processes where each has several, else over
    the rounds."""
    if entrant is anchor:
        return Interval(1.0, 1.0, 1.0)
    ratios = log_ratios(anchor, entrant)
    if not ratios:
        return None
    slower, faster = ([runner.per_sample for runner in each.runners if runner.rounds_ms] for each in (anchor, entrant))
    if min(len(slower), len(faster)) < 2:
        return _statistics.exp(_statistics.log_interval(ratios, rules.alpha))
    return _statistics.exp(_statistics.replicate_interval(slower, faster, 1 - rules.confidence))


def _trial(entrant: Entrant, anchor: Entrant | None, rules: Rules, heat: int) -> Trial:
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
    reason = _ended(entrant) if entrant.failure else entrant.rejected
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
        start_s=first.started_s,
        phases_ms=answer.get("phases_ms", {}),
        notes=tuple(answer["notes"]),
        int8_layers=tuple(answer.get("int8_layers", ())),
        seconds=time.monotonic() - first.began,
        heat=heat,
    )
