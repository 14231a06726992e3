"""Is the race to be trusted? A/A races, a planted 3% slow-down, and what racing costs.

For each, beside it, what one-block-after-the-other timing claims on the same processes at the same time: a block of
calls of the one, then a block of the other, a Welch t-test at the same level between them.

    python bench/measurement.py --races 100 --planted 40
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import msgspec
from scipy import stats

from fettle.comparing import REPLICATES
from fettle.machine import this_machine
from fettle.measure import Entry, Judge, Rules, Trial, Worker, race, verdict
from fettle.recipe import Recipe
from fettle.workload import find_target

WORKLOAD = """
import torch
from torch import nn

class Stack(nn.Module):
    \"\"\"`depth` equal layers: three more of a hundred are three per cent more work, whatever the machine does.\"\"\"
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.depth = 100
    def forward(self, x):
        for _ in range(self.depth):
            x = torch.relu(self.layer(x))
        return x

def workload():
    torch.manual_seed(0)
    return Stack().eval(), [torch.randn(64, 256) for _ in range(4)]
"""
SAME = "def optimize(model, batches):\n    return model\n"
SLOW = "def optimize(model, batches):\n    model.depth = 103\n    return model\n"


def one_race(target: dict, source: str, seed: int) -> tuple[str, Trial, float, float]:
    """A race of the workload against `source`, as `fettle bench` runs it: the verdict, the trial, seconds in rounds
    and seconds in slices."""
    rules = Rules(settle_verdicts=True, replicates=REPLICATES)
    entries = [Entry(Recipe(), SAME), Entry(Recipe({"technique": "other"}), source)]
    ends: list[float] = []
    tell = lambda progress: ends.append(time.monotonic()) if progress.stage == "round" else None  # noqa: E731
    trials = race(target, "", entries, Judge(), rules, tell=tell, seed=seed)
    per_round = [b - a for a, b in pairwise(ends)]
    slices_s = sum(trial.processes for trial in trials) * rules.slice_s * len(per_round)
    return verdict(trials[1].speedup, rules.indifference), trials[1], sum(per_round), slices_s


def blocks(target: dict, source: str, seconds: float) -> bool:
    """Whether one block after the other claims a difference: `seconds` of each, Welch's t at 5%."""
    samples = []
    for text in (SAME, source):
        with Worker() as worker:
            worker.ask("build", 60, target=target)
            worker.ask("prepare", 60, source=text, label="block")
            samples.append(worker.ask("slice", 60, seconds=seconds)["samples_ns"])
    return bool(stats.ttest_ind(samples[0], samples[1], equal_var=False).pvalue < 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=100, help="A/A races")
    parser.add_argument("--planted", type=int, default=40, help="races against a planted 3%% slow-down")
    parser.add_argument("--blocks", type=int, default=20, help="A/A comparisons one block after the other")
    parser.add_argument("--output", type=Path, default=Path("bench/results/measurement.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stack.py"
        path.write_text(WORKLOAD)
        target = msgspec.to_builtins(find_target(str(path)))
        claims: dict[str, list[str]] = {"same": [], "slow": []}
        estimates: dict[str, list[float]] = {"same": [], "slow": []}
        racing_s = model_s = 0.0
        for kind, source, count in (("same", SAME, options.races), ("slow", SLOW, options.planted)):
            for seed in range(count):
                word, trial, racing, model = one_race(target, source, seed)
                claims[kind].append(word)
                if trial.speedup is not None:
                    estimates[kind].append(round(trial.speedup.estimate, 4))
                racing_s, model_s = racing_s + racing, model_s + model
                print(
                    f"{kind} {seed + 1}/{count}: {word} {trial.speedup}, {trial.processes} processes,"
                    f" {len(trial.round_ms)} rounds",
                    flush=True,
                )
        block_claims = [blocks(target, SAME, 1.5) for _ in range(options.blocks)]
    different = sum(word in ("faster", "slower") for word in claims["same"])
    found = sum(word == "slower" for word in claims["slow"])
    result = {
        "machine": this_machine().summary,
        "aa_races": options.races,
        "aa_claimed_different": different,
        "aa_verdicts": {word: claims["same"].count(word) for word in sorted(set(claims["same"]))},
        "aa_estimates": estimates["same"],
        "planted_races": options.planted,
        "planted_found": found,
        "planted_verdicts": {word: claims["slow"].count(word) for word in sorted(set(claims["slow"]))},
        "planted_estimates": estimates["slow"],
        "blocks_aa": options.blocks,
        "blocks_aa_claimed_different": sum(block_claims),
        "racing_over_model_time": round(racing_s / model_s, 4) if model_s else None,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"A/A: different claimed in {different} of {options.races} (bar: at most 5%)")
    print(f"planted 3%: found in {found} of {options.planted} (bar: at least 90%)")
    print(f"blocks, A/A: different claimed in {sum(block_claims)} of {options.blocks}")
    print(f"racing / time in slices: {result['racing_over_model_time']} (bar: at most 1.10)")


if __name__ == "__main__":
    main()
