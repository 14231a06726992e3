"""Whole gates as data, of code whose change is known: how often does a gate say what, and what would it cost?

Processes spread by `SPREAD` for life, one in a hundred is slow by a tenth to a third; a slice spreads by `NOISE` about
its process, and one in twelve is up to twice as slow, as slices beside a busy process are. Rounds, looks, intervals and
the judgement are fettle's own; nothing is run and no clock is read.

    python bench/gate_simulation.py --gates 4000
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fettle.gate.judging import judge, overall, slowdown
from fettle.gate.racing import Ground, Settings
from fettle.machine import this_machine
from fettle.measure._rounds import decided
from fettle.measure._rules import Rules
from fettle.measure._runners import Runner, Started
from fettle.measure._statistics import LOOKS
from fettle.measure._trial import Slice
from fettle.measure.race import _speedup

HERE = Path(__file__).parent
SPREAD, NOISE = 0.008, 0.01
CASES = {
    "no change": (0.0, 0.03), "no change, limit 2%": (0.0, 0.02), "3% slower, limit 3%": (0.03, 0.03),
    "3% slower, limit 2%": (0.03, 0.02), "10% slower": (0.10, 0.03),
}  # fmt: skip
"""How much slower the new code is, and the limit."""
START_S, SLICE_S, REST_S = 1.2, 0.055, 2.5
"""Of a process, of a slice with what is around it, and of all else in a gate: measured beside a busy process on two
cores."""


class Simulated:
    """One gate: what `fettle.gate.gating` does, with processes that are only numbers."""

    def __init__(self, seed: int, change: float, settings: Settings, spread: float = SPREAD) -> None:
        self.rng, self.change, self.settings, self.spread = random.Random(seed), change, settings, spread
        self.slices = 0

    def run(self) -> tuple[str, int, float]:
        """The verdict, the processes of each side, the seconds that it would have taken."""
        ground = Ground(None, self.settings, lambda event: None, Path())  # type: ignore[arg-type]
        rules = ground.gate_rules()
        old, new = Started([]), Started([])
        self._start(old, new, rules.replicates)
        self._rounds(old, new, rules, 0)
        verdict = self._verdict(old, new, rules)
        for wanted in rules.further:
            if verdict != "cannot tell":
                break
            done = max(one.round for one in old.first.slices)
            old.live = new.live = True
            self._start(old, new, wanted)
            self._rounds(old, new, rules, done)
            verdict = self._verdict(old, new, rules)
        processes = len(old.runners)
        return verdict, processes, 2 * processes * START_S + self.slices * SLICE_S + REST_S

    def _start(self, old: Started, new: Started, wanted: int) -> None:
        for side, slower in ((old, 1.0), (new, 1 + self.change)):
            while len(side.runners) < wanted:
                slow = self.rng.uniform(1.1, 1.3) if self.rng.random() < 0.01 else 1.0
                answer: Any = SimpleNamespace(samples=1, call_ns=3_000_000)
                runner = Runner(None, None, answer, "", 0.0, f"{id(side)}:{len(side.runners)}")  # type: ignore[arg-type]
                runner.started_s = 3.0 * slower * slow * self.rng.lognormvariate(0, self.spread)  # its time in ms
                side.runners.append(runner)

    def _rounds(self, old: Started, new: Started, rules: Rules, before: int) -> None:
        for count in range(1, rules.max_rounds + 1):
            for runner in (*old.runners, *new.runners):
                taken = self.rng.uniform(1.0, 2.0) if self.rng.random() < 1 / 12 else 1.0
                ms = runner.started_s * taken * self.rng.lognormvariate(0, NOISE)
                runner.slices.append(Slice(runner.process, before + count, ms))
                self.slices += 1
            if count in LOOKS and decided([old, new], old, rules):
                return

    def _verdict(self, old: Started, new: Started, rules: Rules) -> str:
        change = slowdown(_speedup(old, new, rules))
        return overall([judge("time", change, self.settings.fail_slower, len(old.runners))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gates", type=int, default=1000, help="of each case")
    parser.add_argument("--spread", type=float, nargs="+", default=[SPREAD, 3 * SPREAD])
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gate_simulation.json")
    options = parser.parse_args()
    rows, began = [], time.monotonic()
    for spread in options.spread:
        for name, (change, limit) in CASES.items():
            settings = Settings(fail_slower=limit)
            found = [Simulated(seed, change, settings, spread).run() for seed in range(options.gates)]
            said = Counter(verdict for verdict, _, _ in found)
            rows.append({
                "case": name, "spread of processes": spread, "gates": options.gates,
                **{verdict: round(said[verdict] / options.gates, 4) for verdict in ("worse", "within", "cannot tell")},
                "eight processes": round(sum(count == 8 for _, count, _ in found) / options.gates, 3),
                "sixteen": round(sum(count == 16 for _, count, _ in found) / options.gates, 3),
                "seconds, mean": round(sum(seconds for _, _, seconds in found) / options.gates, 1),
            })  # fmt: skip
            print(rows[-1], flush=True)
    document = {"machine": this_machine().summary, "took_s": round(time.monotonic() - began), "rows": rows}
    options.output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
