"""Is the found setting the best, and was its capacity known before it was tested?

    python bench/slo_search.py --models minilm --json bench/results/slo_search.json     # about 3 minutes a model
    python bench/slo_search.py --models minilm,resnet50 --grid                          # every setting by load: long

For each model the search runs as `fettle slo` does. Shown: the predicted capacity under the limit over the measured
one (bar: within 10%), greedy against curve-aware batching of the same crew by load tests in the same run, and with
--grid the found setting's capacity over the best of an exhaustive grid (bar: 97%) and the search's share of the grid's
test time (bar: 20%). Predictions rest on calibrated costs and on overheads that were measured. The client shares the
machine with the server, so one core is left to it (`--cores`): where it was late all the same, a capacity
is a lower bound.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fettle.machine import this_machine
from fettle.recipe import Recipe
from fettle.serve.export import write_package
from fettle.serve.host import cores
from fettle.serve.package import Package, ServeSettings
from fettle.serve.search import Found, Measured, Point, prove, rank, search
from fettle.workload import find_target

WORKLOADS = Path(__file__).parents[1] / "workloads"
LIMITS = {"minilm": 0.1, "resnet50": 0.4, "digits": 0.02}


async def one(package: Package, limit_s: float, seconds: float, grid: bool, count: int) -> dict[str, Any]:
    """The search, the pair of policies, and the grid where it is asked for."""
    began = time.perf_counter()
    first: list[str] = []

    def tell(text: str) -> None:
        print(text)
        if text.startswith("load tests of") and not first:  # what was predicted before any load test
            first.extend(text.removeprefix("load tests of ").rsplit(", predicted ", 1))

    found = await search(package, limit_s, most_rows=8, cores=count, seconds=seconds, tell=tell)
    took = time.perf_counter() - began
    best = found.best
    if best is None or not best.measured:
        return {"why": found.why, "seconds": took}
    branch = found.branches[best.setting.branch]
    pair = {}
    for policy in ("greedy", "curve"):
        setting = replace(best.setting, policy=policy)
        pair[policy] = await measured(package, Point(setting, best.measured), branch, limit_s, seconds)
    row: dict[str, Any] = {
        "setting": str(best.setting), "predicted": best.predicted, "measured": best.measured,
        "predicted_over_measured": best.predicted / best.measured, "before_any_test": before(first, found),
        "greedy": pair["greedy"], "curve": pair["curve"],
        "why": found.why, "tests": found.tests, "seconds": took, "limit_ms": limit_s * 1e3,
        "overheads": {str(m.branch): vars_of(m) for m in found.branches.values() if m.overheads is not None},
        "failures": [f"{failure.what}: {failure.why}" for failure in found.failures],
    }  # fmt: skip
    if grid:
        began, every = time.perf_counter(), []
        for point in rank(found.branches.values(), limit_s):
            if point.predicted:
                every.append(await measured(package, point, found.branches[point.setting.branch], limit_s, seconds))
                print(point.setting, every[-1])
        row["grid_best"], row["grid_seconds"] = max(every), time.perf_counter() - began
    return row


def before(first: list[str], found: Found) -> dict[str, Any]:
    """The first setting that was tested: predicted before any load test, and what the tests then gave."""
    predicted = float(first[1].split()[0])
    point = next(point for point in found.points if str(point.setting) == first[0])
    ratio = predicted / point.measured if point.measured else None
    return {"setting": first[0], "predicted": predicted, "measured": point.measured, "ratio": ratio}


def vars_of(measured: Measured) -> dict[str, float]:
    """What serving adds, in milliseconds, as measured with this branch."""
    return {"request_ms": measured.costs.request_s * 1e3, "batch_ms": measured.costs.batch_s * 1e3}


async def measured(package: Package, point: Point, branch: Measured, limit_s: float, seconds: float) -> float:
    """Capacity by load tests."""
    await prove(package, point, branch.costs, Found(limit_s, 0.0), seconds)
    return point.measured or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="minilm,resnet50")
    parser.add_argument("--recipe", default="grad=inference_mode", help="levels for all of them")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a load test, at least")
    parser.add_argument("--cores", type=int, default=max(1, cores() - 1), help="for the server; one is the client's")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": this_machine().summary, "models": {}}
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            work = find_target(str(WORKLOADS / f"{name}.py")).load()
            recipe = Recipe.parse(options.recipe)
            package = write_package(work, recipe, Path(scratch) / name, name=name, settings=ServeSettings(max_rows=8))
            row = asyncio.run(one(package, LIMITS.get(name, 0.1), options.seconds, options.grid, options.cores))
        results["models"][name] = row
        print(json.dumps({name: row}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
