"""Does a machine that nobody else uses stay the same? A model of many small operators, with one thread and with two.

    python bench/core_placement.py --minutes 4

In a virtual machine the hypervisor moves the cores. Where two of them no longer share a cache, what one thread wrote
takes longer to reach the other: everything that runs in several threads is slower, nothing that runs in one. No counter
inside the machine shows it. The two take turns, a quarter of a second each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path

import torch

from fettle.machine import this_machine
from fettle.measure._watch import Watch

HERE = Path(__file__).parent
TURN_S = 0.25
_SLOW = 1.1
"""Over the fastest tenth, from where a turn counts as slow."""


class Chain(torch.nn.Module):
    """A hundred small steps, each of which hands its result from thread to thread."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(192, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = torch.tanh(self.layer(x))
        return x


def turn(model: Chain, x: torch.Tensor, threads: int) -> float:
    """Milliseconds of the median call."""
    torch.set_num_threads(threads)
    times, end = [], time.perf_counter() + TURN_S
    while (began := time.perf_counter()) < end:
        model(x)
        times.append(time.perf_counter() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "core_placement.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, x = Chain().eval(), torch.randn(16, 192)
    one, two, others = [], [], []
    end = time.monotonic() + 60 * options.minutes
    watch = Watch()
    with torch.inference_mode():
        turn(model, x, 2)
        while time.monotonic() < end:
            one.append(round(turn(model, x, 1), 4))
            two.append(round(turn(model, x, 2), 4))
            watch.mark()
            others.append(watch.load().others)
    found = {"machine": this_machine().summary, "others had, at most": round(max(others), 3),
             "one thread": summary(one), "two": summary(two), "turns of two threads": two}  # fmt: skip
    options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "turns of two threads"}, indent=1))


def summary(times: list[float]) -> dict[str, float]:
    """How far apart its turns are."""
    fast = statistics.quantiles(times, n=10)[0]
    slow = [took > _SLOW * fast for took in times]
    return {
        "turns": len(times), "fastest tenth, ms": fast, "slowest tenth, ms": statistics.quantiles(times, n=10)[-1],
        "share slow": round(sum(slow) / len(slow), 3),
        "changes": sum(a != b for a, b in itertools.pairwise(slow)),
    }  # fmt: skip


if __name__ == "__main__":
    main()
