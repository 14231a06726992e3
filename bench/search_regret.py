"""How good is `auto`, in how much of the time? The whole factorial of a small workload against the search.

    python bench/search_regret.py digits minilm lstm

The factorial is measured once, recipe by recipe beside the baseline; then `auto` runs as a user would run it, in an
empty folder. Both winners meet in one last race: the regret is the ratio of their times there.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tune_vs_peers import _tell, ratio

from fettle.comparing import bench
from fettle.machine import this_machine
from fettle.tuning import tune

HERE = Path(__file__).parent
LEVELS = {
    "grad": ["grad", "inference_mode"],
    "matmul": ["highest", "medium"],
    "precision": ["fp32", "bf16", "autocast-bf16"],
    "channels_last": ["off", "on"],
    "threads": ["as-given", "1"],
    "quantize": ["none", "int8-dynamic"],
    "compile": ["off", "default"],
    "freeze": ["off", "on"],
    "runtime": ["torch", "openvino-bf16", "onnxruntime"],
}
"""The factors of the factorial; all others stay as given."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", help="names of files in workloads/")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "search_regret.json")
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.workloads:
        results[name] = measure(name)
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        print(name, json.dumps(results[name]), flush=True)


def measure(name: str) -> dict:
    """Both searches and the last race of one workload."""
    from fettle.techniques import CATALOGUE

    target = str(HERE.parent / "workloads" / f"{name}.py")
    levels = {technique.name: LEVELS.get(technique.name, [technique.given]) for technique in CATALOGUE}
    del levels["mode"]  # a precondition where it matters
    found, seconds = {}, {}
    for design in ("auto", "factorial"):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as output:
            started = time.monotonic()
            found[design] = tune(
                target, techniques=_usable(levels, target), design=design, budget_s=None, output=output, tell=_tell
            )
            seconds[design] = time.monotonic() - started
            print(f"{name}: {design} took {seconds[design]:.0f} s, {len(found[design].trials)} trials: "
                  f"{found[design].recipe}", flush=True)  # fmt: skip
    recipes = [found["auto"].recipe, found["factorial"].recipe]
    regret: list | float | None = 1.0
    if recipes[0] != recipes[1]:
        compared = bench(target, recipes, max_rounds=20, settle=False)
        regret = ratio(compared.trials[1], compared.trials[2])
    return {
        "machine": this_machine().summary,
        "auto": str(recipes[0]),
        "factorial": str(recipes[1]),
        "auto_time_over_factorial_best": regret,
        "auto_trials": len(found["auto"].trials),
        "factorial_trials": len(found["factorial"].trials),
        "auto_s": round(seconds["auto"], 1),
        "factorial_s": round(seconds["factorial"], 1),
        "share_of_time": round(seconds["auto"] / seconds["factorial"], 4),
    }


def _usable(levels: dict, target: str) -> dict:
    """The levels that can be had for this workload: asking for others would be an error."""
    import msgspec

    from fettle.measure import Worker
    from fettle.techniques import Facts, find
    from fettle.workload import find_target

    with Worker() as worker:
        worker.ask("build", 600, target=msgspec.to_builtins(find_target(target)))
        facts = msgspec.convert(worker.ask("probe", 600)["facts"], Facts)
    return {
        name: [level.name for level in find(name).levels(facts) if level.name in wanted and not level.why_not]
        for name, wanted in levels.items()
    }


if __name__ == "__main__":
    main()
