"""What watching costs: a training loop with and without `fettle.watch`, the two in turn in random order.

    python bench/watch_overhead.py --rounds 20

Every round times a block of equal steps each way; the figure is the median of the paired ratios with a 95% interval
(bootstrap). The limit is 2%.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import fettle


def block(steps: int, width: int, watched: bool, folder: Path) -> float:
    """Seconds of so many steps of a small network fed by a DataLoader."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(steps * 32, width), torch.zeros(steps * 32, dtype=torch.long)),
        batch_size=32,
    )

    def loop() -> None:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    started = time.perf_counter()
    if watched:
        with fettle.watch(to=None, slow_trace=folder / "slow.json", slow_factor=10.0):
            loop()
    else:
        loop()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=256, help="the smaller, the shorter a step, the harder the test")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ratios, plain_ms = [], []
    with tempfile.TemporaryDirectory() as folder:
        block(options.steps, options.width, True, Path(folder))
        for _ in range(options.rounds):
            seconds = {}
            for watched in random.sample([False, True], 2):
                seconds[watched] = block(options.steps, options.width, watched, Path(folder))
            ratios.append(seconds[True] / seconds[False])
            plain_ms.append(seconds[False] / options.steps * 1e3)
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    result = {
        "step_ms": statistics.median(plain_ms),
        "overhead": statistics.median(ratios) - 1,
        "interval": [medians[50] - 1, medians[-51] - 1],
        "rounds": options.rounds,
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if result["interval"][1] < 0.02 else 1)  # an interval that is too wide has not shown it


if __name__ == "__main__":
    main()
