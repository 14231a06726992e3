"""The search for a loader setting: each setting in a process of its own, in interleaved rounds.

First the costs: how long a batch takes to make, how long a step takes alone. They say whether workers can help at all
and how many are worth trying. Then one slice a setting, climbing; then rounds in random order among the good ones; and
of these the smallest within 3% of the best.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fettle.errors import UsageError
from fettle.inputs import guard
from fettle.inputs.contest import PAIRS, Contest, Tell
from fettle.inputs.found import Found, cannot_help, verdict
from fettle.inputs.journal import Journal, content_hash
from fettle.inputs.lint import Lint
from fettle.inputs.setting import (
    AS_GIVEN,
    WITHIN,
    Facts,
    Measured,
    Setting,
    ratio,
    smallest_of_the_best,
)

ROUNDS = 6
"""Most rounds among the last ones."""
_FIRST_ROUNDS = 3
_KEEP = 0.92
"""Share of the best rate that keeps a setting in."""


def measure_and_search(
    target: str,
    *,
    slice_s: float = 0.4,
    timeout_s: float = 120.0,
    ranks: int = 1,
    device: str = "auto",
    keep: Path | None = None,
    lints: bool = True,
    tell: Tell = lambda doing, done, of: None,
) -> Found:
    """Measure the pipeline of `target` (``file.py:factory``) and search its setting.

    The factory returns a DataLoader, a dataset, or (either, step): `step` is called with each batch and stands for the
    rest of the loop. `ranks` is how many processes of the job share this host. `device` "cuda" has each batch copied
    there before the step; "auto" does so where there is a device and no step that would do it. `keep` is the file that
    a killed search goes on from; it is gone when the search has come to its end.

    Raises `UsageError` for a target that is none of these, or that cannot be iterated without workers;
    `KeyboardInterrupt` when interrupted before there is anything to tell.
    """
    began = time.monotonic()
    here = guard.room(ranks)
    journal = Journal(
        keep,
        {"target": target, "content": content_hash(target), "slice_s": slice_s, "ranks": ranks, "device": device,
         "cores": here.cores, "torch": str(torch.__version__), "lints": lints},
    )  # fmt: skip
    contest = Contest(target, slice_s, timeout_s, _device(device), here, journal, tell)
    done = False
    try:
        found = _search(contest, device, lints, began)
        done = not found.interrupted
        return found
    except UsageError:
        done = True
        raise
    finally:
        contest.close()
        journal.close(done)


def _search(contest: Contest, device: str, lints: bool, began: float) -> Found:
    """The search in its visible order."""
    facts = contest.open()
    if facts.cuda and device == "auto" and not facts.has_step:
        contest.close()  # nothing else would copy the batches: the loop that is measured does
        contest.device = "cuda"
    for _ in range(_FIRST_ROUNDS):
        contest.next_round(Setting())
    plain = contest.measured[Setting()]
    if plain.failure:
        raise UsageError(f"the pipeline fails without workers: {plain.failure}")
    step_s = contest.alone()
    given_setting = _given(facts)
    scores = {Setting(): 1.0}
    if given_setting not in scores:
        scores[given_setting] = contest.pairs(given_setting, Setting())
    given = contest.measured[given_setting]
    notes = [*facts.notes, *_not_tried(facts)]
    why = cannot_help(plain, step_s, contest.here.cores)
    best, looked, search_s = plain, dict[str, Any](), 0.0
    with _interruptible() as state:
        if not why:
            climb(contest, facts, scores, step_s)
        variants(contest, facts, scores, bool(step_s and why), notes)
        best = finals(contest, scores)
        best = never_slower(contest, best, given, plain)
        search_s = time.monotonic() - began
    if not state.interrupted and lints:
        with _interruptible() as state:
            looked = contest.lints()
    interrupted = state.interrupted
    if interrupted and best is plain:
        best = smallest_of_the_best([contest.measured[setting] for setting in _near(contest, scores)])
    search_s = search_s or time.monotonic() - began
    _set_levels(contest, scores, best, plain)
    measured = list(contest.measured.values())
    if not given.able:
        notes.append(f"As given it fails: {given.failure}.")
    if "error" in looked:
        notes.append(f"Looking for faults ended early: {looked['error']}.")
    notes += looked.get("notes", [])
    found = Found(
        contest.target, given, plain, best, measured, step_s, contest.here.cores, contest.here.why, "", notes,
        [Lint(**item) for item in looked.get("lints", [])], search_s, time.monotonic() - began, interrupted,
        contest.reused,
    )  # fmt: skip
    return replace(found, verdict=verdict(found, why))


def climb(contest: Contest, facts: Facts, scores: dict[Setting, float], step_s: float) -> None:
    """Numbers of workers that the costs point to, each held against the best one so far.

    One worker first: what it needs for a batch, its hand-over included, says how many would keep up with the step, or
    would fill the cores. Then upwards while it pays, and between a number that is too small and one that is enough.
    """
    cores = contest.here.cores
    given = _given(facts)
    base = replace(given, fetch=AS_GIVEN, persistent_workers=True)
    settings = {setting.num_workers: setting for setting in scores}
    tried = {number: scores[setting] for number, setting in settings.items()}

    def run(number: int) -> bool:
        if number not in tried:
            settings[number] = replace(base, num_workers=number)
            leader = max(tried, key=lambda one: tried[one])
            tried[number] = tried[leader] * contest.pairs(settings[number], settings[leader])
            scores[settings[number]] = tried[number]
        return tried[number] > 0

    if not run(1):
        return
    seen = contest.measured[settings[1]].last
    if tried[1] < 0.9 and seen.fetch_p50_s * seen.rate < 0.5:
        return  # slower, and the worker idles more than half of its time: handing over is what takes the time
    waits = seen.fetch_busy < 0.5
    limit, most = (4 * cores, 8 * cores) if waits else (cores, 2 * cores)
    wanted = max(1, min(limit, math.ceil(seen.fetch_p95_s / step_s) if step_s else limit))
    while wanted > 1 and not run(wanted):
        most, wanted = wanted - 1, wanted // 2
    while True:
        able = [number for number, score in tried.items() if score > 0]
        best = max(tried.values())
        enough = min(number for number in able if tried[number] >= (1 - WITHIN) * best)
        below = max((number for number in able if number < enough), default=0)
        # Upwards: the largest one tried is better than the next smaller one, and the step still waits.
        rises = enough == max(able) and tried[below] < (1 - WITHIN) * best
        if rises and enough < most and contest.measured[settings[enough]].rate * step_s < 0.98:
            more = min(most, max(enough + 1, enough * 5 // 4))
            if not run(more):
                most = more - 1
        elif enough - below <= 1 or not run((enough + below) // 2):
            return


def variants(contest: Contest, facts: Facts, scores: dict[Setting, float], useless: bool, notes: list[str]) -> None:
    """The other dimensions, each held against the best number of workers."""
    leader = _leader(scores)
    setting = leader

    def run(other: Setting, against: Setting) -> None:
        if other not in scores:
            scores[other] = scores[against] * contest.pairs(other, against)

    for fetch in facts.fetches:
        if fetch != AS_GIVEN and not useless:
            run(Setting(fetch=fetch), Setting())
            if setting.num_workers:
                run(replace(setting, fetch=fetch), setting)
    seen = contest.measured[setting].last
    if setting.num_workers and seen.fetch_p99_s > 3 * seen.fetch_p50_s:
        for prefetch in (4, 8):
            run(replace(setting, prefetch_factor=prefetch), setting)
    elif setting.num_workers:
        notes.append(
            f"prefetch_factor stays at {setting.prefetch_factor}: batches take about the same time each (99%: "
            f"{seen.fetch_p99_s / max(seen.fetch_p50_s, 1e-12):.1f} times the median), a deeper queue would not help."
        )
    if setting.num_workers and not facts.epoch_batches:
        notes.append("persistent_workers was not compared: how long an epoch is, the loader does not say.")
    elif setting.num_workers:
        item = contest.measured[setting]
        epoch = facts.epoch_batches / item.rate
        # Workers that stay save their start in each epoch; to race them against workers that end would only add noise.
        # Where the leader is the one given, with workers that end, and an epoch is short, it is worth to be seen.
        if not setting.persistent_workers and item.start_s > 0.01 * epoch and epoch < 8 * contest.slice_s:
            run(replace(setting, persistent_workers=True), setting)
        notes.append(
            f"persistent_workers: starting workers takes {item.start_s:.2f} s, once in an epoch of {epoch:.3g} s "
            f"({item.start_s / (item.start_s + epoch):.1%})."
        )
    if facts.cuda and contest.device == "cuda":
        run(replace(setting, pin_memory=True), setting)
        run(replace(setting, pin_memory=True, non_blocking=True), setting)
    elif facts.cuda:
        run(replace(setting, pin_memory=not setting.pin_memory), setting)


def finals(contest: Contest, scores: dict[Setting, float]) -> Measured:
    """Rounds among all that are near the best, until the smallest is surely as good as any; gives the one to take."""
    live = _near(contest, scores)
    numbers: list[int] = []
    while len(live) > 1 and len(numbers) < ROUNDS:
        contest.expected = contest.done + len(live) * (ROUNDS - len(numbers))
        numbers.append(contest.next_round(*live))
        items = [_only(contest.measured[setting], numbers) for setting in live if contest.measured[setting].able]
        top = max(items, key=lambda item: ratio(item, items[0]))
        if len(numbers) >= 3:
            items = [item for item in items if ratio(item, top) >= 1 - 2 * WITHIN]
            smallest = min(items, key=lambda item: item.setting.size)
            if ratio(smallest, top) >= 1 - WITHIN / 3:
                live = [smallest.setting]
                break
        live = [item.setting for item in items]
    best = smallest_of_the_best([_only(contest.measured[setting], numbers) for setting in live])
    return contest.measured[best.setting]


def never_slower(contest: Contest, best: Measured, given: Measured, plain: Measured) -> Measured:
    """torch's default where what was found is not faster than it, side by side; and the gain over the one given."""
    for other in (plain, given):
        shared = [number for number in best.slices if number in other.slices]
        if other.able and other is not best and len(shared) < PAIRS:
            contest.expected = contest.done + 2 * PAIRS
            contest.pairs(best.setting, other.setting)
    return plain if best is not plain and ratio(best, plain) < 1 else best


def _set_levels(contest: Contest, scores: dict[Setting, float], best: Measured, plain: Measured) -> None:
    """One scale for all: the best against the plain loader, the others against the best, directly where they met."""
    top = 1.0 if best is plain else ratio(best, plain)
    for setting, score in scores.items():
        item = contest.measured[setting]
        met = len([number for number in item.slices if number in best.slices]) >= PAIRS
        if item is plain:
            item.level = plain.rate
        elif item.able:
            item.level = plain.rate * top * (ratio(item, best) if met else score / scores[best.setting])


def _near(contest: Contest, scores: dict[Setting, float]) -> list[Setting]:
    """Settings near the best."""
    able = {setting: score for setting, score in scores.items() if contest.measured[setting].able}
    top = max(able.values())
    return [setting for setting, score in able.items() if score >= _KEEP * top]


def _leader(scores: dict[Setting, float]) -> Setting:
    """The smallest within 3% of the best score."""
    top = max(scores.values())
    return min((setting for setting, score in scores.items() if score >= (1 - WITHIN) * top), key=lambda one: one.size)


def _only(item: Measured, numbers: Sequence[int]) -> Measured:
    """A setting with the slices of these rounds only; all of them where there were no rounds."""
    kept = {number: part for number, part in item.slices.items() if number in numbers}
    return replace(item, slices=kept or item.slices)


def _given(facts: Facts) -> Setting:
    if not facts.num_workers:
        return Setting(pin_memory=facts.pin_memory and facts.cuda)
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
        raise UsageError("--device cuda: there is no CUDA device here; without the option batches stay on the CPU")
    return "cuda" if device == "cuda" else "cpu"


class _State:
    interrupted = False


@contextlib.contextmanager
def _interruptible() -> Iterator[_State]:
    """Ctrl-C ends the block and nothing else: what is measured is kept and told."""
    state = _State()
    try:
        yield state
    except KeyboardInterrupt:
        state.interrupted = True
