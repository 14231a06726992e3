"""Is the found setting the best, and was its capacity known before it was tested?

    python bench/slo_search.py minilm resnet50 yolos --json bench/results/slo_search.json    # 3 to 5 minutes a model
    python bench/slo_search.py minilm --grid --json bench/results/slo_search.json            # every setting by load

For each model the search runs as `fettle serve slo` does. Shown: the predicted capacity under the limit over the
measured one (bar: within 10%), and with --grid the found setting's capacity over the best of an exhaustive grid (bar:
97%) and the search's share of the grid's test time (bar: 20%). The machine's speed drifts while a grid is measured, so
the found setting and the grid's best are measured again in turn, and the geometric mean of their ratios counts: a
capacity is known in steps of 5%. Predictions rest on calibrated costs and on overheads that were measured.

Results are merged into the JSON file, and a grid goes on where it was: it stops after --minutes, and the same command
continues it. The server has the first core, the client the second: a machine has two at least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fettle.files import write_text
from fettle.loop import run
from fettle.machine import this_machine
from fettle.package.export import write_package
from fettle.package.manifest import Package
from fettle.package.settings import ServeSettings
from fettle.recipe import Recipe
from fettle.slo.points import Measured, Point, SearchResult, Setting
from fettle.slo.proof import prove
from fettle.slo.ranking import rank
from fettle.slo.search import search
from fettle.workload import Workload, find_target

WORKLOADS = Path(__file__).parents[1] / "workloads"
LIMITS = {"minilm": 0.1, "resnet50": 0.1, "digits": 0.02, "yolos": 0.1}
"""Seconds."""
TURNS = 5
"""How often the found setting and the grid's best are measured again, one after the other."""
RECIPES = {"resnet50": "runtime=openvino-int8", "yolos": "runtime=openvino-bf16"}
"""What a tuned package of the model holds; a lone core would take longer than the limit for two rows as given."""


def yolos() -> Workload:
    """A detection model of transformers, built as YOLOS-tiny is (Fang et al. 2021): weights by chance, 224 x 224."""
    from transformers import YolosConfig, YolosForObjectDetection

    config = YolosConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=[224, 224],
        num_detection_tokens=100,
    )  # fmt: skip
    torch.manual_seed(0)
    batches = [{"pixel_values": torch.randn(4, 3, 224, 224)} for _ in range(2)]
    return Workload(YolosForObjectDetection(config).eval(), batches, name="yolos")


class Pinned(subprocess.Popen):  # type: ignore[type-arg]
    """A process on the server's core: affinity is inherited from whoever starts it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        ours = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(EVERY)})
        try:
            super().__init__(*given, **named)
        finally:
            os.sched_setaffinity(0, ours)


EVERY = os.sched_getaffinity(0)


async def one(package: Package, row: dict[str, Any], limit_s: float, seconds: float, save: Any) -> None:
    """The search. What a grid has found before stays in the row."""
    began = time.perf_counter()
    first: list[str] = []

    def on_progress(text: str) -> None:
        print(text, flush=True)
        if text.startswith("load tests of") and not first:  # what was predicted before any load test
            first.extend(text.partition(" · ")[0].removeprefix("load tests of ").rsplit(", predicted ", 1))

    found = await search(package, limit_s, most_rows=8, cores=1, seconds=seconds, on_progress=on_progress)
    took = time.perf_counter() - began
    best = found.best
    for key in [key for key in row if not key.startswith("grid")]:
        del row[key]
    row |= {"why": found.why, "seconds": took}
    if best is None or not best.measured:
        return
    row |= {
        "setting": str(best.setting), "place": place(best.setting),
        "predicted": best.predicted, "measured": best.measured,
        "predicted_over_measured": best.predicted / best.measured, "before_any_test": before(first, found),
        "tests": found.tests,
        "test_seconds": sum(test.run["duration_s"] for point in found.points for test in point.tests),
        "limit_ms": limit_s * 1e3,
        "curves_ms": {str(m.branch): dict(zip(m.costs.curve.rows, (1e3 * s for s in m.costs.curve.seconds),
                                              strict=True)) for m in found.branches.values()},
        "overheads": {str(m.branch): around(m) for m in found.branches.values() if m.overheads is not None},
        "failures": [f"{failure.what}: {failure.why}" for failure in found.failures],
    }  # fmt: skip
    save()


async def grid(package: Package, row: dict[str, Any], limit_s: float, seconds: float, until: float, save: Any) -> None:
    """Every setting by load tests, but for those of `row` already; then the found one against the best of them."""
    found = await search(package, limit_s, most_rows=8, cores=1, seconds=seconds, confirm=0)
    every: dict[str, dict[str, float]] = row.setdefault("grid", {})
    points = rank(found.branches.values(), limit_s)
    for point in points:
        name = place(point.setting)
        if name not in every and time.monotonic() < until:
            point.predicted = max(point.predicted, 1.0)
            done = await measured(package, point, found.branches[point.setting.branch], limit_s, seconds)
            spent = sum(test.run["duration_s"] for test in done.tests)
            every[name] = {"capacity": done.measured or 0.0, "test_seconds": spent}
            print(name, every[name], flush=True)
            save()
    if len(every) < len(points):
        print(f"{len(points) - len(every)} settings are left: run the same command again")
        return
    best = max(every, key=lambda name: every[name]["capacity"])
    row["grid_best"], row["grid_best_place"] = every[best]["capacity"], best
    row["grid_test_seconds"] = sum(item["test_seconds"] for item in every.values())
    if row.get("test_seconds"):
        row["share_of_the_grids_test_time"] = row["test_seconds"] / row["grid_test_seconds"]
    mine = row.get("place", "")
    if mine not in every:
        print("run the search first: nothing was found that could be compared with the grid's best")
        return
    there = {place(point.setting): point for point in points}
    turns: list[dict[str, float]] = []
    for number in range(TURNS if mine != best else 0):
        turn = {}
        for name in (mine, best) if number % 2 else (best, mine):
            point = Point(there[name].setting, every[name]["capacity"])
            branch = found.branches[point.setting.branch]
            done = await measured(package, point, branch, limit_s, seconds, point.predicted)
            turn[name] = done.measured or 0.0
        turns.append(turn)
        print(turn, flush=True)
    row["turns"] = turns
    ratios = [turn[mine] / turn[best] for turn in turns if turn[best]]
    row["found_over_grid_best"] = 1.0 if mine == best else statistics.geometric_mean(ratios) if ratios else None


def place(setting: Setting) -> str:
    """A setting's name in the grid. Its delay is a part of a calibrated call, and a little another one each time."""
    return str(replace(setting, delay_s=0.0)) + (", delay" if setting.delay_s else "")


def before(first: list[str], found: SearchResult) -> dict[str, Any]:
    """The first setting that was tested: predicted before any load test, and what the tests then gave.

    Rates up to `measured` kept the limit, `failed` did not: the capacity lies between. Calls of the model took `slower`
    times as long in its tests as when they were calibrated; with that the prediction is `predicted_as_slow`.
    """
    predicted = float(first[1].split()[0])
    point = next(point for point in found.points if str(point.setting) == first[0])
    ratio = predicted / point.measured if point.measured else None
    failed = min((test.rate for test in point.tests if not test.held), default=None)
    slower = statistics.median(test.slower for test in point.tests if test.slower)
    as_slow = rank([replace(found.branches[point.setting.branch], scale=slower)], found.limit_s)
    return {
        "setting": first[0], "predicted": predicted, "measured": point.measured, "ratio": ratio, "failed": failed,
        "slower": slower,
        "predicted_as_slow": next(p.predicted for p in as_slow if place(p.setting) == place(point.setting)),
    }  # fmt: skip


def around(measured: Measured) -> dict[str, float]:
    """What serving adds, in milliseconds, as measured with this branch."""
    costs = measured.costs
    return {"request_ms": costs.request_s * 1e3, "batch_ms": costs.batch_s * 1e3, "held_ms": costs.held_s * 1e3}


async def measured(
    package: Package, point: Point, branch: Measured, limit_s: float, seconds: float, expected: float | None = None
) -> Point:
    """The point with its capacity by load tests, fewer where one is expected."""
    await prove(package, point, branch.costs, SearchResult(limit_s), seconds, expected=expected)
    return point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help=", ".join(LIMITS))
    parser.add_argument("--recipe", help="levels for all of them, instead of each model's own")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a load test, at least")
    parser.add_argument("--grid", action="store_true")
    parser.add_argument("--minutes", type=float, default=8.0, help="of a grid: no new setting after that")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if len(EVERY) < 2:
        parser.error("one core is not enough: the server and the client need one each")
    os.sched_setaffinity(0, {max(EVERY)})
    subprocess.Popen = Pinned  # type: ignore[misc]
    torch.set_num_threads(1)
    results: dict[str, Any] = {"models": {}}
    if options.json and options.json.is_file():
        results = json.loads(options.json.read_text())
    results["machine"] = this_machine().summary
    until = time.monotonic() + 60 * options.minutes

    def save() -> None:
        if options.json:
            write_text(options.json, json.dumps(results, indent=1) + "\n")

    for name in options.models:
        with tempfile.TemporaryDirectory() as scratch:
            work = yolos() if name == "yolos" else find_target(str(WORKLOADS / f"{name}.py")).load()
            recipe = Recipe.parse(options.recipe or RECIPES.get(name, "grad=inference_mode"))
            package = write_package(work, recipe, Path(scratch) / name, name=name, settings=ServeSettings(max_rows=8))
            limit_s = LIMITS.get(name, 0.1)
            row = results["models"].setdefault(name, {})
            if options.grid:
                run(grid(package, row, limit_s, options.seconds, until, save))
            else:
                run(one(package, row, limit_s, options.seconds, save))
            row["recipe"] = str(recipe)
        save()
        print(json.dumps({name: row}, indent=1))


if __name__ == "__main__":
    main()
