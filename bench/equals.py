"""Does a race claim a difference between equals, whatever else the machine does?

Each piece is one race of a small model with itself, as `fettle bench` would run it: four processes of each side, six
where these leave it open, and the verdict that the command prints.

    python bench/equals.py --minutes 9       # goes on from the JSON that it left
    python bench/equals.py --show            # the table
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import sys
import time
from dataclasses import astuple
from pathlib import Path

from busy import NEIGHBOURS, neighbour
from gate import alone

from fettle.comparing import MOST_REPLICATES, REPLICATES
from fettle.machine import this_machine
from fettle.measure import Candidate, Judge, Patience, Rules, race, verdict
from fettle.recipe import Recipe
from fettle.tuning import widened
from fettle.workload import find_target

HERE = Path(__file__).parent
BESIDE = [name for name in NEIGHBOURS if "quota" not in name]
RULES = Rules(settle_verdicts=True, replicates=REPLICATES, further=(MOST_REPLICATES,), abreast=2)
WAIT_S = 30.0
"""What `fettle bench` waits for a quiet machine at most, all slices together."""


def piece(model: str, beside: str, number: int) -> dict[str, object]:
    """One race of a model of `bench/busy_workloads.py` with itself."""
    target = find_target(f"{HERE / 'busy_workloads.py'}:{model}")
    sides = [Candidate(Recipe(), None, label=label) for label in ("one", "other")]
    began = time.monotonic()
    with neighbour(beside):
        one, other = race(target, "", sides, Judge(), RULES, seed=number, patience=Patience(WAIT_S))
    told = widened(other, one, RULES.confidence)
    return {
        "verdict": verdict(told.speedup, RULES.indifference),
        "speedup": None if told.speedup is None else [round(value, 5) for value in astuple(told.speedup)],
        "processes": other.processes,
        "quiet": one.is_quiet and other.is_quiet,
        "seconds": round(time.monotonic() - began, 1),
    }


def summary(pieces: dict[str, dict]) -> list[dict[str, object]]:
    """By model and neighbour: how often a difference was claimed, and how far off the estimates were."""
    rows = []
    for kind in dict.fromkeys(key.rpartition(" ")[0] for key in pieces):
        found = [one for key, one in pieces.items() if key.rpartition(" ")[0] == kind]
        said = [one["verdict"] for one in found]
        logs = sorted(abs(math.log(one["speedup"][0])) for one in found if one["speedup"])
        rows.append({"race": kind, "races": len(found), "a difference": said.count("faster") + said.count("slower"),
                     "same": said.count("same"), "cannot tell": said.count("cannot tell"),
                     "quiet": sum(one["quiet"] for one in found),
                     "half are within": round(math.expm1(statistics.median(logs)), 4) if logs else None,
                     "furthest off": round(math.expm1(logs[-1]), 4) if logs else None})  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing later")
    parser.add_argument("--models", nargs="+", default=["mlp"])
    parser.add_argument("--neighbours", nargs="+", default=BESIDE, choices=BESIDE)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "equals.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the neighbour ends with this benchmark
    empty: dict = {"machine": this_machine().summary, "pieces": {}}
    seen = json.loads(options.output.read_text()) if options.output.exists() else empty
    pieces, longest, end = seen["pieces"], 0.0, time.monotonic() + 60 * options.minutes
    order = [(model, beside, number) for number in range(options.repeats) for beside in options.neighbours
             for model in options.models]  # fmt: skip
    for model, beside, number in [] if options.show else order:
        key = f"{model}, {beside} {number}"
        if key in pieces:
            continue
        if time.monotonic() + longest > end or not alone(end):
            break
        began = time.monotonic()
        pieces[key] = piece(model, beside, number)
        longest = max(longest, time.monotonic() - began)
        print(key, pieces[key], flush=True)
        options.output.write_text(json.dumps({**seen, "summary": summary(pieces)}, indent=1) + "\n")
    for row in summary(pieces):
        print(row)


if __name__ == "__main__":
    main()
