"""Is the winner the same, and its figure honest, whatever else the machine does?

For each model a study on the quiet machine, then one beside each neighbour, which this benchmark starts and stops
itself; what was announced is raced against the quiet study's winner at once afterwards, on the quiet machine again.

    python bench/busy.py --minutes 9            # goes on from the JSON that it left
    python bench/busy.py --show                 # the table
    python bench/busy.py --polite --output F    # as for a user whose slices may not go before others' work

Nothing else may run meanwhile: where somebody else has the cores a piece is not begun, and a quiet study made again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from fettle.comparing import bench
from fettle.machine import this_machine
from fettle.measure import Load
from fettle.measure._watch import Watch
from fettle.procs.parent import die_with_parent
from fettle.recipe import Recipe
from fettle.result import Limits

MODELS = ("t5", "distilbert", "resnet", "mlp", "swin", "unet")
BUDGETS_S = (180, 300)
RACE_S = 150
"""Time for a race on the quiet machine: starting its processes takes a minute of it, and what is left must do for more
than the fewest rounds."""
_BUSY = "while True: pass"
_BURSTS = """
import time
while True:
    end = time.monotonic() + 20
    while time.monotonic() < end: pass
    time.sleep(15)
"""
_LOWEST = "import os; os.nice(19)\n"
_HOG = "import numpy as np\na = np.ones(1 << 26); b = np.empty_like(a)\nwhile True: np.copyto(b, a)"
NEIGHBOURS = {
    "none": "",
    "busy": _BUSY,
    "bursts": _BURSTS,
    "busy, lowest priority": _LOWEST + _BUSY,
    "bursts, lowest priority": _LOWEST + _BURSTS,
    "memory": _HOG,
    "quota of 1.5 cores": "",
}
HERE = Path(__file__).parent


@contextlib.contextmanager
def neighbour(name: str) -> Iterator[None]:
    """The neighbour, in a session of its own as another user's process is; it ends with this process in any case."""
    code = NEIGHBOURS[name]
    if not code:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, preexec_fn=die_with_parent)
    try:
        time.sleep(1.0)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def quota(name: str) -> Iterator[Path | None]:
    """A cgroup with one and a half cores, where groups may be written; its file of processes."""
    if not name.startswith("quota"):
        yield None
        return
    first, second = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    group = (first if first.is_dir() else second) / f"fettle-busy-{os.getpid()}"
    group.mkdir()
    try:
        if first.is_dir():
            (group / "cpu.cfs_period_us").write_text("100000")
            (group / "cpu.cfs_quota_us").write_text("150000")
        else:
            (group / "cpu.max").write_text("150000 100000")
        yield group / "cgroup.procs"
    finally:
        for process in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (group.parent / "cgroup.procs").write_text(process)
        for _ in range(50):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def others(seconds: float = 2.0) -> Load:
    """What others have of the machine now."""
    watch = Watch()
    for _ in range(max(1, round(seconds / 0.5))):
        time.sleep(0.5)
        watch.mark()
    return watch.load()


def study(model: str, budget_s: int, name: str, extra: list[str]) -> dict | None:
    """One study as a user runs it, beside a neighbour: what it announced."""
    with tempfile.TemporaryDirectory() as folder, quota(name) as processes, neighbour(name):
        command = [sys.executable, "-m", "fettle", "tune", f"{HERE / 'busy_workloads.py'}:{model}",
                   "--budget", f"{budget_s}s", "--output", folder, *extra]  # fmt: skip
        began = time.monotonic()
        with (Path(folder) / "progress.txt").open("w") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True,
                                   preexec_fn=None if processes is None else lambda: _join(processes))  # fmt: skip
            try:
                run.wait(timeout=2.5 * budget_s)
            except subprocess.TimeoutExpired:
                return {"failed": "it did not end"}
            finally:  # the study does not outlive this benchmark: it would be the next one's neighbour
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)
        path = Path(folder) / "result.json"
        if not path.exists():
            return {"failed": (Path(folder) / "progress.txt").read_text()[-500:]}
        result = json.loads(path.read_text())
    winner = result["winner"]
    return {
        "recipe": " ".join(f"{key}={value}" for key, value in winner["recipe"].items()) if winner else "",
        "verdict": result["verdict"],
        "speedup": winner["speedup"] if winner else None,
        "elapsed_speedup": winner["elapsed_speedup"] if winner else None,
        "quiet": winner["is_quiet"] if winner else None,
        "load": winner["load"] if winner else None,
        "time_ms": winner["time_ms"] if winner else None,
        "trials": len(result["trials"]),
        "seconds": round(time.monotonic() - began),
    }


def _join(processes: Path) -> None:
    processes.write_text(str(os.getpid()))


def quiet_race(model: str, recipes: list[str]) -> dict[str, list[float]]:
    """Speed-ups over the model as given on the quiet machine, of all in one race."""
    named = [Recipe.parse(text) for text in recipes]
    found = bench(f"{HERE / 'busy_workloads.py'}:{model}", named, limits=Limits(max_error=None), max_rounds=20,
                  settle=False, budget_s=RACE_S)  # fmt: skip
    return {
        text: [trial.speedup.estimate, trial.speedup.low, trial.speedup.high]
        for text, trial in zip(recipes, found.trials[1:], strict=True)
        if trial.speedup is not None
    }


def step(seen: dict, model: str, budget_s: int, name: str, number: int, extra: list[str]) -> None:
    """One study, then a race of its winner and the quiet study's: what is true in the same hour."""
    key = f"{model} {budget_s} {name} {number}"
    found = study(model, budget_s, name, extra)
    if name == "none" and others().others > 0.1:
        print("disturbed: made again later", flush=True)
        return
    quiet = seen["studies"].get(f"{model} {budget_s} none 0", {})
    recipes = list(dict.fromkeys(item["recipe"] for item in (found, quiet) if item.get("recipe")))
    if "failed" not in found and recipes:
        found["raced"] = quiet_race(model, recipes)
        seen["races"].setdefault(model, []).append(found["raced"])
    seen["studies"][key] = found
    print(key, {**found, "load": None, "elapsed_speedup": None}, flush=True)


def ratios(seen: dict, model: str, recipes: list[str]) -> list[list[float]]:
    """Speed-ups over the model as given of each race on the quiet machine that held all of these recipes."""
    races = seen["races"].get(model, [])
    return [[race[recipe][0] for recipe in recipes] for race in races if all(recipe in race for recipe in recipes)]


def quiet_ratio(seen: dict, model: str, recipe: str) -> float:
    """The recipe's speed-up on the quiet machine: the geometric mean over all races that held it."""
    found = [values[0] for values in ratios(seen, model, [recipe])]
    return statistics.geometric_mean(found) if found else math.nan


def behind(seen: dict, model: str, recipe: str, best: str | None) -> float:
    """How far the recipe is behind the best on the quiet machine, from the races that held both; 0 where it leads.
    Empty: the model as given. None: no quiet study has told the best."""
    if recipe == best:
        return 0.0
    if best is None:
        return math.nan
    if not recipe:
        return quiet_ratio(seen, model, best) - 1
    if not best:
        ratio = quiet_ratio(seen, model, recipe)
        return max(0.0, 1 / ratio - 1) if ratio > 0 else math.nan
    found = [there / here for here, there in ratios(seen, model, [recipe, best])]
    return max(0.0, statistics.geometric_mean(found) - 1) if found else math.nan


def summary(seen: dict) -> list[dict]:
    """By neighbour: how far the announced winners are off, how often the interval holds, how often nothing is told."""
    rows = []
    for name in NEIGHBOURS:
        off, held, said_quiet, held_at_all, cannot_tell, of_its_hour = [], 0, 0, 0, 0, []
        for key, found in seen["studies"].items():
            model, budget_s, rest = key.split(" ", 2)
            if rest.rpartition(" ")[0] != name or "failed" in found:
                continue
            best = seen["studies"].get(f"{model} {budget_s} none 0", {}).get("recipe")
            off.append(behind(seen, model, found["recipe"], best))
            cannot_tell += found["verdict"] == "cannot tell"
            if found["speedup"] is not None and found["recipe"]:
                ratio = quiet_ratio(seen, model, found["recipe"])
                holds = found["speedup"]["low"] <= ratio <= found["speedup"]["high"]
                held_at_all += holds
                said_quiet += found["quiet"]
                held += found["quiet"] and holds
                if found["quiet"] and (raced := found.get("raced", {}).get(found["recipe"])):
                    of_its_hour.append(found["speedup"]["low"] <= raced[0] <= found["speedup"]["high"])
        if off:
            rows.append({
                "neighbour": name, "studies": len(off), "within 5%": sum(x <= 0.05 for x in off),
                "worst": round(max(off), 3), "said to be quiet": said_quiet, "of these the interval holds": held,
                "of all the interval holds": held_at_all, "cannot tell": cannot_tell,
                "quiet, raced in the same hour": len(of_its_hour), "interval holds that": sum(of_its_hour),
            })  # fmt: skip
    return rows


def save(seen: dict, path: Path) -> None:
    path.write_text(json.dumps({**seen, "summary": summary(seen)}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="begin nothing that would end later")
    parser.add_argument("--models", nargs="+", default=list(MODELS[:4]), choices=MODELS)
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS_S))
    parser.add_argument("--neighbours", nargs="+", default=list(NEIGHBOURS), choices=list(NEIGHBOURS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--races", type=int, default=0, help="race each quiet winner this often on the quiet machine")
    parser.add_argument("--polite", action="store_true", help="slices never go first, as where the system forbids it")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "busy.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the neighbour ends with this benchmark
    empty = {"machine": this_machine().summary, "races": {}, "studies": {}}
    seen = json.loads(options.output.read_text()) if options.output.exists() else empty
    if seen["machine"] != empty["machine"] and not options.show:
        parser.error(f"{options.output} is of {seen['machine']}: name another --output for {empty['machine']}")
    end = time.monotonic() + 60 * options.minutes
    order = [(number, budget_s, name, model) for number in range(options.repeats) for budget_s in options.budgets
             for name in options.neighbours for model in options.models]  # fmt: skip
    for number, budget_s, name, model in order:
        if options.show or f"{model} {budget_s} {name} {number}" in seen["studies"]:
            continue
        if time.monotonic() + 1.2 * budget_s + RACE_S > end:
            break
        load = others()
        if not math.isnan(load.others) and load.others > 0.1:
            print(f"others have {load.others:.0%} of the cores: nothing is measured", flush=True)
            break
        step(seen, model, budget_s, name, number, ["--polite"] * options.polite)
        save(seen, options.output)
    for model, budget_s in itertools.product(options.models, options.budgets):
        recipe = seen["studies"].get(f"{model} {budget_s} none 0", {}).get("recipe")
        while recipe and not options.show and len(ratios(seen, model, [recipe])) < options.races:
            if time.monotonic() + RACE_S > end or others().others > 0.1:
                break
            seen["races"].setdefault(model, []).append(quiet_race(model, [recipe]))
            print(model, seen["races"][model][-1], flush=True)
            save(seen, options.output)
    for row in summary(seen):
        print(row)


if __name__ == "__main__":
    main()
