"""The search for a loader setting: each setting in a process of its own, in interleaved rounds.

First the costs: how long a batch takes to make, how long a step takes alone. They say whether workers can help at all
and how many are worth trying. Then upwards while it pays, and down again: the smallest within 3% of the best, each
compared directly with that one; then the other dimensions in the same way.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from pathlib import Path

import torch

from fettle.errors import UsageError
from fettle.inputs._messages import Faults
from fettle.inputs.kept import content_hash
from fettle.inputs.lint import RAISES
from fettle.inputs.race import OnProgress, Race
from fettle.inputs.result import PipelineResult, RowRaises, cannot_help, is_of_a_row, verdict
from fettle.inputs.setting import AS_GIVEN, WITHIN, Facts, Measured, Setting, ratio, room
from fettle.journal import Journal
from fettle.machine import this_machine
from fettle.procs.child import ChildError
from fettle.workload import find_target

_FIRST_ROUNDS = 2
_KEEP = 0.92
"""Share of the best rate that keeps a setting in."""
_FRESH = 0.05
"""Share of making a batch that goes into memory fetched anew, from which on keeping it is tried."""
_IDLE = 0.1
"""Share of their time that workers are idle, from which on a deeper queue is tried."""


def measure_and_search(
    target: str,
    *,
    slice_s: float = 0.4,
    timeout_s: float = 120.0,
    ranks: int = 1,
    device: str = "auto",
    keep: Path | None = None,
    lints: bool = True,
    on_progress: OnProgress = lambda doing, done, of: None,
) -> PipelineResult:
    """Measure the pipeline of `target` (``file.py:factory``) and search its setting.

    The factory returns a DataLoader, a dataset, or (loader, step): `step` is called with each batch and stands for the
    rest of the loop. `ranks` is how many processes of the job share this host. `device` "cuda" has each batch copied
    there before the step; "auto" does so where there is a device and no step that would do it. `keep` is the file that
    a killed search goes on from; it is gone when the search has come to its end.

    Raises `UsageError` for any other target, or one that cannot be iterated without workers, its `RowRaises` where that
    is a row of the data set; `KeyboardInterrupt` when interrupted before there is a result.
    """
    began = time.monotonic()
    here = room(ranks)
    journal = Journal(
        keep, "fettle data",
        {"target": target, "content": content_hash(find_target(target).reference), "slice_s": slice_s, "ranks": ranks,
         "device": device, "cores": here.cores, "machine": this_machine().id, "lints": lints},
    )  # fmt: skip
    race = Race(target, slice_s, timeout_s, _device(device), here, journal, on_progress)
    done = False
    try:
        result = _search(race, device, lints, began)
        done = not result.interrupted
        return result
    except UsageError:
        done = True
        raise
    finally:
        race.close()
        journal.close(delete=done)  # the next search measures anew


def _search(race: Race, device: str, lints: bool, began: float) -> PipelineResult:
    try:
        facts = race.open()
    except ChildError as error:
        raise _cannot_begin(race, str(error), lints) from None
    if facts.cuda and device == "auto" and not facts.has_step:
        race.close()  # no step copies the batches to the device, so that the loop has to
        race.device = "cuda"
    for _ in range(_FIRST_ROUNDS):
        race.next_round(Setting())
    plain = race.measured[Setting()]
    if plain.failure:
        raise _cannot_begin(race, plain.failure, lints, "the pipeline fails without workers: ")
    step_s = race.alone()
    own_setting = _own_setting(facts)
    scores = {Setting(): 1.0}
    if own_setting not in scores:
        _pair(race, scores, own_setting, Setting())
    as_given = race.measured[own_setting]
    notes = [*facts.notes, *_not_tried(facts)]
    why = cannot_help(plain, step_s, race.here.cores)
    best, faults, search_s = plain, Faults(), 0.0
    interrupted = True
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the search and nothing else: what is measured is kept
        if not why:
            climb(race, facts, scores, step_s)
        variants(race, facts, scores, bool(step_s and why), notes)
        best = race.measured[settle(race, scores)]
        best = never_slower(race, best, as_given, plain)
        search_s = time.monotonic() - began
        if lints:
            faults = race.faults()
        interrupted = False
    if interrupted and best is plain:
        able = [setting for setting in scores if race.measured[setting].able]
        near = [one for one in able if scores[one] >= (1 - WITHIN) * max(scores[other] for other in able)]
        best = race.measured[min(near, key=lambda one: one.size)]
    search_s = search_s or time.monotonic() - began
    _set_levels(race, scores, best, plain)
    if not as_given.able:
        notes.append(f"As given it fails: {as_given.failure}.")
    notes += faults.notes
    result = PipelineResult(
        race.target, as_given, plain, best, list(race.measured.values()), step_s, race.here.cores, race.here.why, "",
        notes, faults.lints, search_s, time.monotonic() - began, interrupted, race.reused,
    )  # fmt: skip
    return replace(result, verdict=verdict(result, why))


def _cannot_begin(race: Race, failure: str, lints: bool, before: str = "") -> UsageError:
    """The error for a loader that fails in one process: where a row raises, how many do."""
    if not is_of_a_row(failure):
        return UsageError(before + failure)
    found = [f"{lint.says} {lint.evidence}" for lint in race.faults().lints if lint.name == RAISES] if lints else []
    return RowRaises(found[0] if found else f"A run over this data set ends with an error: {failure}.")


def climb(race: Race, facts: Facts, scores: dict[Setting, float], step_s: float) -> None:
    """Numbers of workers that the costs point to, then upwards while it pays; each compared with the best so far.

    One worker first: what it needs for a batch, its hand-over included, says how many would keep up with the step, or
    would fill the cores. Whether fewer do as well is for `settle`. What it fetches of memory for each batch says
    whether it would do better to keep what it frees; then all do.
    """
    cores = race.here.cores
    base = replace(_own_setting(facts), fetch=AS_GIVEN, persistent_workers=True)
    settings = {setting.num_workers: setting for setting in scores}

    def run(number: int, rough: bool = False) -> bool:
        if number not in settings:
            settings[number] = replace(base, num_workers=number)
            _pair(race, scores, settings[number], _top(scores), rough)
        return scores[settings[number]] > 0

    if not run(1, rough=True):
        return
    timing = race.measured[settings[1]].last
    if scores[settings[1]] < 0.9 and timing.fetch_p50_s * timing.rate < 0.5:
        return  # slower, and the worker idles more than half of its time: handing over is what takes the time
    if facts.glibc and timing.fetch_fresh > _FRESH:
        keeps = replace(settings[1], keep_memory=True)
        if _pair(race, scores, keeps, settings[1]) > 1 / (1 - WITHIN):
            base, timing = replace(base, keep_memory=True), race.measured[keeps].last
            settings = {0: Setting(), 1: keeps}  # as many workers as were given are worth another look
    waits = timing.fetch_busy < 0.5
    limit, most = (4 * cores, 8 * cores) if waits else (cores, 2 * cores)
    wanted = max(1, min(limit, math.ceil(timing.fetch_p95_s / step_s) if step_s else limit))
    while wanted > 1 and not run(wanted):
        most, wanted = wanted - 1, wanted // 2
    while True:
        able = sorted(number for number, setting in settings.items() if scores[setting] > 0)
        if len(able) < 2:
            return  # the settings with workers have failed since they ran
        rises = scores[settings[able[-2]]] < (1 - WITHIN) * scores[settings[able[-1]]]
        waiting = race.measured[settings[able[-1]]].rate * step_s < 0.99
        if not (rises and waiting and able[-1] < most):
            return
        more = min(most, max(able[-1] + 1, able[-1] * 5 // 4))
        if not run(more):
            most = more - 1


def settle(race: Race, scores: dict[Setting, float]) -> Setting:
    """The smallest setting within 3% of the best.

    Every candidate is compared with the same one, the best: were each compared with the next, the noise of all
    steps between them would add up. Where fewer workers are too few, the numbers between them and those that are enough
    are searched.
    """
    top, accepted = _top(scores), False
    while True:
        top = top if scores[top] else _top(scores)
        if not scores[top]:
            return Setting()  # all have failed since they were measured
        near = [one for one, score in scores.items() if one.size < top.size and score >= _KEEP * scores[top]]
        enough = top
        for setting in sorted(near, key=lambda one: one.size):
            if _pair(race, scores, setting, top) >= 1 - WITHIN:
                enough = setting
                break
        if scores[enough] > scores[top] / (1 - WITHIN):
            top = enough  # the smaller ones were compared with one that is not the best: again
            continue
        middle = _between(scores, enough, top, halve=accepted)
        if middle is None:
            return enough
        accepted = _pair(race, scores, middle, top) >= 1 - WITHIN


def _between(scores: dict[Setting, float], enough: Setting, top: Setting, *, halve: bool) -> Setting | None:
    """A number of workers between one that is too few and `enough`; None where they are next to each other, nearly.

    As many as would do if each brought what each of the too few does; halfway where the last such guess was too high.
    """
    number = enough.num_workers
    fewer = {one.num_workers: one for one in scores if one.num_workers < number and _alike(one, enough)}
    below = max(fewer, default=0)
    if number - below <= max(1, below // 8):
        return None
    each = scores[fewer[below]] / below if below else 0.0
    guess = (below + number) // 2 if halve or not each else math.ceil((1 - WITHIN) * scores[top] / each)
    return replace(enough, num_workers=min(max(guess, below + 1), number - 1), persistent_workers=True)


def _alike(one: Setting, other: Setting) -> bool:
    """Whether two settings differ in their number of workers only (and whether workers stay)."""
    if not one.num_workers:
        return one.fetch == other.fetch
    return replace(one, num_workers=0, persistent_workers=True) == replace(
        other, num_workers=0, persistent_workers=True
    )


def _pair(race: Race, scores: dict[Setting, float], one: Setting, other: Setting, rough: bool = False) -> float:
    """Compare a setting with another one whose score is known: how much faster it is, 0 where it fails."""
    level = race.pairs(one, other, rough)
    if math.isinf(level):  # the other one has failed since
        mine = race.measured.get(one)
        scores[one], scores[other] = scores[other] if mine and mine.able else 0.0, 0.0
        if not scores[one] and (left := _top(scores)) != one and scores[left]:
            return _pair(race, scores, one, left, rough)
    else:
        scores[one] = scores[other] * level
    return level


def variants(race: Race, facts: Facts, scores: dict[Setting, float], useless: bool, notes: list[str]) -> None:
    """The other dimensions, each compared with the best number of workers."""
    setting = settle(race, scores)

    def run(other: Setting, against: Setting) -> bool:
        """Whether it is worth being larger."""
        return other not in scores and _pair(race, scores, other, against) > 1 / (1 - WITHIN)

    for fetch in facts.fetches:
        if fetch != AS_GIVEN and not useless:
            run(Setting(fetch=fetch), Setting())
            if setting.num_workers:
                run(replace(setting, fetch=fetch), setting)
    if setting.num_workers:
        if why := _no_deeper(race.measured[setting]):
            notes.append(f"prefetch_factor stays at {setting.prefetch_factor}: {why}, a deeper queue would not help.")
        elif run(replace(setting, prefetch_factor=4), setting):
            run(replace(setting, prefetch_factor=8), setting)
    if setting.num_workers and not facts.epoch_batches:
        notes.append("persistent_workers was not compared: how long an epoch is, the loader does not say.")
    elif setting.num_workers:
        item = race.measured[setting]
        epoch = facts.epoch_batches / item.rate
        # Persistent workers save their start in each epoch: racing them against others would only add noise. But where
        # the leader is the setting as given, without them, and epochs are short, what they save can be measured.
        if not setting.persistent_workers and item.start_s > 0.01 * epoch and epoch < 8 * race.slice_s:
            run(replace(setting, persistent_workers=True), setting)
        notes.append(
            f"persistent_workers: starting workers takes {item.start_s:.2f} s, once in an epoch of {epoch:.3g} s "
            f"({item.start_s / (item.start_s + epoch):.1%})."
        )
    if facts.cuda and race.device == "cuda":
        run(replace(setting, pin_memory=True), setting)
        run(replace(setting, pin_memory=True, non_blocking=True), setting)
    elif facts.cuda:
        run(replace(setting, pin_memory=not setting.pin_memory), setting)


def _no_deeper(item: Measured) -> str:
    """Why a deeper queue would not help, where batches take like times, or no worker ever waits for room in it."""
    timing = item.last
    if timing.fetch_p99_s <= 3 * timing.fetch_p50_s:
        times = timing.fetch_p99_s / max(timing.fetch_p50_s, 1e-12)
        return f"batches take about the same time each (99%: {times:.1f} times the median)"
    busy = min(1.0, timing.fetch_mean_s * item.rate / item.setting.num_workers)
    return f"workers make batches {busy:.0%} of the time" if busy > 1 - _IDLE else ""


def never_slower(race: Race, best: Measured, as_given: Measured, plain: Measured) -> Measured:
    """torch's default where what was found is not faster than it, side by side; and the gain over the one given."""
    for other in (plain, as_given):
        if other.able and other is not best:
            race.pairs(best.setting, other.setting)
    if not best.able:  # it has failed since it was the best
        return as_given if as_given.able else plain
    return plain if best is not plain and ratio(best, plain) < 1 else best


def _set_levels(race: Race, scores: dict[Setting, float], best: Measured, plain: Measured) -> None:
    """One scale for all: the best against the plain loader, the others against the best, directly where they met."""
    top = 1.0 if best is plain else ratio(best, plain)
    for setting, score in scores.items():
        item = race.measured[setting]
        met = any(number in best.slices for number in item.slices)
        if item is plain:
            item.level = plain.rate
        elif item.able:
            item.level = plain.rate * top * (ratio(item, best) if met or not scores[best.setting] else
                                         score / scores[best.setting])  # fmt: skip


def _top(scores: dict[Setting, float]) -> Setting:
    return max(scores, key=lambda one: scores[one])


def _own_setting(facts: Facts) -> Setting:
    return Setting(facts.num_workers, facts.prefetch_factor, facts.persistent_workers, facts.pin_memory and facts.cuda)


def _not_tried(facts: Facts) -> list[str]:
    notes = []
    if not facts.cuda:
        notes.append("No CUDA device here: pinned memory and copies that do not block were not tried.")
    if facts.pin_memory and not facts.cuda:
        notes.append("pin_memory=True does nothing without a device; it was left off.")
    if facts.iterable:
        notes.append("A stream has no batch fetching: __getitems__ is of datasets with an index.")
    elif not any(way != AS_GIVEN for way in facts.fetches) and not facts.notes:
        notes.append("No batch fetching to try: the dataset has no __getitems__ and takes no list of indices.")
    return notes


def _device(device: str) -> str:
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {device}: use auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("`device='cuda'`: there is no CUDA device here; without it batches stay on the CPU")
    return "cuda" if device == "cuda" else "cpu"
