"""What watching costs: a training loop as it is, watched, and watched with `slow_trace`, in turn in random order.

    python bench/watch_overhead.py --rounds 100

Two loops over a DataLoader: one whose steps are so short that every microsecond shows, and one of a usual length. Every
round times a block of equal steps each way, and the loop as it is a second time: what comes out for that is the noise
of the comparison. The figure is the median of the paired ratios with a 95% interval (bootstrap).

What watching costs, it costs a step, however long that is; so the short loop tells how long a step must be for the
limit of 2%: the upper end of the interval in microseconds, over 0.02. Exit code 1 where that is longer than 5 ms, or
where the usual loop is surely slowed by more than 2%.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fettle

LOOPS = {"short": (256, 400), "usual": (2048, 40)}
"""Width of the network, steps in a block: a fifth of a second or so."""
WAYS = ("plain", "plain again", "watch", "watch with slow_trace")
LIMIT = 0.02
USUAL_MS = 5.0


class Loop:
    """One small network and its data, the same memory for every block."""

    def __init__(self, width: int, steps: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        rows = torch.utils.data.TensorDataset(torch.randn(steps * 32, width), torch.zeros(steps * 32, dtype=torch.long))
        self.loader = torch.utils.data.DataLoader(rows, batch_size=32)

    def block(self, way: str, folder: Path) -> float:
        """Seconds of one pass over the data, watched or not."""
        watching = contextlib.nullcontext()
        if way.startswith("watch"):
            slow = folder / "slow.json" if way.endswith("slow_trace") else None
            watching = fettle.watch(to=None, slow_trace=slow, slow_factor=10.0)
        started = time.perf_counter()
        with watching:
            for x, y in self.loader:
                self.optimizer.zero_grad()
                nn.functional.cross_entropy(self.model(x), y).backward()
                self.optimizer.step()
        return time.perf_counter() - started


def compare(width: int, steps: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Each way against the plain loop of the same round."""
    loop = Loop(width, steps)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for way in WAYS:
        loop.block(way, folder)
    for _ in range(rounds):
        for way in random.sample(WAYS, len(WAYS)):
            seconds[way].append(loop.block(way, folder))
    found: dict[str, Any] = {
        "step_ms": statistics.median(seconds["plain"]) / steps * 1e3,
        "steps": steps,
        "rounds": rounds,
    }
    for way in WAYS[1:]:
        ratios = [one / plain for one, plain in zip(seconds[way], seconds["plain"], strict=True)]
        medians = sorted(statistics.median(random.choices(ratios, k=rounds)) for _ in range(2000))
        step_us = found["step_ms"] * 1e3
        found[way] = {
            "overhead": statistics.median(ratios) - 1,
            "interval": [medians[50] - 1, medians[-51] - 1],
            "us_a_step": [step_us * (value - 1) for value in (medians[50], statistics.median(ratios), medians[-51])],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {name: compare(*loop, options.rounds, Path(folder)) for name, loop in LOOPS.items()}
    result["least_step_ms"] = {way: result["short"][way]["us_a_step"][2] / LIMIT / 1e3 for way in WAYS[2:]}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    kept = [
        result["least_step_ms"][way] <= USUAL_MS and result["usual"][way]["interval"][0] <= LIMIT for way in WAYS[2:]
    ]
    raise SystemExit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
