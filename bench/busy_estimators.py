"""What tells, beside a neighbour, how long a call takes without one? Estimators of one slice against the quiet time.

For each model and neighbour of `busy.py`, in slices as a race takes them:

- elapsed: the median call, as it was
- lowest tenth: the tenth percentile of the calls
- cpu time: CPU time of all threads over their number
- less waiting: elapsed time less what all threads waited for a core (`without_waits`), as beside one neighbour
- less one's waiting: less what the thread waited that waited longest, as under a quota, which stops all at once
- as if by chance: the time in which no thread waits, where each waits whatever the others do, as beside several
- as a pool: what each thread that computes ran, as where the one that calls leaves them the work
- held apart: each of these with each computing thread on a core of its own
- going first: with the highest priority; `less waiting` of it is what a race goes by

    python bench/busy_estimators.py             # five minutes; nothing else may run meanwhile
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from busy import HERE, NEIGHBOURS, _join, neighbour, others, quota

from fettle.applying import apply
from fettle.machine import this_machine
from fettle.measure._priority import HIGHEST, READY, may_go_first, prefer
from fettle.measure._waits import Waits, busiest, held_up_ns, one_core_each, ran_ns, waited_ns, without_waits
from fettle.recipe import Recipe

MODELS = ("t5", "resnet", "mlp", *(f"{name} runtime=openvino" for name in ("t5", "resnet", "mlp", "distilbert")))
"""Models of `busy_workloads.py`, as given and by a recipe."""
SLICE_S = 0.12
TWO = "two busy processes"
LESS = {"less waiting": {}, "less one's waiting": {"at_once": True}, "as if by chance": {"neighbours": 2}}
"""What is taken out (`held_up_ns`)."""


def slices(run, threads, waits, seconds: float, *, apart: bool = False, first: bool = False) -> list[dict[str, float]]:
    """What each estimator says in each slice, in ms."""
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if first:
            prefer(os.getpid(), HIGHEST)
        with one_core_each(threads if apart else ()):
            run()
            calls, looks, cpu_ns, began = [], [], time.process_time_ns(), time.perf_counter()
            while not calls or time.perf_counter() - began < SLICE_S:
                before, start = waits.by_thread(), time.perf_counter_ns()
                run()
                ns = time.perf_counter_ns() - start
                calls.append(ns)
                after = waits.by_thread()
                looks.append((ns, waited_ns(before, after), ran_ns(before, after, threads)))
            cpu_ns = time.process_time_ns() - cpu_ns
        if first:
            prefer(os.getpid(), READY)
        found.append({
            "elapsed": statistics.median(calls) / 1e6,
            "lowest tenth": sorted(calls)[len(calls) // 10] / 1e6,
            "cpu time": cpu_ns / len(calls) / len(threads) / 1e6,
            **{name: _less([(ns, held_up_ns(ns, waited, **how)) for ns, waited, _ in looks])
               for name, how in LESS.items()},
            "as a pool": _less([(ns, held_up_ns(ns, waited, ran=ran)) for ns, waited, ran in looks]),
        })  # fmt: skip
        time.sleep(0.05)
    return found


def _less(held_up: list[tuple[int, int]]) -> float:
    return without_waits([(1, ns, each) for ns, each in held_up]) / 1e6


@contextlib.contextmanager
def beside(kind: str) -> Iterator[None]:
    """A neighbour, two of them, or a quota, under which this process is until the block ends."""
    with contextlib.ExitStack() as ends:
        if processes := ends.enter_context(quota(kind)):
            ends.callback(_join, processes.parent.parent / processes.name)
            _join(processes)
        else:
            for _ in range(2 if kind == TWO else 1):
                ends.enter_context(neighbour("busy" if kind == TWO else kind))
        yield


def prepared(case: str) -> Callable[[], object]:
    """A call of a model of `busy_workloads.py`, as given or by a recipe."""
    sys.path.insert(0, str(HERE))
    import busy_workloads

    name, _, recipe = case.partition(" ")
    module, batches = getattr(busy_workloads, name)()
    batch = batches[0]
    call = apply(module, Recipe.parse(recipe), [batch]) if recipe else module
    return lambda: call(**batch) if isinstance(batch, dict) else call(batch)


def measure(model: str, kinds: list[str], seconds: float) -> dict[str, dict[str, float | None]]:
    """Median over the slices of each estimator over the quiet median, by neighbour."""
    run, waits = prepared(model), Waits()
    with torch.inference_mode():
        run()
        waits.refresh()
        before = waits.by_thread()
        run()
        threads = busiest(before, waits.by_thread())
        rows, ways = {}, {"": {}, "held apart, ": {"apart": True}}
        if may_go_first():
            ways["going first, "] = {"first": True}
        for kind in kinds:
            quiet = statistics.median(one["elapsed"] for one in slices(run, threads, waits, seconds))  # hosts change
            with beside(kind):
                found = {way: slices(run, threads, waits, seconds, **how) for way, how in ways.items()}
            columns = {way + name: [one[name] for one in each] for way, each in found.items() for name in each[0]}
            rows[kind] = {name: _over(values, quiet) for name, values in columns.items()}
            print(model, kind, rows[kind], flush=True)
    return rows


def _over(values: list[float], quiet: float) -> float | None:
    told = [value for value in values if value == value]
    return round(statistics.median(told) / quiet, 3) if 2 * len(told) > len(values) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="in this process; without, each in one of its own")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each estimator's slices")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "busy_estimators.json")
    options = parser.parse_args()
    kinds = [*(kind for kind in NEIGHBOURS if "bursts" not in kind and kind != "none"), TWO]
    if options.model is not None:
        options.output.write_text(json.dumps(measure(options.model, kinds, options.seconds)))
        return
    found = {}
    for model in MODELS:
        if (load := others().others) > 0.1:
            parser.error(f"others have {load:.0%} of the cores: nothing is measured")
        part = options.output.with_suffix(f".{model.replace(' ', '-')}")
        # A session of its own, as a worker has: priorities count within one.
        command = [sys.executable, __file__, "--model", model, "--seconds", str(options.seconds), "--output", str(part)]
        subprocess.run(command, check=True, start_new_session=True)
        found[model] = json.loads(part.read_text())
        part.unlink()
    options.output.write_text(json.dumps({"machine": this_machine().summary, "over_quiet": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
