"""fettle's winner against what a user would pick instead, on real models, all in one interleaved race.

    python bench/tune_vs_peers.py digits minilm resnet50 --budget 300
    python bench/tune_vs_peers.py detection ocr stable_diffusion:middle --budget 300 --max-metric-drop 0.005

Of a pipeline every part that can gets what a peer does.
Every peer is held to the same accuracy limit and measured through the same wrapper. A workload's JSON goes to
bench/results/peers/<machine>/<workload>.json as soon as it is known; `--summary` prints the table of all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from fettle.comparing import bench
from fettle.diagnose.finding import ratio as ratio_of
from fettle.machine import this_machine
from fettle.measure import Trial, by_round, paired, ratio_interval
from fettle.recipe import Recipe, technique_and_part
from fettle.recipe_file import RecipeFile
from fettle.report import Result
from fettle.result import Limits
from fettle.tuning import tune

HERE = Path(__file__).parent
PEERS = {
    "eager": "mode=eval",
    "torch.compile": "mode=eval grad=inference_mode compile=default",
    "autocast bf16 + max-autotune": "mode=eval grad=inference_mode precision=autocast-bf16 compile=max-autotune",
    "ONNX Runtime": "mode=eval runtime=onnxruntime",
    "OpenVINO bf16": "mode=eval runtime=openvino-bf16",
    "int8 dynamic + compile": "mode=eval grad=inference_mode quantize=int8-dynamic compile=default",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help="files in workloads/: NAME or NAME:FACTORY")
    parser.add_argument("--budget", type=float, default=600.0, help="seconds for each tuning")
    parser.add_argument("--max-metric-drop", type=float, help="judge by the workload's metric, which may fall so far")
    parser.add_argument("--rounds", type=int, default=15, help="most rounds of the final race")
    parser.add_argument("--trial-timeout", type=float, default=900.0, help="longest time for a peer to get ready, s")
    parser.add_argument("--summary", action="store_true", help="print the table of what was measured before")
    options = parser.parse_args()
    machine = re.sub(r"[^a-z0-9]+", "-", this_machine().summary.lower()).strip("-")
    folder = HERE / "results" / "peers" / machine
    for name in options.workloads:
        found = measure(
            name, options.budget, options.rounds, max_metric_drop=options.max_metric_drop,
            trial_timeout_s=options.trial_timeout,
        )  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name.replace(':', '-')}.json").write_text(json.dumps(found, indent=1) + "\n")
        show(found)
    if options.summary:
        summary([json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))])


def _with_choices(result: Result) -> RecipeFile:
    """The winner with the layers that it chose, as ``recipe.toml`` has it."""
    return RecipeFile(levels=dict(result.recipe.levels), evidence=result.learned)


def measure(
    name: str, budget_s: float, rounds: int, target: str = "", kept: Path | None = None,
    peers: Mapping[str, str] = PEERS, max_metric_drop: float | None = None,
    trial_timeout_s: float = 900.0,
) -> dict:  # fmt: skip
    """Tune one workload, then race its winner with the peers. Its study is left in `kept`, and goes on from there."""
    file, _, factory = name.partition(":")
    target = target or f"{HERE.parent / 'workloads' / file}.py:{factory or 'workload'}"
    started = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        given = {} if max_metric_drop is None else {"max_metric_drop": max_metric_drop}
        result = tune(target, budget_s=budget_s, output=kept or scratch, on_progress=_tell, **given)
    tuned_s = time.monotonic() - started
    facts, winner = result.facts, result.recipe
    labels, recipes = [], []
    for label, text in peers.items():
        recipe = _possible(Recipe.parse(text), facts)
        if recipe is not None:
            labels.append(label)
            recipes.append(recipe)
    print(f"{name}: tuned in {tuned_s:.0f} s, {len(result.trials)} trials, winner {winner}", flush=True)
    limits = Limits(max_error=result.limits.max_error, max_metric_drop=max_metric_drop)
    # The slowest go out of the race at the first look; what is left decides between the winner and the best peer.
    compared = bench(
        target, [_with_choices(result), *recipes], limits=limits, max_rounds=rounds, settle=False, on_progress=_tell,
        trial_timeout_s=trial_timeout_s,
    )  # fmt: skip
    base, fettle_trial, *peer_trials = compared.trials
    rows = {label: row(trial, fettle_trial, base) for label, trial in zip(labels, peer_trials, strict=True)}
    able = [trial for trial in peer_trials if trial.status == "measured"]
    best = min(able, key=lambda trial: trial.time_ms, default=base)
    return {
        "workload": name,
        "machine": this_machine().summary,
        "winner": str(winner),
        "verdict": result.verdict,
        "tuning_s": round(tuned_s, 1),
        "trials": len(result.trials),
        "as_given_ms": base.time_ms,
        "fettle": row(fettle_trial, fettle_trial, base),
        "peers": rows,
        "best_peer": labels[peer_trials.index(best)] if best in peer_trials else "as given",
        "fettle_over_best_peer": 1.0 if winner == best.recipe else ratio(best, fettle_trial),
        "fettle_over_eager": ratio(peer_trials[0], fettle_trial),
        "fettle_over_given": ratio(base, fettle_trial),
    }


def row(trial: Trial, winner: Trial, base: Trial) -> dict:
    """A trial as it goes into the JSON."""
    return {
        "recipe": str(trial.recipe),
        "status": trial.status,
        "reason": trial.reason,
        "ms": None if math.isnan(trial.time_ms) else trial.time_ms,
        "error": None if math.isnan(trial.accuracy.error) else trial.accuracy.error,
        "startup_s": None if math.isnan(trial.startup.total_s) else round(trial.startup.total_s, 2),
        "fettle_is_faster_by": ratio(trial, winner),
    }


def ratio(slower: Trial, faster: Trial) -> list[float] | None:
    """time of the first / time of the second, round by round, with a 95% interval.

    Over the baseline's rounds where the two did not meet: what does not fit into memory runs in a later race.
    """
    logs = paired(*({number: math.log(ms) for number, ms in by_round(trial.slices).items()}
                    for trial in (slower, faster)))  # fmt: skip
    if logs:
        found = ratio_interval(logs, 0.05)
    elif slower.speedup and faster.speedup:
        found = ratio_of(slower.speedup, faster.speedup)
    else:
        return None
    return [round(value, 4) if math.isfinite(value) else None for value in (found.estimate, found.low, found.high)]


def show(found: dict) -> None:
    """One workload's result for people."""
    print(f"  as given {found['as_given_ms']:.2f} ms; fettle {found['fettle']['ms']} ms, {found['winner']}")
    for label, peer in found["peers"].items():
        ms = f"{peer['ms']:.2f} ms" if peer["ms"] else peer["status"]
        faster = peer["fettle_is_faster_by"]
        print(f"  {label:30} {ms:>12}  {peer['status']:9} fettle is {faster[0] if faster else '-'}x as fast")


def summary(results: list[dict]) -> None:
    """The table over all workloads, and the geometric means the bar speaks of."""
    print(
        "| workload | as given ms | eager eval ms | best peer | best peer ms | fettle ms | fettle / best peer "
        "| recipe |"
    )
    print("| --- | --: | --: | --- | --: | --: | --: | --- |")
    over_eager, over_given, over_peer = [], [], []
    for found in results:
        if not found["fettle_over_best_peer"] or not found["fettle_over_given"]:
            print(f"| {found['workload']} | others had the machine: no ratio, measure it again" + 7 * " |")
            continue
        over = found["fettle_over_best_peer"]
        over = over[0] if isinstance(over, list) else over
        best = found["peers"].get(found["best_peer"], {"ms": found["as_given_ms"]})
        eager = found["peers"]["eager"]["ms"]
        print(f"| {found['workload']} | {found['as_given_ms']:.2f} | {f'{eager:.2f}' if eager else 'failed'} | "
              f"{found['best_peer']} | {best['ms']:.2f} | {found['fettle']['ms']:.2f} | {over:.2f}x | "
              f"`{found['winner']}` |")  # fmt: skip
        over_peer.append(over)
        if found["fettle_over_eager"]:
            over_eager.append(found["fettle_over_eager"][0])
        over_given.append(found["fettle_over_given"][0])
    for label, values in (("eager in eval mode", over_eager), ("as given", over_given), ("best peer", over_peer)):
        if values:
            print(f"geometric mean over {label}: {statistics.geometric_mean(values):.2f}x, least {min(values):.2f}x")


def _possible(recipe: Recipe, facts: object) -> Recipe | None:
    """The peer's recipe where it can work here: eval mode is left out where the model is in it already. Of a pipeline
    some part must be able to do each thing that it names."""
    from fettle.techniques import canonical, conflict, for_parts

    if not facts.training:
        recipe = recipe.without("mode")
    if facts.parts:
        parted = Recipe(for_parts(recipe.levels, facts))
        if recipe.levels.keys() != {technique_and_part(name)[0] for name in parted.levels}:
            return None
        recipe = parted
    recipe = canonical(recipe)
    return None if conflict(recipe, facts) else recipe


def _tell(event: object) -> None:
    if event.trial is not None:
        trial = event.trial
        print(
            f"    {trial.status:8} {trial.time_ms:10.3f} ms  {trial.speedup}  {trial.recipe} {trial.reason[:100]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
