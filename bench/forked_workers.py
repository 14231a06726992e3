"""Is a forked worker what one is that starts by itself, and what does it save?

The model as given runs in so many processes of both kinds, started in turn, in one interleaved race of equal rounds:
told are how much slower or faster forks are, how far the processes of each kind are from one another, their peaks of
memory, and what it took to start one and to build the workload in it.

    python bench/forked_workers.py --json bench/results/forked_workers.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fettle.machine import this_machine
from fettle.measure import Candidate, Judge, Rules, Trial, Worker, close_all, fork_server, log_times, messages, race
from fettle.recipe import Recipe
from fettle.techniques import source
from fettle.workload import find_target

HERE = Path(__file__).parent
_BY_ITSELF = {"FETTLE_BENCH": "another environment, which the forks do not serve"}


def compared(model: str, text: str, processes: int, rounds: int) -> dict[str, Any]:
    """One race."""
    target, recipe = find_target(f"{HERE / 'busy_workloads.py'}:{model}"), Recipe.parse(text)
    with Worker() as worker:
        built = worker.ask(messages.Build(target), messages.Built, 300)
        facts = worker.ask(messages.Probe(), messages.Probed, 300).facts
    lines = source(recipe, facts)
    candidates = [Candidate(recipe, lines, label=f"{kind} {number}", environment={} if kind == "fork" else _BY_ITSELF)
                  for number in range(processes) for kind in ("fork", "by itself")]  # fmt: skip
    rules = Rules(equal_rounds=rounds, max_rounds=rounds)
    try:
        trials = race(replace(target, mode=built.mode), built.fingerprint, candidates, Judge(), rules,
                      forks=fork_server({}, built.imports))  # fmt: skip
    finally:
        close_all()
    logs = [log_times(trial.slices, trial.samples) for trial in trials]
    both = sorted(set.intersection(*(set(log) for log in logs)))
    means = {number: statistics.fmean(log[number] for log in logs) for number in both}
    beside = [statistics.median(log[number] - means[number] for number in both) for log in logs]
    forks, others = beside[::2], beside[1::2]
    error = math.sqrt(sum(statistics.variance(kind) / len(kind) for kind in (forks, others)))
    return {
        "model": model, "recipe": text, "processes": processes, "rounds": len(both),
        "forks slower by": statistics.fmean(forks) - statistics.fmean(others), "standard error": error,
        "forks": of_kind(trials[::2], forks), "by themselves": of_kind(trials[1::2], others),
    }  # fmt: skip


def of_kind(trials: Sequence[Trial], beside: Sequence[float]) -> dict[str, float]:
    """The figures of one kind of processes, medians over them."""
    return {
        "ms": statistics.median(trial.time_ms for trial in trials),
        "spread": statistics.stdev(beside),
        "peak_mib": statistics.median((trial.peak_bytes or math.nan) / 2**20 for trial in trials),
        "ready_s": statistics.median(trial.start_s for trial in trials),
        "load_s": statistics.median(trial.startup.load_s for trial in trials),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["mlp", "resnet", "distilbert", "t5"])
    parser.add_argument("--recipe", default="")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    races = []
    for model in options.models:
        races.append(compared(model, options.recipe, options.processes, options.rounds))
        print(json.dumps(races[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"machine": this_machine().summary, "races": races}, indent=1) + "\n")


if __name__ == "__main__":
    main()
