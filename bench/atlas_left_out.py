"""What is the atlas worth to a model that it has not seen? From recorded trials, one model left out at a time.

    python bench/atlas_left_out.py --atlas bench/atlas/atlas.parquet

For each model on each machine `auto` runs twice, without and with an atlas of all other models, over the recorded
trials: a recipe that is not recorded cannot be had, by rule. Regret is the recorded time of the recipe that it ends at
over that of the fastest recorded. Seconds are what the recorded starts and rounds take, two processes made ready side
by side, and the workload as given beside each race. Nothing is measured here, so the machine may be busy meanwhile.
There is no final race in it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from fettle.atlas import Row, Subject, read_atlas
from fettle.atlas.prediction import Predictor
from fettle.files import write_text
from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.search import Guide, Space, auto
from fettle.techniques import CATALOGUE

HERE = Path(__file__).parent
ROUNDS, SLICE_S = 8, 0.13
_LEAST_RECORDED = 20
BUNDLES = [Recipe.parse(text) for text in (
    "channels_last=on grad=inference_mode", "runtime=openvino-bf16", "compile=default freeze=on grad=inference_mode",
    "channels_last=on compile=default freeze=on grad=inference_mode", "runtime=onnxruntime",
    "compile=default freeze=on grad=inference_mode quantize=int8-dynamic")]  # fmt: skip
"""Those that the session of a small model has."""


class Recorded:
    """A session that answers from rows, and counts the seconds that measuring them would take."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {Recipe.parse(row.recipe): row for row in rows}
        self.trials: dict[Recipe, Trial] = {}
        self.seconds = self._seconds(Recipe())

    def measure(self, recipes: Sequence[Recipe]) -> list[Trial]:
        new = [recipe for recipe in recipes if recipe not in self.trials]
        if any(recipe.levels for recipe in new):
            self.seconds += ROUNDS * SLICE_S  # the workload as given runs beside them
        for recipe in new:
            self.trials[recipe] = self._trial(recipe)
            self.seconds += self._seconds(recipe) if recipe.levels else 0.0
        return [self.trials[recipe] for recipe in recipes]

    def seconds_for(self, recipe: Recipe) -> float:
        """What is expected without an atlas: the typical start of those as expensive that were measured."""
        cost = cost_of(recipe)
        alike = [self._seconds(known) for known in self.trials if known.levels and cost_of(known) == cost]
        return statistics.median(alike) if alike else self._seconds(Recipe()) + {1: 0.0, 2: 6.0, 3: 30.0}[cost]

    def _seconds(self, recipe: Recipe) -> float:
        row, given = self.rows[recipe], self.rows[Recipe()]
        start_s = row.start_s or (given.start_s or 5.0) + {1: 0.0, 2: 6.0, 3: 30.0}[cost_of(recipe)]
        return start_s / 2 + ROUNDS * SLICE_S

    def _trial(self, recipe: Recipe) -> Trial:
        row = self.rows[recipe]
        ratio = None
        if row.speedup is not None and recipe.levels:
            ratio = Interval(row.speedup, row.low or 0.0, math.inf if row.high is None else row.high)
        time_ms = (row.given_ms or 1.0) / (row.speedup or 1.0)
        return Trial(recipe, row.status, row.reason, time_ms, speedup=ratio, start_s=row.start_s or math.nan)

    def score(self, trial: Trial) -> float:
        return -math.log(trial.speedup.estimate if trial.speedup else 1.0) if trial.ok else math.inf

    def noise(self, one: Trial, other: Trial) -> float:
        halves = [(math.log(trial.speedup.high) - math.log(trial.speedup.low)) / 2 for trial in (one, other)
                  if trial.speedup is not None and 0 < trial.speedup.low <= trial.speedup.high < math.inf]  # fmt: skip
        return math.hypot(*halves) if halves else 0.0


def cost_of(recipe: Recipe) -> int:
    by_name = {technique.name: technique for technique in CATALOGUE}
    return max((by_name[name].level_cost(level) for name, level in recipe.levels.items()), default=1)


def space_of(recorded: Recorded) -> Space:
    """The levels that were recorded; a recipe that was not cannot be had."""
    choices = {}
    for technique in CATALOGUE:
        levels = {recipe.levels[technique.name] for recipe in recorded.rows if technique.name in recipe.levels}
        if levels:
            choices[technique.name] = (technique.default, *sorted(levels))
    everywhere = [recipe for recipe in recorded.rows if recipe.levels]
    required = Recipe({name: level for name, level in everywhere[0].levels.items()
                       if all(recipe.levels.get(name) == level for recipe in everywhere)})  # fmt: skip
    needs = {one.name: one.needs for one in CATALOGUE if one.needs and one.name in choices}
    why_not = lambda recipe: "" if recipe in recorded.rows else "not recorded"  # noqa: E731
    bundles = [recipe for one in BUNDLES if (recipe := Recipe({**one.levels, **required.levels})) in recorded.rows]
    return Space(choices, why_not, needs=needs, required=required, cost=cost_of, bundles=bundles)


def left_out(rows: Sequence[Row], own: Sequence[Row], *, elsewhere: bool = False) -> dict:
    """Both searches of one model."""
    about = Subject(**{name: getattr(own[0], name) for name in Subject.__struct_fields__})
    best = max(row.speedup or 0.0 for row in own if row.status == "measured")
    found = {}
    for name in ("without", "with"):
        session = Recorded(own)
        space, guide = space_of(session), None
        session.measure([Recipe()])
        if name == "with":
            others = [row for row in rows if row.workload != own[0].workload
                      and not (elsewhere and row.machine == about.machine)]  # fmt: skip
            predictor = Predictor(others, about, max_error=0.02, guess_s=session.seconds_for)
            guide = Guide(predictor) if len(predictor) else None
        leader = auto(space, session, guide=guide)
        speedup = session.rows[leader.recipe].speedup if leader is not None else None
        found[name] = {"recipe": str(leader.recipe) if leader else None, "regret": round(best / (speedup or 1.0), 4),
                       "seconds": round(session.seconds, 1), "trials": len(session.trials)}  # fmt: skip
        if guide is not None:
            found[name] |= {"reliable": guide.is_reliable, "foreseen": len(guide.foreseen),
                            "as expected": sum(one.held for one in guide.foreseen)}  # fmt: skip
    return {**found, "recorded": len(own), "quiet": sum(row.quiet for row in own),
            "share of seconds": round(found["with"]["seconds"] / found["without"]["seconds"], 3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atlas", type=Path, default=HERE / "atlas" / "atlas.parquet")
    parser.add_argument("--elsewhere", action="store_true", help="without rows of the same machine")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "atlas_left_out.json")
    options = parser.parse_args()
    rows = read_atlas(options.atlas)
    models = sorted({(row.workload, row.machine, row.torch) for row in rows})
    found = {}
    for key in models:
        own = [row for row in rows if (row.workload, row.machine, row.torch) == key]
        if len(own) < _LEAST_RECORDED:
            print(f"{key[0]}: {len(own)} trials are too few", flush=True)
            continue
        found[" ".join(key)] = left_out(rows, own, elsewhere=options.elsewhere)
        print(key[0], json.dumps(found[" ".join(key)]), flush=True)
    if not found:
        raise SystemExit("no model has enough trials")
    near = sum(one["with"]["regret"] <= 1.03 for one in found.values())
    result = {
        "models": found,
        "within 3% with the atlas": f"{near} of {len(found)}",
        "within 3% without": f"{sum(one['without']['regret'] <= 1.03 for one in found.values())} of {len(found)}",
        "median share of seconds (bar: at most 0.5)": statistics.median(
            one["share of seconds"] for one in found.values()
        ),
    }
    write_text(options.output, json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "models"}, indent=1))


if __name__ == "__main__":
    main()
