"""What share of a race's time is spent looking at the machine, and not measuring?

A race of a model of 3 ms with itself, in which each look is timed: in the parent the machine's counters after each
slice and what they come to, in the workers those of their threads before, within and after a slice.

    python bench/watch_cost.py
"""

from __future__ import annotations

import argparse
import functools
import json
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fettle import measure
from fettle.machine import this_machine
from fettle.measure import _rounds, _watch
from fettle.recipe import Recipe
from fettle.workload import find_target

WORKLOAD = """
import functools, mmap, os, struct, time
from pathlib import Path

import torch

from fettle.measure import _state, _waits

places = {"_chunk": _state, "throttled_s": _state, "pages_fetched": _state, "without_waits": _state,
          "cpu_s": _state.State, "refresh": _waits.Waits, "by_thread": _waits.Waits}

def counted(look, spent, place):
    @functools.wraps(look)
    def timed(*args):
        began = time.perf_counter_ns()
        try:
            return look(*args)
        finally:
            before, = struct.unpack_from("q", spent, 8 * place)
            struct.pack_into("q", spent, 8 * place, before + time.perf_counter_ns() - began)
    return timed

def workload():
    with open(Path(__file__).with_name(f"{os.getpid()}.looks"), "w+b") as file:
        file.truncate(8 * len(places))
        spent = mmap.mmap(file.fileno(), 8 * len(places))
    for number, (name, place) in enumerate(places.items()):
        setattr(place, name, counted(getattr(place, name), spent, number))
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()) for _ in range(6)]
    return torch.nn.Sequential(*layers).eval(), [torch.randn(128, 512), torch.randn(128, 512)]
"""
IN_WORKER = ("_chunk", "throttled_s", "pages_fetched", "without_waits", "cpu_s", "refresh", "by_thread")
SAME = "def optimize(model, batches):\n    return model\n"


class Looks:
    """The nanoseconds that looks took in this process."""

    def __init__(self) -> None:
        self.ns = 0

    def counted(self, look: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(look)
        def timed(*args: Any) -> Any:
            began = time.perf_counter_ns()
            try:
                return look(*args)
            finally:
                self.ns += time.perf_counter_ns() - began

        return timed


def once(looks: Looks, rounds: int) -> dict[str, Any]:
    """One race: what looking took in it, from the end of its first round to that of its last."""
    ends: list[tuple[int, ...]] = []
    with tempfile.TemporaryDirectory() as folder:

        def heard(progress: measure.Progress) -> None:
            if progress.doing.startswith("round"):
                files = [path.read_bytes() for path in Path(folder).glob("*.looks")]
                each = [sum(struct.unpack_from("q", text, 8 * place)[0] for text in files if text)
                        for place in range(len(IN_WORKER))]  # fmt: skip
                ends.append((time.perf_counter_ns(), looks.ns, *each))

        path = Path(folder) / "work.py"
        path.write_text(WORKLOAD)
        candidates = [measure.Candidate(recipe, SAME) for recipe in (Recipe(), Recipe({"technique": "other"}))]
        trials = measure.race(find_target(str(path)), "", candidates, measure.Judge(),
                              measure.Rules(equal_rounds=rounds), on_progress=heard)  # fmt: skip
    spent, parent, *workers = (last - first for first, last in zip(ends[0], ends[-1], strict=True))
    slices = sum(one.round > 1 for trial in trials for one in trial.slices)
    return {
        "call_ms": round(trials[0].time_ms, 3), "quiet": all(one.quiet for trial in trials for one in trial.slices),
        "slices": slices, "ms_a_slice": round(spent / slices / 1e6, 3),
        "parent_ms_a_slice": round(parent / slices / 1e6, 4),
        "worker_ms_a_slice": {name: round(ns / slices / 1e6, 4) for name, ns in zip(IN_WORKER, workers, strict=True)},
        "share": round((parent + sum(workers)) / spent, 5),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "watch_cost.json")
    options = parser.parse_args()
    looks = Looks()
    for place, name in ((_watch.Watch, "mark"), (_watch.Watch, "load"), (_rounds, "neighbours")):
        setattr(place, name, looks.counted(getattr(place, name)))
    races = []
    for _ in range(options.races):
        races.append(once(looks, options.rounds))
        print(races[-1], flush=True)
    options.output.write_text(json.dumps({"machine": this_machine().summary, "races": races}, indent=1) + "\n")


if __name__ == "__main__":
    main()
