"""Training loops tuned against as given, the losses inside the band of other seeds.

    python bench/train_step.py                          all three, ten minutes each
    python bench/train_step.py --only train_bert        one of them; what is known of the others stays

The figures are those of the last, fresh race of each study. The bar, on a CPU with AMX: at least 2x for the
convolutional loop and both transformers, the loss deviation at most 1. A workload's row goes into
bench/results/train_step.json, under its machine, as soon as it is known; the exit code is 1 where the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from fettle.machine import this_machine
from fettle.report import Result, save
from fettle.tuning import tune

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "train_step.json"
BAR = {"train_resnet": 2.0, "train_gpt2": 2.0, "train_bert": 2.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(BAR), help="this workload; may be repeated")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for each tuning")
    parser.add_argument("--technique", action="append", default=[], help="NAME=LEVEL,LEVEL as in fettle tune")
    parser.add_argument("--keep", type=Path, help="folder for the reports")
    options = parser.parse_args()
    allowed = {name: levels.split(",") for name, levels in (item.split("=", 1) for item in options.technique)}
    missed = False
    for name in options.only or BAR:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            output = options.keep / name if options.keep else Path(scratch)
            result = tune(
                str(HERE.parent / "workloads" / f"{name}.py"), mode="training", budget_s=options.budget,
                techniques=allowed, output=output, on_progress=_tell,
            )  # fmt: skip
            if options.keep:
                save(result, output)
        found = row(name, result)
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        known.setdefault(found["machine"], {})[name] = found
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        print(json.dumps({key: value for key, value in found.items() if key not in ("losses", "seeds")}), flush=True)
        missed |= not found["held"]
    sys.exit(1 if missed else 0)


def row(name: str, result: Result) -> dict:
    """One workload's result as it goes into the JSON."""
    winner, base = result.winner, result.baseline
    speedup = winner.speedup if winner is not None else None
    low = speedup.estimate if speedup else 0.0
    inside = winner is not None and winner.accuracy.error <= 1
    return {
        "workload": name,
        "machine": this_machine().summary,
        "winner": str(result.recipe) if winner else None,
        "verdict": result.verdict,
        "speedup": [speedup.estimate, speedup.low, speedup.high] if speedup else None,
        "as_given_ms": base.time_ms if base else None,
        "tuned_ms": winner.time_ms if winner else None,
        "samples_per_s": [base.throughput, winner.throughput] if winner and base else None,
        "peak_bytes": [base.peak_bytes, winner.peak_bytes] if winner and base else None,
        "loss_deviation": winner.accuracy.error if winner else None,
        "phases_ms": [dict(base.phases_ms), dict(winner.phases_ms)] if winner and base else None,
        "losses": list(winner.accuracy.losses) if winner else None,
        "seeds": [list(curve) for curve in result.reference.curves],
        "bar": BAR.get(name),
        "held": inside and low >= BAR.get(name, 0.0),
        "seconds": round(result.seconds, 1),
        "trials": len(result.trials),
    }


def _tell(event: object) -> None:
    if event.trial is not None:
        trial = event.trial
        print(
            f"    {trial.status:8} {trial.time_ms:10.3f} ms  {trial.speedup}  deviation {trial.accuracy.error:.3g}  "
            f"{trial.recipe} {trial.reason[:120]}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
