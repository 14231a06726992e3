"""The search for a loader setting: each setting in a process of its own, in interleaved rounds.

First the costs: how long a batch takes to make, how long a step takes alone. They say whether workers can help at all
and how many are worth trying. Then one slice a setting, climbing; then rounds in random order among the good ones; and
of these the smallest within 3% of the best.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fettle.errors import UsageError
from fettle.inputs import guard
from fettle.inputs.contest import Contest, Tell
from fettle.inputs.journal import Journal, content_hash
from fettle.inputs.lints import Lint
from fettle.inputs.setting import (
    AS_GIVEN,
    WITHIN,
    Facts,
    Measured,
    Setting,
    ratio,
    smallest_of_the_best,
)
from fettle.memory.units import size_text

ROUNDS = 4
"""Most slices a setting is given, the first included."""
_KEEP_FIRST, _KEEP = 0.85, 0.92
"""Share of the best rate that keeps a setting in: after the first slice, and after further ones."""


@dataclass(frozen=True)
class Found:
    """What was found about a pipeline. Times in seconds."""

    target: str
    given: Measured
    plain: Measured
    """torch's own default: no workers."""
    best: Measured
    settings: Sequence[Measured]
    step_s: float
    """A step alone on a batch that is there already; 0 where the target has no step."""
    cores: int
    cores_why: str
    verdict: str
    notes: Sequence[str] = ()
    lints: Sequence[Lint] = ()
    search_s: float = 0.0
    seconds: float = 0.0
    """The search and the looking for faults."""
    interrupted: bool = False
    reused: int = 0
    """Answers taken over from a search that was killed."""

    @property
    def before(self) -> Measured:
        """What a gain is told against: the setting as given, or no workers where that fails."""
        return self.given if self.given.able else self.plain

    @property
    def waiting(self) -> float:
        """Share of a step spent waiting for data, as given."""
        return self.before.waiting

    @property
    def bound(self) -> float:
        """The most that removing the wait could bring: 1 / (1 - waiting). Infinite without a step."""
        return 1 / (1 - self.waiting) if self.step_s and self.waiting < 1 else math.inf

    @property
    def batch_p50_s(self) -> float:
        """One batch made by one process alone."""
        return _first(self.plain, "fetch_p50_s")

    @property
    def batch_p95_s(self) -> float:
        return _first(self.plain, "fetch_p95_s")

    @property
    def gain(self) -> float:
        """Batches a second of the best over those as given."""
        return 1.0 if self.best.setting == self.before.setting else ratio(self.best, self.before)

    @property
    def code(self) -> str:
        """The lines to take away."""
        return self.best.setting.code


def measure_and_search(
    target: str,
    *,
    slice_s: float = 1.0,
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
    plain = contest.run(Setting(), 0)
    if plain.failure:
        raise UsageError(f"the pipeline fails without workers: {plain.failure}")
    step_s = contest.alone()
    given_setting = _given(facts)
    given = contest.run(given_setting, 0)
    notes = [*facts.notes, *_not_tried(facts)]
    why = ""
    looked: dict[str, Any] = {}
    with _interruptible() as state:
        why = cannot_help(plain, step_s, contest.here.cores)
        if not why:
            climb(contest, facts, plain, step_s)
        variants(contest, facts, step_s, why, notes)
        rounds(contest, given_setting)
    search_s = time.monotonic() - began
    if not state.interrupted and lints:
        with _interruptible() as state:
            looked = contest.lints()
    interrupted = state.interrupted
    measured = list(contest.measured.values())
    if not given.able:
        notes.append(f"As given it fails: {given.failure}.")
    if "error" in looked:
        notes.append(f"Looking for faults ended early: {looked['error']}.")
    notes += looked.get("notes", [])
    best = _never_slower(smallest_of_the_best(measured), plain)
    found = Found(
        contest.target, given, plain, best, measured, step_s, contest.here.cores, contest.here.why, "", notes,
        [Lint(**item) for item in looked.get("lints", [])], search_s, time.monotonic() - began, interrupted,
        contest.reused,
    )  # fmt: skip
    return replace(found, verdict=verdict(found, why))


def cannot_help(plain: Measured, step_s: float, cores: int) -> str:
    """Why workers cannot help, as a sentence, where the costs alone say so; empty where they may."""
    seen = plain.slices[0]
    if step_s and seen.waiting < WITHIN:
        return (f"Workers cannot help: making a batch takes {seen.waiting:.1%} of a step, so that removing all of it "
                f"brings at most {1 / (1 - seen.waiting):.2f}x.")  # fmt: skip
    if cores == 1 and seen.cpu_share > 0.9:
        return "Workers cannot help: there is one core, and loading and stepping keep it busy."
    return ""


def climb(contest: Contest, facts: Facts, plain: Measured, step_s: float) -> None:
    """One slice each for the numbers of workers that the costs point to.

    One worker first: what it needs for a batch, its hand-over included, says how many would keep up with the step, or
    would fill the cores. Then upwards while it pays, and between a number that is too small and one that is enough.
    """
    cores = contest.here.cores
    base = replace(_given(facts), fetch=AS_GIVEN, persistent_workers=True)
    tried: dict[int, float] = {0: plain.rate}

    def run(number: int) -> bool:
        if number not in tried:
            item = contest.run(replace(base, num_workers=number), 0)
            tried[number] = item.rate if item.able else 0.0
        return tried[number] > 0

    given = _given(facts)
    if given.num_workers and given in contest.measured and contest.measured[given].able:
        tried[given.num_workers] = contest.measured[given].rate
    if not run(1):
        return
    one = contest.measured.get(replace(base, num_workers=1)) or contest.measured[given]
    seen = next(iter(one.slices.values()))
    if tried[1] < 0.9 * plain.rate and seen.fetch_p50_s * seen.rate < 0.5:
        return  # slower, and the worker idles more than half of its time: handing over is what takes the time
    waits = seen.fetch_cpu < 0.5
    limit, most = (4 * cores, 8 * cores) if waits else (cores, 2 * cores)
    top = 1 / step_s if step_s else math.inf
    wanted = max(1, min(limit, math.ceil(seen.fetch_p95_s / step_s) if step_s else limit))
    while wanted > 1 and not run(wanted):
        most, wanted = wanted - 1, wanted // 2
    while True:
        able = [number for number, rate in tried.items() if rate > 0]
        best = max(tried.values())
        enough = min(number for number in able if tried[number] >= (1 - WITHIN) * best)
        below = max((number for number in able if number < enough), default=0)
        # Upwards: the largest one tried is better than the next smaller one, and the step still waits.
        if enough == max(able) and enough < most and best < 0.98 * top and tried[below] < (1 - WITHIN) * best:
            more = min(most, max(enough + 1, enough * 5 // 4))
            if not run(more):
                most = more - 1
        elif enough - below <= 1 or not run((enough + below) // 2):
            return


def variants(contest: Contest, facts: Facts, step_s: float, why: str, notes: list[str]) -> None:
    """One slice each for the other dimensions, around the best number of workers."""
    leader = smallest_of_the_best(_first_slices(contest))
    setting, seen = leader.setting, next(iter(leader.slices.values()))
    for fetch in facts.fetches:
        if fetch != AS_GIVEN and not (step_s and why):
            contest.run(Setting(fetch=fetch), 0)
            if setting.num_workers:
                contest.run(replace(setting, fetch=fetch), 0)
    if setting.num_workers and seen.fetch_p99_s > 3 * seen.fetch_p50_s:
        for prefetch in (4, 8):
            contest.run(replace(setting, prefetch_factor=prefetch), 0)
    elif setting.num_workers:
        notes.append(
            f"prefetch_factor stays at {setting.prefetch_factor}: batches take about the same time each (99%: "
            f"{seen.fetch_p99_s / max(seen.fetch_p50_s, 1e-12):.1f} times the median), a deeper queue would not help."
        )
    if setting.num_workers:
        _persistence(contest, facts, leader, notes)
    if facts.cuda and contest.device == "cuda":
        contest.run(replace(setting, pin_memory=True), 0)
        contest.run(replace(setting, pin_memory=True, non_blocking=True), 0)
    elif facts.cuda:
        contest.run(replace(setting, pin_memory=not setting.pin_memory), 0)


def _persistence(contest: Contest, facts: Facts, leader: Measured, notes: list[str]) -> None:
    """Workers that end with each epoch are tried where an epoch is short enough for that to count."""
    start = leader.start_s
    if not facts.epoch_batches:
        contest.run(replace(leader.setting, persistent_workers=not leader.setting.persistent_workers), 0)
        return
    epoch = facts.epoch_batches / leader.rate
    if start / epoch > 0.01 and epoch < 3 * contest.slice_s:
        contest.run(replace(leader.setting, persistent_workers=not leader.setting.persistent_workers), 0)
    else:
        notes.append(
            f"persistent_workers: starting workers takes {start:.2f} s, once in an epoch of {epoch:.3g} s "
            f"({start / (start + epoch):.1%})."
        )


def rounds(contest: Contest, given: Setting) -> None:
    """Further slices in random order, until one is left or all rounds are spent."""
    for number in range(1, ROUNDS):
        live = [item.setting for item in _live(contest, given)]
        if len(live) < 2 or (number > 1 and _decided(contest, live)):
            return
        contest.expected = contest.done + len(live) * (ROUNDS - number)
        # The order is random, and the same when a killed search goes on.
        random.Random(number).shuffle(live)
        for setting in live:
            contest.run(setting, number)


def _decided(contest: Contest, live: Sequence[Setting]) -> bool:
    """The smallest is as good as the best one: further rounds could only confirm it."""
    items = [contest.measured[setting] for setting in live]
    smallest, top = min(items, key=lambda item: item.setting.size), max(items, key=lambda item: item.rate)
    return ratio(smallest, top) >= 1 - WITHIN / 3


def _live(contest: Contest, given: Setting) -> list[Measured]:
    """Settings worth another slice: near the best. The one as given gets a second one at least, for the gain's sake."""
    able = [item for item in contest.measured.values() if item.able]
    most = max(len(item.slices) for item in able)
    front = [item for item in able if len(item.slices) == most]
    top = max(front, key=lambda item: item.rate)
    share = _KEEP_FIRST if most == 1 else _KEEP
    live = [item for item in front if ratio(item, top) >= share]
    if len(live) == 1 and most > 1:
        return live
    for item in able:
        if item.setting == given and item not in live and most == 1:
            live.append(item)
    return live


def _first_slices(contest: Contest) -> list[Measured]:
    return [item for item in contest.measured.values() if item.able]


def _given(facts: Facts) -> Setting:
    if not facts.num_workers:
        return Setting(pin_memory=facts.pin_memory and facts.cuda)
    return Setting(facts.num_workers, facts.prefetch_factor, facts.persistent_workers, facts.pin_memory and facts.cuda)


def _never_slower(best: Measured, plain: Measured) -> Measured:
    """torch's default where what was found is not faster than it."""
    return plain if best is not plain and ratio(best, plain) < 1 else best


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


def _first(item: Measured, name: str) -> float:
    return float(getattr(next(iter(item.slices.values())), name))


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


def verdict(found: Found, why: str = "") -> str:
    """The answer in one or two sentences."""
    before, best = found.before, found.best
    takes = f"{found.gain:.2f}x the batches a second with {best.setting.name}"
    waited = f"{before.waiting:.0%} of the time was waiting" if found.step_s else "no step was given"
    helped = best is not before and found.gain >= 1 + WITHIN
    if not best.setting.num_workers and not why:
        why = _why_workers_lost(found)
    if why:
        if helped:
            return f"{why} {takes}."
        if before.setting.num_workers and best is not before:
            return f"{why} {best.setting.arguments} is as fast as the {before.setting.num_workers} given."
        return why
    if helped:
        return f"{takes} ({waited})."
    if best is not before:
        return f"No setting is more than 3% faster than the one given; {best.setting.arguments} is as fast and smaller."
    return f"The setting as given is the smallest within 3% of the best ({waited})."


def _why_workers_lost(found: Found) -> str:
    """What was seen of settings with workers, where none won."""
    tried = [item for item in found.settings if item.setting.num_workers and item.able]
    failed = [item for item in found.settings if item.setting.num_workers and item.failure and not item.left_out]
    if not tried:
        told = failed or [item for item in found.settings if item.left_out]
        return f"Workers do not run: {told[0].failure}." if told else ""
    fastest = max(tried, key=lambda item: ratio(item, found.plain))
    seen, reached = next(iter(fastest.slices.values())), ratio(fastest, found.plain)
    beside = f"{fastest.setting.num_workers} of them bring {reached:.2f}x"
    if reached >= 1 + WITHIN:
        return f"Workers cannot help beside {found.best.setting.name}: alone {beside}."
    if found.step_s and reached > 1 - WITHIN and found.plain.waiting < 0.1:
        return f"Workers cannot help: waiting is {found.plain.waiting:.1%} of a step, and {beside}."
    if seen.fetch_p50_s * seen.rate < 0.5 * fastest.setting.num_workers:
        handing = max(1 / seen.rate - found.step_s, 0.0)
        return (
            f"Workers cannot help: making a batch of {size_text(seen.batch_bytes)} takes {_time(found.batch_p50_s)}, "
            f"getting it from a worker {_time(handing)}; {beside}."
        )
    if found.plain.slices[0].cpu_share > 0.9 * found.cores:
        return f"Workers cannot help: the loop keeps all {found.cores} cores busy without them; {beside}."
    return f"Workers cannot help: {beside}."


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
