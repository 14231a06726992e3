"""How good is `auto`, in how much of the time? The whole factorial of a small workload against the search.

    python bench/search_regret.py digits --minutes 8
    python bench/search_regret.py encoder ranker --minutes 8
    python bench/search_regret.py --atlas bench/atlas/atlas.parquet lstm graph
    python bench/search_regret.py --atlas bench/atlas/atlas.parquet --whole lstm graph ranker

The factorial is measured once, every valid combination of `LEVELS`; then `auto` runs on the same levels as a user would
run it, in an empty folder. Both winners meet in one final race: the regret is the ratio of their times there. A run
stops after `--minutes` a workload, and the next one goes on from the study that it left under `--work`.

With ``--atlas`` the workloads are models of ``bench/atlas.py``. First the factorial of each is measured and put beside
what the atlas has; then `auto` runs twice on each, with all other models' rows and without. Which of them goes first
changes from model to model.

With ``--whole`` as well, `auto` may use all levels, as a user runs it, and there is no factorial: first all models
without an atlas, then each with one of these searches of the others and the rows that the file has of other models.
Both winners meet in a race.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import atlas as factorials
import msgspec
from atlas_models import FAMILY
from tune_vs_peers import _tell, ratio

from fettle.atlas import Row, merged, read_atlas, write_atlas
from fettle.comparing import bench
from fettle.machine import this_machine
from fettle.recipe import Recipe
from fettle.report import Result
from fettle.search import DESIGNS, Space, combinations_of
from fettle.storage import storage_url
from fettle.techniques import canonical
from fettle.tuning import Session, atlas_rows, tune
from fettle.tuning.space import space_for

HERE = Path(__file__).parent
ALL = 10**6
TOGETHER = 6
"""Recipes of the factorial in a race."""
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


def every(space: Space, session: Session) -> None:
    """The design that measures every valid combination, however many there are."""
    recipes = combinations_of(space, ALL)
    for begin in range(0, len(recipes), TOGETHER):
        if session.spent():
            break
        session.measure(recipes[begin : begin + TOGETHER])


DESIGNS["everything"] = every  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=list(dict.fromkeys([*LEVELS, *FAMILY])))
    parser.add_argument("--minutes", type=float, default=8.0, help="for the factorial of each workload, in this run")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "fettle-search-regret")
    parser.add_argument("--atlas", type=Path, help="with one and without, on models that it has")
    parser.add_argument("--whole", action="store_true", help="with an atlas: all levels, and no factorial")
    parser.add_argument("--output", type=Path, help="JSON (default: under bench/results)")
    options = parser.parse_args()
    rows = read_atlas(options.atlas) if options.atlas is not None else []
    if rows and options.whole:
        whole_space(
            options.workloads, options.work, rows, options.output or HERE / "results" / "search_atlas_whole.json"
        )
        return
    for name in options.workloads if rows else ():
        rows = merged(rows, factorial_rows(name, options.work / name, options.minutes * 60))
    output = options.output or HERE / "results" / f"search_regret{'_atlas' * bool(rows)}.json"
    results = json.loads(output.read_text()) if output.exists() else {}
    for number, name in enumerate(options.workloads, len(results)):
        folder = options.work / name
        folder.mkdir(parents=True, exist_ok=True)
        if rows:
            found = both_ways(name, folder, rows, atlas_first=number % 2 == 1)
        else:
            found = measure(name, folder, options.minutes * 60)
        if found is not None:
            results[name] = found
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(results, indent=1) + "\n")
            print(name, json.dumps(found), flush=True)


def whole_space(names: list[str], work: Path, rows: list[Row], output: Path) -> None:
    """`auto` on all levels, first without an atlas and then with; what a run has measured the next one keeps."""
    results = json.loads(output.read_text()) if output.exists() else {}
    for way in ("without", "with"):
        for name in names:
            if way in results.get(name, {}):
                continue
            known = [row for row in rows if row.workload != name]
            for other in (one for one in names if one != name and way == "with"):
                own = atlas_rows(storage_url(None, work / other / "without"), family=FAMILY[other])
                known = merged(known, [msgspec.structs.replace(row, workload=other) for row in own])
            folder = work / name / way
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            write_atlas(known, work / name / "others.parquet")
            result = tune(target(name), budget_s=None, output=folder, on_progress=_tell,
                          atlas=work / name / "others.parquet" if way == "with" else None)  # fmt: skip
            found = results.setdefault(name, {"machine": this_machine().summary})
            found[way] = {"recipe": str(result.recipe), "trials": len(result.trials),
                          "seconds": round(result.seconds, 1)}  # fmt: skip
            if way == "with":
                recipes = [Recipe.parse(found[one]["recipe"]) for one in ("with", "without")]
                same = recipes[0] == recipes[1]
                trials = [] if same else bench(target(name), recipes, max_rounds=20, settle=False).trials
                found["time with over time without"] = 1.0 if same else ratio(*trials[1:])
                found["share_of_seconds"] = round(found["with"]["seconds"] / found["without"]["seconds"], 3)
            output.write_text(json.dumps(results, indent=1) + "\n")
            print(name, way, json.dumps(found), flush=True)


def target(name: str) -> str:
    return f"{HERE / 'atlas_models.py'}:{name}"


def factorial_rows(name: str, folder: Path, budget_s: float) -> list[Row]:
    """Measure what is missing of the factorial of a model of the atlas; the rows of the whole."""
    levels = factorials.levels()
    everything = tune(target(name), techniques=levels, design="everything", budget_s=budget_s,
                      output=folder / "factorial", on_progress=_tell)  # fmt: skip
    missing = unmeasured(everything, levels)
    print(f"{name}: {len(everything.trials)} combinations in {everything.seconds:.0f} s, {missing} to go", flush=True)
    if missing:
        raise SystemExit(f"the factorial of {name} is not finished: the same command goes on with it")
    found = atlas_rows(storage_url(None, folder / "factorial"), family=FAMILY[name])
    return [msgspec.structs.replace(row, workload=name) for row in found]


def both_ways(name: str, folder: Path, rows: list[Row], *, atlas_first: bool) -> dict:
    """`auto` with an atlas of all other models and without, and a race of both winners and the factorial's best."""
    machine = this_machine()
    own = [row for row in rows if (row.workload, row.machine) == (name, machine.id) and row.status == "measured"]
    others = folder / "others.parquet"
    write_atlas([row for row in rows if row.workload != name], others)
    best = Recipe.parse(max(own, key=lambda row: row.speedup or 0.0).recipe)
    found = {}
    for way in ("with", "without") if atlas_first else ("without", "with"):
        shutil.rmtree(folder / way, ignore_errors=True)
        found[way] = tune(target(name), techniques=factorials.levels(), budget_s=None, output=folder / way,
                          atlas=others if way == "with" else None, on_progress=_tell)  # fmt: skip
    recipes = list(dict.fromkeys([found["with"].recipe, found["without"].recipe, best]))
    compared = bench(target(name), recipes, max_rounds=20, settle=False)
    trial = dict(zip(recipes, compared.trials[1:], strict=True))
    told = {
        way: {
            "recipe": str(result.recipe),
            "time_over_factorial_best (bar: at most 1.03)":
                1.0 if result.recipe == best else ratio(trial[result.recipe], trial[best]),
            "trials": len(result.trials),
            "seconds": round(result.seconds, 1),
        }
        for way, result in found.items()
    }  # fmt: skip
    return {
        "machine": machine.summary,
        "factorial": str(best),
        "factorial_trials": len(own),
        **told,
        "share_of_seconds (bar: at most 0.5)": round(found["with"].seconds / found["without"].seconds, 3),
    }


def measure(name: str, folder: Path, budget_s: float) -> dict | None:
    """Both searches and the final race of one workload; None where the factorial is not finished yet."""
    path = HERE.parent / "workloads" / f"{name}.py"
    if name in OWN:
        path = folder / f"{name}.py"
        path.write_text(OWN[name])
    levels = factorials.levels(LEVELS[name])
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
