"""How good is `auto`, in how much of the time? The whole factorial of a small workload against the search.

    python bench/search_regret.py digits --minutes 8
    python bench/search_regret.py encoder ranker --minutes 8

The factorial is measured once, every valid combination of `LEVELS`; then `auto` runs on the same levels as a user would
run it, in an empty folder. Both winners meet in one final race: the regret is the ratio of their times there. A run
stops after `--minutes` a workload, and the next one goes on from the study that it left under `--work`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from functools import partial
from pathlib import Path

from tune_vs_peers import _tell, ratio

from fettle.comparing import bench
from fettle.machine import this_machine
from fettle.recipe import Recipe
from fettle.report import Result
from fettle.search import DESIGNS, combinations_of, factorial
from fettle.techniques import CATALOGUE, canonical
from fettle.tuning import tune
from fettle.tuning.space import space_for

HERE = Path(__file__).parent
ALL = 10**6
DESIGNS["everything"] = partial(factorial, most=ALL)  # type: ignore[index]
OWN = {
    "encoder": """
import torch
from torch import nn

def workload():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(192, 4, 768, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(1000, 192), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    return model.eval(), [torch.randint(1000, (8, 48)) for _ in range(4)]
""",
    "ranker": """
import torch
from torch import nn

def workload():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(5000, 256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                          nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 16))
    return model.eval(), [torch.randint(5000, (256, 20)) for _ in range(4)]
""",
}
COMMON = {
    "grad": ["grad", "no_grad", "inference_mode"],
    "matmul": ["highest", "medium"],
    "precision": ["fp32", "bf16", "autocast-bf16"],
    "compile": ["off", "default"],
    "freeze": ["off", "on"],
    "runtime": ["torch", "openvino-bf16", "onnxruntime"],
}
LEVELS = {
    "digits": {**COMMON, "channels_last": ["off", "on"], "threads": ["as-given", "1"]},
    "encoder": {**COMMON, "quantize": ["none", "int8-dynamic"], "threads": ["as-given", "1"]},
    "ranker": {**COMMON, "quantize": ["none", "int8-dynamic"], "threads": ["as-given", "1"]},
}
"""The factors of each factorial; all others stay as given."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=list(LEVELS))
    parser.add_argument("--minutes", type=float, default=8.0, help="for the factorial of each workload, in this run")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fettle-search-regret")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "search_regret.json")
    options = parser.parse_args()
    results = json.loads(options.output.read_text()) if options.output.exists() else {}
    for name in options.workloads:
        found = measure(name, options.work / name, options.minutes * 60)
        if found is not None:
            results[name] = found
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(results, indent=1) + "\n")
            print(name, json.dumps(found), flush=True)


def measure(name: str, folder: Path, budget_s: float) -> dict | None:
    """Both searches and the final race of one workload; None where the factorial is not finished yet."""
    folder.mkdir(parents=True, exist_ok=True)
    path = HERE.parent / "workloads" / f"{name}.py"
    if name in OWN:
        path = folder / f"{name}.py"
        path.write_text(OWN[name])
    given = {technique.name: [technique.default] for technique in CATALOGUE if "inference" in technique.modes}
    levels = {**given, **LEVELS[name]}
    del levels["mode"]  # a precondition where it matters

    everything = tune(str(path), techniques=levels, design="everything", budget_s=budget_s, output=folder / "factorial",
                      on_progress=_tell)  # fmt: skip
    missing = unmeasured(everything, levels)
    print(f"{name}: {len(everything.trials)} combinations in {everything.seconds:.0f} s, {missing} to go", flush=True)
    if missing:
        return None
    shutil.rmtree(folder / "auto", ignore_errors=True)
    auto = tune(str(path), techniques=levels, budget_s=None, output=folder / "auto", on_progress=_tell)
    regret: list | float | None = 1.0
    if auto.recipe != everything.recipe:
        compared = bench(str(path), [auto.recipe, everything.recipe], max_rounds=20, settle=False)
        regret = ratio(compared.trials[1], compared.trials[2])
    return {
        "machine": this_machine().summary,
        "auto": str(auto.recipe),
        "factorial": str(everything.recipe),
        "auto_time_over_factorial_best (bar: at most 1.03)": regret,
        "auto_trials": len(auto.trials),
        "factorial_trials": len(everything.trials),
        "auto_s": round(auto.seconds, 1),
        "factorial_s": round(everything.seconds, 1),
        "share_of_time (bar: at most 0.15)": round(auto.seconds / everything.seconds, 4),
    }


def unmeasured(found: Result, levels: dict[str, list[str]]) -> int:
    """How many of the valid combinations the study has not measured."""
    space, _ = space_for(found.facts, levels)
    wanted = {canonical(recipe) for recipe in combinations_of(space, ALL)} | {Recipe()}
    return len(wanted - {trial.recipe for trial in found.trials})


if __name__ == "__main__":
    main()
