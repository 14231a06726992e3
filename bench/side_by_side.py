"""What do searches save by importing the compiler once and compiling side by side, and what does it do to the start-up?

Recipes that compile are started on models of ``atlas_models.py``, each time with an empty compile cache: as processes
that start by themselves, as forks of one that has imported torch's compiler, and as such forks side by side.

    python bench/side_by_side.py --json bench/results/side_by_side.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fettle.files import for_compilers
from fettle.machine import this_machine
from fettle.measure import Candidate, Judge, Rules, Worker, close_all, fork_server, messages, race
from fettle.recipe import Recipe
from fettle.techniques import environment, imports_of, source
from fettle.workload import find_target

HERE = Path(__file__).parent
RECIPES = ("compile=default", "compile=default grad=inference_mode", "compile=default freeze=on grad=inference_mode",
           "compile=default grad=inference_mode quantize=int8-dynamic")  # fmt: skip
WAYS = ("by themselves", "forks", "side by side")


def started(model: str, way: str) -> dict[str, Any]:
    """One race of two rounds."""
    target = find_target(f"{HERE / 'atlas_models.py'}:{model}")
    with Worker() as worker:
        built = worker.ask(messages.Build(target), messages.Built, 300)
        facts = worker.ask(messages.Probe(), messages.Probed, 300).facts
    recipes = [Recipe(), *map(Recipe.parse, RECIPES)]
    candidates = [Candidate(recipe, source(recipe, facts), environment(recipe, facts), imports=imports_of(recipe))
                  for recipe in recipes]  # fmt: skip
    rules = Rules(equal_rounds=2, max_rounds=2, abreast=2, judges_abreast="all" if way == "side by side" else "none")
    with tempfile.TemporaryDirectory() as folder:
        variables = {"TORCHINDUCTOR_CACHE_DIR": for_compilers(Path(folder))}
        began = time.monotonic()
        try:
            trials = race(replace(target, mode=built.mode), built.fingerprint, candidates, Judge(), rules,
                          environment=variables,
                          forks=None if way == "by themselves" else fork_server(variables, built.imports))  # fmt: skip
        finally:
            close_all()
    return {
        "model": model, "way": way, "seconds": time.monotonic() - began,
        "startup_s": {str(trial.recipe): round(trial.startup.total_s, 2) for trial in trials},
        "peak_mib": {str(trial.recipe): round((trial.peak_bytes or 0) / 2**20) for trial in trials},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ranker", "encoder", "graph"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    races = []
    for turn, model in enumerate(options.models):
        for way in (*WAYS[turn % 3 :], *WAYS[: turn % 3]):
            races.append(started(model, way))
            print(json.dumps(races[-1]), flush=True)
            if options.json:
                options.json.write_text(
                    json.dumps({"machine": this_machine().summary, "races": races}, indent=1) + "\n"
                )


if __name__ == "__main__":
    main()
