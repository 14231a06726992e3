"""What does a race cost beyond the model's own calls, before a change and after it? Two source trees, in one run.

Each pair races the same two recipes of the same workload once with either tree, in random order, so that both see the
same machine: the ratio is that of the pairs, with its interval. What is compared is the time until a process is ready,
and what a slice takes beyond the seconds that it is to last.

    python bench/race_overhead.py ../before/src src --pairs 12

OLD and NEW are folders that hold `fettle`, such as the `src` of a worktree of another commit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORKLOAD = """
import torch

def model(x):
    return x @ x

def workload():
    torch.manual_seed(0)
    return model, [torch.randn(64, 64), torch.randn(64, 64)]
"""
SAME = "def optimize(model, batches):\n    return model\n"
SLICE_S = 0.02
MEASURES = {"ready_s": "until both processes are ready", "slice_s": "of a slice beyond its seconds"}


def once(rounds: int) -> dict[str, float]:
    """One race with the `fettle` that is imported: seconds until it is ready, and seconds a slice beyond its own."""
    import dataclasses
    import inspect

    import msgspec

    from fettle import measure
    from fettle.recipe import Recipe
    from fettle.workload import find_target

    candidate = getattr(measure, "Candidate", None) or measure.Entry  # as earlier trees call it
    names = inspect.signature(measure.race).parameters
    ends: list[float] = []

    def heard(progress: measure.Progress) -> None:
        if (getattr(progress, "stage", "") or progress.doing).startswith("round"):  # earlier trees have a stage
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.py"
        path.write_text(WORKLOAD)
        target = find_target(str(path))
        candidates = [candidate(Recipe(), SAME), candidate(Recipe({"technique": "other"}), SAME)]
        fields = {one.name for one in dataclasses.fields(measure.Rules)}
        how = {"equal_rounds": rounds, "may_go_first": False, "under_load": True}
        if "equal_rounds" not in fields:
            how = {"max_rounds": rounds, "indifference": 0.0}  # of an earlier tree: two alike are never told apart
        rules = measure.Rules(slice_s=SLICE_S, **how)
        began = time.perf_counter()
        measure.race(
            target if "Target" in str(names["target"].annotation) else msgspec.to_builtins(target), "", candidates,
            measure.Judge(), rules, **{"on_progress" if "on_progress" in names else "tell": heard},
        )  # fmt: skip
    slices = 2 * (len(ends) - 1)
    return {"ready_s": ends[0] - began, "slice_s": (ends[-1] - ends[0]) / slices - SLICE_S}


def in_tree(tree: Path, rounds: int) -> dict[str, float]:
    """The same in a process that imports `fettle` from this tree."""
    code = f"import json, race_overhead; print('figures', json.dumps(race_overhead.once({rounds})))"
    paths = os.pathsep.join([str(tree.resolve()), str(Path(__file__).resolve().parent)])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{tree}: {done.stderr.strip()[-500:]}")
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("figures")).split(" ", 1)[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each race")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    trees = {"old": options.old, "new": options.new}
    for tree in trees.values():
        if not (tree / "fettle").is_dir():
            parser.error(f"{tree} holds no package fettle")

    from fettle.machine import this_machine
    from fettle.measure import log_interval

    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(options.pairs):
        for name in random.Random(number).sample(list(trees), 2):
            found[name].append(in_tree(trees[name], options.rounds))
        print(f"pair {number + 1} of {options.pairs}", found["old"][-1], found["new"][-1], flush=True)
    ratios = {}
    for key, words in MEASURES.items():
        pairs = [(old[key], new[key]) for old, new in zip(found["old"], found["new"], strict=True)]
        logs = [math.log(new / old) for old, new in pairs if old > 0 and new > 0]
        interval = log_interval(logs, 0.05)
        ratios[key] = [math.exp(value) for value in (interval.estimate, interval.low, interval.high)]
        print(
            f"{words}: new / old {ratios[key][0]:.3f} [{ratios[key][1]:.3f}, {ratios[key][2]:.3f}], {len(logs)} pairs"
        )
    if options.output is not None:
        machine = this_machine().summary
        options.output.write_text(json.dumps({"machine": machine, "ratios": ratios, "races": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
