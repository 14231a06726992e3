"""Whole studies as data, on machines whose truth is known: how often is the wrong recipe announced, how often does the
announced interval hold the truth?

Each study has recipes with made-up times and neighbours with made-up habits; races, the model over all of them, the
choice of finalists and of the winner are fettle's own. Nothing is run and no clock is read: ten thousand studies take a
minute or two.

    python bench/busy_simulation.py --studies 10000
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fettle.measure import Interval, Slice, Trial
from fettle.recipe import Recipe
from fettle.result import Limits
from fettle.techniques import Facts
from fettle.tuning import Options
from fettle.tuning._outcome import pick_winner
from fettle.tuning.session import Session
from fettle.workload import Target

GIVEN = Recipe()
ROUND_S = 0.9
STARTS_S = 18.0
"""Of the processes of a race, one after the other."""
PLACE_S = 90.0


def bursts(on_s: float, off_s: float) -> Callable[[float], float]:
    """A neighbour that has half of a core for so long, and nothing for so long."""
    return lambda now: 0.5 if now % (on_s + off_s) < on_s else 0.0


NEIGHBOURS: dict[str, Callable[[float], float]] = {
    "none": lambda now: 0.0,
    "bursts": bursts(20, 15),
    "always": lambda now: 0.5,
}


@dataclass
class Study:
    """One study's truth, and what its machine does."""

    seed: int
    neighbour: Callable[[float], float]
    recipes: int = 12
    goes_first: bool = False
    """Whether slices may go before others' work: a tenth of the waiting is left then."""
    shift: float = 0.0
    """Standard deviation of the log of what a host makes of each recipe's time for as long as it leaves the cores where
    they are, a minute and a half; the truth is the mean over such times."""
    stretch: float = 0.0
    """Standard deviation of the share by which it makes all differences between log times larger or smaller for as
    long."""
    watched: bool = True
    """Whether fettle looks at the machine: without, every slice counts as quiet, as it did before."""
    random: random.Random = field(init=False)
    log_ms: dict[Recipe, float] = field(init=False)
    beside: dict[Recipe, float] = field(init=False)
    """Log of how many times longer each takes beside the neighbour."""

    def __post_init__(self) -> None:
        self.random = draw = random.Random(self.seed)
        self.now = draw.uniform(0, 60)
        self.spread = draw.choice((0.007, 0.02, 0.05))
        self.noise = draw.choice((0.01, 0.03))
        self.patience_s = 27.0
        names = [Recipe({"precision": f"level-{index}"}) for index in range(self.recipes)]
        best = -draw.uniform(0.05, 2.0)
        self.log_ms, self.beside = {GIVEN: 0.0}, {GIVEN: math.log(draw.uniform(3, 9))}
        for index, name in enumerate(names):
            # Some are near the best, some near nothing, one or two worse than given.
            behind = (
                (0.0, draw.uniform(0.01, 0.06), draw.uniform(0.05, 0.15))[index] if index < 3 else draw.uniform(0, 2)
            )
            self.log_ms[name] = min(0.2, best + behind)
            threads = draw.random() < 0.3
            self.beside[name] = math.log(draw.uniform(1.0, 1.3) if threads else draw.uniform(2, 9))
        self.off = {name: draw.gauss(0, 0.06) for name in (GIVEN, *names)}
        self.luck: dict[str, float] = {}

    def race(self, number: int, recipes: Sequence[Recipe], *, processes: int = 1, most_rounds: int = 12) -> list[Trial]:
        """Trials of a race: all run three rounds, those near the fastest more."""
        self.now += STARTS_S * processes
        fastest = min(self.log_ms[recipe] for recipe in recipes)
        slices: dict[Recipe, list[Slice]] = {recipe: [] for recipe in recipes}
        for turn in range(1, most_rounds + 1):
            busy = self.neighbour(self.now)
            if busy and self.watched and self.patience_s > 0:
                while busy and self.patience_s > 0:
                    self.now, self.patience_s = self.now + 0.3, self.patience_s - 0.3
                    busy = self.neighbour(self.now)
            for recipe in recipes:
                if turn > 3 and recipe != GIVEN and self.log_ms[recipe] > fastest + 0.5 / turn + 3 * self.spread:
                    continue
                for copy in range(processes):
                    slices[recipe].append(self.slice(recipe, number, copy, processes, turn, busy))
            self.now += ROUND_S * processes
        return [Trial(recipe, "measured", time_ms=1.0, speedup=Interval(1.0, 1.0, 1.0), slices=found, race=number)
                for recipe, found in slices.items()]  # fmt: skip

    def slice(self, recipe: Recipe, number: int, copy: int, processes: int, turn: int, busy: float) -> Slice:
        draw = self.random
        name = f"{recipe}" if processes == 1 else f"{number} {recipe} {copy}"
        if name not in self.luck:
            slow = draw.uniform(0.1, 0.33) if draw.random() < 0.01 else 0.0
            self.luck[name] = draw.gauss(0, self.spread) + slow
        place = random.Random(f"{self.seed} {recipe} {self.now // PLACE_S}").gauss(0, self.shift)
        place += self.log_ms[recipe] * random.Random(f"{self.seed} {self.now // PLACE_S}").gauss(0, self.stretch)
        log = self.log_ms[recipe] + place + self.luck[name] + draw.gauss(0, self.noise)
        if not busy:
            return Slice(name, turn, math.exp(log), math.exp(log), True, 0.0, 0.0)
        slower = self.beside[recipe] * draw.uniform(0.8, 1.2) * (0.06 if self.goes_first else 1.0)
        told = math.exp(log + self.off[recipe] * slower + draw.gauss(0, 0.02))
        return Slice(name, turn, math.exp(log + slower), told, not self.watched, 0.8, busy)


class _Notes:
    """What a session asks of a study that is not kept."""

    def add(self, trial: Trial, mode: str) -> None: ...
    def set_note(self, key: str, value: object) -> None: ...


def run(truth: Study, folder: Path) -> tuple[float, bool, bool, bool, float]:
    """How far the announced winner is behind the best (a log), whether its interval holds the truth, whether it was
    said to be of a quiet machine, whether a gain of 1.5x was not told, and half of the interval (a log)."""
    options = Options(limits=Limits(None), budget_s=None, output=folder)
    session = Session(Target("made/up.py:workload"), options, lambda event: None, started=0.0)
    session.study = _Notes()  # type: ignore[assignment]
    session.facts = Facts()
    session.standings.misses = lambda trial: ""  # type: ignore[method-assign]
    waiting = [recipe for recipe in truth.log_ms if recipe.levels]
    truth.random.shuffle(waiting)
    number = 0
    while waiting:
        number += 1
        leader = session.standings.best()
        together = [GIVEN, *([leader.recipe] if leader is not None and leader.recipe.levels else []), *waiting[:5]]
        del waiting[:5]
        keep(session, truth.race(number, together))
    truth.patience_s += 18.0
    final = [GIVEN, *(trial.recipe for trial in session.standings.finalists())]
    last = session.standings.confirmed(truth.race(number + 1, final, processes=2, most_rounds=8))
    winner, verdict = pick_winner(session, last)
    best = min(truth.log_ms.values())
    if winner is None or not winner.recipe.levels or winner.speedup is None:
        return -best, True, False, best < -math.log(1.5), math.nan
    true = math.exp(-truth.log_ms[winner.recipe])
    quiet = [sum(one.quiet for one in trial.slices if one.process == trial.slices[0].process) for trial in last]
    behind = truth.log_ms[winner.recipe] - best
    held = winner.speedup.low <= true <= winner.speedup.high
    half = math.log(winner.speedup.high / winner.speedup.low) / 2 if winner.speedup.low > 0 else math.inf
    return behind, held, min(quiet) >= 3, verdict == "cannot tell" and best < -math.log(1.5), half


def keep(session: Session, trials: Sequence[Trial]) -> None:
    """What a session does with a race, without writing it down."""
    for trial in trials:
        session.standings.known.setdefault(trial.recipe, replace(trial))
    session.standings.add(trials)


def summary(
    name: str, studies: int, watched: bool, goes_first: bool = False, seed: int = 0, shift: float = 0.0,
    stretch: float = 0.0,
) -> dict[str, float | str | int]:  # fmt: skip
    """Many studies beside one neighbour."""
    with tempfile.TemporaryDirectory() as folder:
        truths = [
            Study(seed + index, NEIGHBOURS[name], watched=watched, goes_first=goes_first, shift=shift, stretch=stretch)
            for index in range(studies)
        ]
        found = [run(truth, Path(folder)) for truth in truths]
    said = [held for _, held, quiet, *_ in found if quiet]
    halves = [half for *_, half in found if not math.isnan(half)]
    return {
        "neighbour": name, "watched": watched, "goes first": goes_first, "shift": shift,
        "stretch": stretch, "studies": studies,
        "more than 5% behind": sum(behind > math.log(1.05) for behind, *_ in found) / studies,
        "more than 15% behind": sum(behind > math.log(1.15) for behind, *_ in found) / studies,
        "interval held": sum(held for _, held, *_ in found) / studies,
        "half of the interval, median": round(statistics.median(halves), 4),
        "said to be quiet": len(said), "of these held": sum(said) / max(1, len(said)),
        "1.5x not told": sum(missed for *_, missed, _ in found) / studies,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=10_000, help="in all")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "busy_simulation.json")
    options = parser.parse_args()
    rows = []
    cases: list[dict[str, Any]] = [{"name": name, "watched": one} for name in NEIGHBOURS for one in (True, False)]
    cases += [{"name": "always", "watched": True, "goes_first": True}]
    cases += [
        {"name": "none", "watched": True, **host} for host in ({"stretch": 0.04}, {"shift": 0.03}, {"shift": 0.08})
    ]
    for case in cases:
        began = time.process_time()
        rows.append(summary(studies=options.studies // len(cases), **case))
        print(rows[-1], f"{time.process_time() - began:.0f} s", flush=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
