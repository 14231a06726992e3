"""Is the race to be trusted? A/A races, a planted 3% slow-down, and what racing costs.

For each, beside it, what one-block-after-the-other timing claims on the same processes at the same time: a block of
calls of the one, then a block of the other, a Welch t-test at the same level between them.

    python bench/measurement.py --minutes 9

A race starts eight processes, twelve where these differ, and takes about a minute on two cores, so a run stops after
`--minutes` and the next one goes on from the JSON that it left: about fourteen runs of 9 minutes make 100 A/A races and
20 planted ones. With `--neighbour` all of it happens beside one of the neighbours of `busy.py`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from busy import NEIGHBOURS, neighbour
from scipy import stats

from fettle.comparing import MOST_REPLICATES, REPLICATES
from fettle.machine import this_machine
from fettle.measure import Candidate, Interval, Judge, Patience, Progress, Rules, Trial, Worker, race, verdict
from fettle.measure.messages import Asked, Build, Built, Prepare, Prepared, SliceTaken, TakeSlice
from fettle.recipe import Recipe
from fettle.workload import Target, find_target

WORKLOAD = """
import torch
from torch import nn

class Stack(nn.Module):
    \"\"\"`depth` equal layers: three more of a hundred are three per cent more work, whatever the machine does.\"\"\"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.depth = 100
    def forward(self, x):
        for _ in range(self.depth):
            x = torch.relu(self.layer(x))
        return x

def workload():
    torch.manual_seed(0)
    return Stack().eval(), [torch.randn(64, 256) for _ in range(4)]
"""
RULES = Rules(settle_verdicts=True, replicates=REPLICATES, further=(MOST_REPLICATES,), abreast=2)
SAME = "def optimize(model, batches):\n    return model\n"
SLOW = "def optimize(model, batches):\n    model.depth = 103\n    return model\n"


def one_race(target: Target, source: str, seed: int) -> tuple[Trial, float, float]:
    """A race of the workload against `source`, as `fettle bench` runs it: the trial, seconds in rounds and seconds of
    them in the model."""
    candidates = [Candidate(Recipe(), SAME), Candidate(Recipe({"technique": "other"}), source)]
    ends: list[float] = []
    model_s: list[float] = []

    def on_progress(progress: Progress) -> None:
        if progress.doing.startswith("round"):
            ends.append(time.monotonic())
            model_s.append(sum(calls))
            calls.clear()

    with counting_calls() as calls:
        trials = race(
            target, "", candidates, Judge(), RULES, on_progress=on_progress, seed=seed, patience=Patience(30.0)
        )
    per_round = [b - a for a, b in pairwise(ends)]
    return trials[1], sum(per_round), sum(model_s[1:])


@contextmanager
def counting_calls() -> Iterator[list[float]]:
    """Seconds of the calls in each slice, as they are made: those that count and the one that settles the caches."""
    found: list[float] = []
    ask = Worker.ask

    def heard(self: Worker, request: Asked, answer: type, timeout_s: float) -> object:
        told = ask(self, request, answer, timeout_s)
        if isinstance(request, TakeSlice):
            samples = told.samples_ns
            settling = statistics.median(samples) if statistics.median(samples) * 5 < request.seconds * 1e9 else 0
            found.append((sum(samples) + settling) / 1e9)
        return told

    Worker.ask = heard
    try:
        yield found
    finally:
        Worker.ask = ask


def blocks(target: Target, source: str, seconds: float) -> bool:
    """Whether one block after the other claims a difference: `seconds` of each, Welch's t at 5%."""
    samples = []
    for text in (SAME, source):
        with Worker() as worker:
            worker.ask(Build(target), Built, 60)
            worker.ask(Prepare(text, "block"), Prepared, 60)
            samples.append(worker.ask(TakeSlice(seconds), SliceTaken, 60).samples_ns)
    return bool(stats.ttest_ind(samples[0], samples[1], equal_var=False).pvalue < 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=100, help="A/A races")
    parser.add_argument("--planted", type=int, default=20, help="races against a planted 3%% slow-down")
    parser.add_argument("--blocks", type=int, default=20, help="A/A comparisons one block after the other")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing new after so long")
    parser.add_argument("--output", type=Path, default=Path("bench/results/measurement.json"))
    parser.add_argument("--neighbour", choices=list(NEIGHBOURS), default="none", help="what else the machine does")
    options = parser.parse_args()
    here = this_machine().summary
    empty = {"machine": here, "same": [], "slow": [], "blocks_same": [], "racing_s": 0.0, "model_s": 0.0}
    seen = json.loads(options.output.read_text())["seen"] if options.output.exists() else empty
    if seen["machine"] != here:
        parser.error(f"{options.output} was measured on {seen['machine']}: choose another --output")
    wanted = {"same": options.races, "slow": options.planted, "blocks_same": options.blocks}
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder, neighbour(options.neighbour):
        path = Path(folder) / "stack.py"
        path.write_text(WORKLOAD)
        target = find_target(str(path))
        while time.monotonic() < end and any(len(seen[kind]) < count for kind, count in wanted.items()):
            # whichever is furthest behind, so that an unfinished measurement is one of all three
            kind = min((kind for kind in wanted if wanted[kind]), key=lambda kind: len(seen[kind]) / wanted[kind])
            if kind == "blocks_same":
                seen[kind].append(blocks(target, SAME, 1.5))
            else:
                source = SAME if kind == "same" else SLOW
                trial, racing, model = one_race(target, source, len(seen[kind]))
                found = trial.speedup or Interval(math.nan, -math.inf, math.inf)
                numbers = [
                    round(value, 4) if math.isfinite(value) else None
                    for value in (found.estimate, found.low, found.high)
                ]
                seen[kind].append([*numbers, trial.processes, trial.rounds])
                seen["racing_s"], seen["model_s"] = seen["racing_s"] + racing, seen["model_s"] + model
            said = "" if kind == "blocks_same" else word(seen[kind][-1])
            print(f"{kind} {len(seen[kind])}/{wanted[kind]}: {said} {seen[kind][-1]}", flush=True)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps({**summary(seen), "seen": seen}, indent=1) + "\n")
    print(json.dumps(summary(seen), indent=1))


def word(found: list) -> str:
    """The verdict on a race in `seen`."""
    return verdict(None if None in found[:3] else Interval(*found[:3]), RULES.indifference)


def summary(seen: dict) -> dict:
    """What the bars speak of. A race in `seen` is its speed-up, its interval, processes and rounds."""
    words = {kind: [word(found) for found in seen[kind]] for kind in ("same", "slow")}
    return {
        "machine": seen["machine"],
        "aa_races": len(words["same"]),
        "aa_claimed_different (bar: at most 5%)": sum(word in ("faster", "slower") for word in words["same"]),
        "aa_verdicts": dict(Counter(words["same"])),
        "planted_races": len(words["slow"]),
        "planted_found (bar: at least 90%)": words["slow"].count("slower"),
        "planted_verdicts": dict(Counter(words["slow"])),
        "blocks_aa": len(seen["blocks_same"]),
        "blocks_aa_claimed_different": sum(seen["blocks_same"]),
        "racing_over_model_time (bar: at most 1.10)": round(seen["racing_s"] / max(seen["model_s"], 1e-9), 4),
    }


if __name__ == "__main__":
    main()
