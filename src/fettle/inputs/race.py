"""Slices of settings, each setting in a process of its own that is stopped while others run."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import TypeVar

import msgspec

from fettle.errors import UsageError
from fettle.files import plain
from fettle.inputs._messages import Describe, Faults, FindFaults, Open, TakeSlice, TimeStep
from fettle.inputs.setting import WITHIN, Facts, Measured, Room, Setting, Slice, shared, why_not
from fettle.journal import Journal
from fettle.measure import Surroundings
from fettle.procs.child import Child, ChildError
from fettle.procs.limits import granted_memory_bytes

_MODULE = "fettle.inputs._run"
"""What the processes run."""
PAIRS, ROUNDS, MOST = 3, 6, 12
"""Pairs of slices in which two settings are compared, the most where they are near the line, and the most where others
disturb some of them."""
_LOOKING_S = 120.0
"""Looking for faults takes longer than a slice, however long a slice may take."""
_CLEAR, _NEAR = 1.15, 0.025
"""Two pairs that are both this far beyond the line are enough; a median this near to it wants more of them."""
OnProgress = Callable[[str, int, int], None]
"""What runs now, slices done, and slices expected in all."""
T = TypeVar("T")


class Race:
    """Measures slices and keeps them. Close it: processes are alive until then."""

    def __init__(
        self, target: str, slice_s: float, timeout_s: float, device: str, here: Room, journal: Journal,
        on_progress: OnProgress,
    ) -> None:  # fmt: skip
        self.target, self.slice_s, self.timeout_s, self.device = target, slice_s, timeout_s, device
        self.here, self.journal, self.on_progress = here, journal, on_progress
        self.measured: dict[Setting, Measured] = {}
        self.facts: Facts | None = None
        self.round = 0
        self.done, self.expected = 0, 20
        self.reused = 0
        self._processes: dict[Setting, Child] = {}
        self._largest = 0
        self._around = Surroundings()

    def open(self) -> Facts:
        """What the target makes. Raises `ChildError` where it makes none or its rows cannot be read."""
        self.facts = self._known_or("facts", Facts, self._ask_facts)
        return self.facts

    def alone(self) -> float:
        """Seconds of a step without loading; 0 where there is none. Raises `UsageError` where it cannot be made."""

        def time_step() -> float:
            return self._process(Setting()).call(TimeStep(), float, self.timeout_s)

        try:
            return self._known_or("step", float, lambda: self._around.watched(time_step)[0])
        except ChildError as error:
            raise UsageError(f"the step alone fails: {error}") from None

    def run(self, setting: Setting, number: int) -> Measured:
        """One slice of a setting in a round; a failure ends the setting, not the search."""
        item = self.measured.setdefault(
            setting, Measured(setting, epoch_batches=self.facts.epoch_batches if self.facts else 0)
        )
        if item.failure or number in item.slices:
            return item
        if reason := self.refused(setting):
            item.failure, item.left_out = reason, True
            return item
        self.expected = max(self.expected, self.done + 2)
        self.on_progress(setting.name, self.done, max(self.expected, self.done + 1))
        try:
            item.slices[number] = self._known_or(f"{number} {setting.name}", Slice, lambda: self._slice(setting))
        except (ChildError, UsageError) as error:  # also a factory that fails the second time
            if isinstance(error, UsageError) and setting == Setting() and not item.slices:
                raise
            item.failure = str(error)
            self.close(setting)
        self.done += 1
        return item

    def next_round(self, *settings: Setting) -> None:
        """One slice each, in random order; the same order when a killed search goes on."""
        number, self.round = self.round, self.round + 1
        order = list(settings)
        random.Random(number).shuffle(order)
        for setting in order:
            self.run(setting, number)

    def pairs(self, one: Setting, other: Setting, rough: bool = False) -> float:
        """How much faster `one` is than `other`, side by side: the median over rounds of both; 0 where `one` fails.

        Rounds are added to those that both have until they say whether the larger of the two is worth its size; with
        `rough` two are enough: a later comparison decides where it matters.
        """
        line = 1 - WITHIN if one.size < other.size else 1 / (1 - WITHIN)
        while True:
            mine, its = self.measured.get(one), self.measured.get(other)
            if mine and mine.failure:
                return 0.0
            if its and its.failure:
                return math.inf
            log_ratios, pairs = [], 0
            if mine and its:
                pairs = len(mine.slices.keys() & its.slices.keys())
                log_ratios = [mine.whole(number) / its.whole(number) for number in shared(mine, its)]
            if _decided(log_ratios, line) or (rough and len(log_ratios) >= 2) or pairs >= MOST:
                return statistics.median(log_ratios)
            self.next_round(one, other)

    def refused(self, setting: Setting) -> str:
        """Why a setting is not run: it would not fit, or a smaller one already did not."""
        if not setting.num_workers:
            return ""
        for other in self.measured.values():
            lesser = 0 < other.setting.num_workers <= setting.num_workers
            if lesser and not other.left_out and other.failure.startswith(("out of memory", "/dev/shm is full")) and (
                other.setting.prefetch_factor <= setting.prefetch_factor
            ):  # fmt: skip
                return f"left out: {other.setting.num_workers} workers already ran out of memory"
        known = [item for one in self.measured.values() for item in one.slices.values()]
        if not known:
            return ""
        return why_not(setting, known[0].batch_bytes, max(item.worker_bytes for item in known), self.here)

    def faults(self) -> Faults:
        """Look for what is wrong, in a process of its own."""
        self.close()
        self.on_progress("looking for faults", self.done, max(self.expected, self.done + 1))

        def ask() -> Faults:
            with Child(_MODULE) as process:
                return process.call(FindFaults(self.target), Faults, max(self.timeout_s, _LOOKING_S))

        try:
            return self._known_or("lint", Faults, ask)
        except (ChildError, UsageError) as error:
            return Faults(notes=[f"Looking for faults ended early: {error}."])

    def close(self, *settings: Setting) -> None:
        """End the processes of these settings, or all."""
        for setting in settings or list(self._processes):
            if setting in self._processes:
                self._processes.pop(setting).close()

    def _known_or(self, question: str, answer: type[T], ask: Callable[[], T]) -> T:
        """The answer that is known, or asked for now and kept. Where there is none: `ChildError`, which is kept too."""
        line = self.journal.lines.get(question)
        if line is not None:
            self.reused += 1
        else:
            try:
                line = self.journal.put(question, ask())
            except ChildError as error:
                line = self.journal.put(question, failure=_reason(error))
        if line.failure:
            raise ChildError(line.failure)
        return msgspec.json.decode(line.answer, type=answer)

    def _ask_facts(self) -> Facts:
        process = self._processes[Setting()] = Child(_MODULE)
        return process.call(Describe(self.target, self.device), Facts, self.timeout_s)

    def _slice(self, setting: Setting) -> Slice:
        process = self._process(setting)

        def take() -> Slice:
            answer = process.call(TakeSlice(self.slice_s), Slice, self.timeout_s)
            self._largest = max(self._largest, process.resident_bytes())
            process.pause()
            return answer

        answer, load = self._around.watched(take)
        return msgspec.structs.replace(answer, quiet=load.is_quiet, load=plain(load))

    def _process(self, setting: Setting) -> Child:
        """The setting's process, started where there is none; others make room where memory is short."""
        for other in self._processes.values():
            other.pause()
        if setting not in self._processes:
            if min(granted_memory_bytes(), self.here.memory_bytes) < 3 * self._largest:
                self.close()
            process = self._processes[setting] = Child(_MODULE)
            process.call(Open(self.target, setting, self.device), type(None), self.timeout_s)
        return self._processes[setting]


def _decided(log_ratios: list[float], line: float) -> bool:
    """Whether pairs are enough to tell on which side of `line` two settings are."""
    if len(log_ratios) < 2:
        return False
    if min(log_ratios) > line * _CLEAR or max(log_ratios) < line / _CLEAR:
        return True
    near = abs(statistics.median(log_ratios) / line - 1) < _NEAR
    return len(log_ratios) >= (ROUNDS if near else PAIRS)


def _reason(error: ChildError) -> str:
    if error.kind == "timeout":
        return f"{error}: a worker may hang"
    named = str(error).startswith(("out of memory", "/dev/shm is full"))
    return f"out of memory: {error}" if error.kind == "memory" and not named else str(error)
