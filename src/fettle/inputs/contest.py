"""Slices of settings, each setting in a process of its own that is stopped while others run."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import psutil

from fettle.errors import UsageError
from fettle.inputs.guard import Room, why_not
from fettle.inputs.journal import Journal, key
from fettle.inputs.setting import WITHIN, Facts, Measured, Setting, Slice
from fettle.measure import Worker, WorkerError

PAIRS, ROUNDS = 3, 6
"""Pairs of slices in which two settings are held against each other, and the most where they are near the line."""
_CLEAR, _NEAR = 1.15, 0.025
"""Two pairs that are both this far beyond the line are enough; a median this near to it wants more of them."""
Tell = Callable[[str, int, int], None]
"""What runs now, slices done, and slices expected in all."""


class Contest:
    """Measures slices and keeps them. Close it: processes are alive until then."""

    def __init__(
        self, target: str, slice_s: float, timeout_s: float, device: str, here: Room, journal: Journal, tell: Tell
    ) -> None:
        self.target, self.slice_s, self.timeout_s, self.device = target, slice_s, timeout_s, device
        self.here, self.journal, self.tell = here, journal, tell
        self.measured: dict[Setting, Measured] = {}
        self.facts: Facts | None = None
        self.round = 0
        self.done, self.expected = 0, 20
        self.reused = 0
        self._processes: dict[Setting, Worker] = {}
        self._largest = 0

    def open(self) -> Facts:
        """What the target makes. Raises `UsageError` where it makes none or its rows cannot be read."""
        answer = self._known_or("facts", self._ask_facts)
        if "error" in answer:
            raise UsageError(str(answer["error"]))
        self.facts = msgspec.convert(answer, Facts)
        return self.facts

    def alone(self) -> float:
        """Seconds of a step without loading; 0 where there is none."""
        answer = self._known_or("step", lambda: self._process(Setting()).ask("alone", self.timeout_s))
        return float(answer["step_s"])

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
        self.tell(setting.name, self.done, max(self.expected, self.done + 1))
        answer = self._known_or(key(setting, number), lambda: self._slice(setting))
        self.done += 1
        if "error" in answer:
            item.failure = str(answer["error"])
            self.close(setting)
        else:
            item.slices[number] = msgspec.convert(answer, Slice)
        return item

    def next_round(self, *settings: Setting) -> int:
        """One slice each, in random order; the same order when a killed search goes on. Gives the round's number."""
        number, self.round = self.round, self.round + 1
        order = list(settings)
        random.Random(number).shuffle(order)
        for setting in order:
            self.run(setting, number)
        return number

    def pairs(self, one: Setting, other: Setting, rough: bool = False) -> float:
        """How much faster `one` is than `other`, side by side: the median over rounds of both; 0 where `one` fails.

        Rounds are added to those that both have until they say whether the larger of the two is worth its size; with
        `rough` two are enough: somebody else holds them against each other where it matters.
        """
        line = 1 - WITHIN if one.size < other.size else 1 / (1 - WITHIN)
        while True:
            mine, its = self.measured.get(one), self.measured.get(other)
            if mine and mine.failure:
                return 0.0
            if its and its.failure:
                return math.inf
            found = []
            if mine and its:
                found = [mine.whole(number) / its.whole(number) for number in mine.slices if number in its.slices]
            if _decided(found, line) or (rough and len(found) >= 2):
                return statistics.median(found)
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

    def lints(self) -> dict[str, Any]:
        """Look for what is wrong, in a process of its own."""
        self.close()
        self.tell("looking for faults", self.done, max(self.expected, self.done + 1))

        def ask() -> dict[str, Any]:
            with Worker(module="fettle.inputs._run") as process:
                return process.ask("lint", self.timeout_s, target=self.target)

        return self._known_or("lint", ask)

    def close(self, *settings: Setting) -> None:
        """End the processes of these settings, or all."""
        for setting in settings or list(self._processes):
            if setting in self._processes:
                self._processes.pop(setting).close()

    def _known_or(self, question: str, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        known = self.journal.get(question)
        if known is not None:
            self.reused += 1
            return known
        try:
            answer = ask()
        except WorkerError as error:
            answer = {"error": _reason(error)}
        self.journal.put(question, answer)
        return answer

    def _ask_facts(self) -> dict[str, Any]:
        process = self._processes[Setting()] = Worker(module="fettle.inputs._run")
        return process.ask("facts", self.timeout_s, target=self.target, device=self.device)

    def _slice(self, setting: Setting) -> dict[str, Any]:
        process = self._process(setting)
        answer = process.ask("slice", self.timeout_s, seconds=self.slice_s)
        self._largest = max(self._largest, process.resident_bytes())
        process.pause()
        return answer

    def _process(self, setting: Setting) -> Worker:
        """The setting's process, started where there is none; others make room where memory is short."""
        for other in self._processes.values():
            other.pause()
        if setting not in self._processes:
            if psutil.virtual_memory().available < 3 * self._largest or self.here.memory_bytes < 3 * self._largest:
                self.close()
            process = self._processes[setting] = Worker(module="fettle.inputs._run")
            process.ask("open", self.timeout_s, target=self.target, setting=vars(setting), device=self.device)
        return self._processes[setting]


def _decided(found: list[float], line: float) -> bool:
    """Whether pairs are enough to tell on which side of `line` two settings are."""
    if len(found) < 2:
        return False
    if min(found) > line * _CLEAR or max(found) < line / _CLEAR:
        return True
    near = abs(statistics.median(found) / line - 1) < _NEAR
    return len(found) >= (ROUNDS if near else PAIRS)


def _reason(error: WorkerError) -> str:
    if error.kind == "timeout":
        return f"{error}: a worker may hang"
    told = str(error).startswith(("out of memory", "/dev/shm is full"))
    return f"out of memory: {error}" if error.kind == "memory" and not told else str(error)
