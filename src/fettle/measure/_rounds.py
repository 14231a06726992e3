"""The rounds of a race: slices in random order, each made again where others had the machine, with a look at the data
now and then."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fettle.measure._decide import decided, is_dear
from fettle.measure._entrants import Entrant, Runner
from fettle.measure._load import Load
from fettle.measure._process import WorkerError
from fettle.measure._rules import Progress, Rules
from fettle.measure._statistics import LOOKS
from fettle.measure._trial import Slice
from fettle.measure._watch import Patience, Watch


@dataclass
class Rounds:
    """The rounds of one race, and what it has seen of the machine."""

    rules: Rules
    order: random.Random
    tell: Callable[[Progress], None]
    patience: Patience = field(default_factory=Patience)
    watch: Watch = field(default_factory=Watch)
    loads: dict[str, list[Load]] = field(default_factory=dict)
    """By process."""
    _busy: bool = False
    """Others had the machine in the last slice."""

    def run(self, entrants: Sequence[Entrant], anchor: Entrant, before: int = 0) -> None:
        """Until the leader is certain, nothing is left to win, or time is up. `before`: rounds that have been run
        already, which are neither counted nor looked at again."""
        rules = self.rules
        self.watch.restart()
        for count in range(1, rules.max_rounds + 1):
            turns = [(entrant, runner) for entrant in entrants if entrant.live for runner in entrant.runners]
            self.order.shuffle(turns)
            for entrant, runner in turns:
                if not entrant.live:
                    continue
                try:
                    self._turn(runner, before + count)
                except WorkerError as error:
                    entrant.live, runner.failure = False, str(error)
            self.tell(Progress("round", round=before + count, live=sum(entrant.live for entrant in entrants)))
            if count in LOOKS and decided(entrants, anchor, rules):
                return
            if time.monotonic() > rules.deadline and count >= LOOKS[0]:
                return
            if len(entrants) == 1 and is_dear(anchor):
                return  # nobody to compare it with, and every race that it meets somebody in times it again
            if not any(entrant.live for entrant in entrants):
                return

    def _turn(self, runner: Runner, number: int) -> None:
        """A slice of a process, and again while the machine is not quiet and there is patience left."""
        while True:
            load = self._slice(runner, number)
            if load.is_quiet or self.rules.under_load or not self.patience.may_wait():
                return
            self.tell(Progress("busy", runner.entry.recipe, load=load))
            if not self.patience.wait(self.watch, self.rules.deadline):
                return  # never quiet: the slice stays what it is

    def _slice(self, runner: Runner, number: int) -> Load:
        # On a machine that is known to be busy, threads that compute are held apart: see `_waits.one_core_each`.
        apart = self._busy and not self.rules.under_load and not self.patience.may_wait()
        timeout_s = self.rules.call_timeout_s + 20 * runner.answer["call_ns"] / 1e9 + self.rules.slice_s
        answer = runner.worker.ask("slice", timeout_s, seconds=self.rules.slice_s, apart=apart)
        runner.worker.pause()
        self.watch.mark(answer["cpu_s"])
        load = self.watch.load(math.nan if answer["waits"] is None else answer["waits"])
        self._busy = not load.is_quiet
        if load.is_quiet:
            self.patience.given_up = False
        self.loads.setdefault(runner.process, []).append(load)
        unhindered = answer["unhindered_ns"]
        runner.samples_ns += answer["samples_ns"]
        runner.slices.append(
            Slice(
                process=runner.process,
                round=number,
                ms=round(statistics.median(answer["samples_ns"]) / 1e6, 6),
                unhindered_ms=None if unhindered is None else round(unhindered / 1e6, 6),
                quiet=load.is_quiet and not apart,
                waits=_rounded(load.waits),
                others=_rounded(load.others),
            )
        )
        if answer["energy_j"] is not None:
            runner.energy_j.append(answer["energy_j"])
        return load


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)
