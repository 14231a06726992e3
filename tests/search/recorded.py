"""A session over recorded numbers, and the recorded table."""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.search import Space

SWITCHES = {
    "mode": ("eval", "eval"),
    "grad": ("inference_mode", "inference_mode"),
    "precision": ("autocast_fp16", "autocast-fp16"),
    "channels_last": ("channels_last", "on"),
    "cudnn_benchmark": ("cudnn_benchmark", "on"),
    "compile": ("compile", "default"),
}
"""By technique: the column, and the level that it stands for when it is on."""


class Recorded:
    """Answers from a function recipe -> milliseconds (None: failed, negative: rejected). Counts what is asked."""

    def __init__(self, time_ms: Callable[[Recipe], float | None], budget: int = 10**6, spread: float = 0.0) -> None:
        self.time_ms, self.budget, self.spread = time_ms, budget, spread
        self.trials: dict[Recipe, Trial] = {}
        self.asked: list[Recipe] = []
        self.races: list[list[Recipe]] = []
        self.base_ms = time_ms(Recipe()) or 1.0

    def measure(self, recipes: Sequence[Recipe]) -> list[Trial]:
        self.races.append(list(recipes))
        self.asked += recipes
        for recipe in recipes:
            if recipe not in self.trials and len(self.trials) < self.budget:
                self.trials[recipe] = self._run(recipe)
        return [self.trials[recipe] for recipe in recipes if recipe in self.trials]

    def _run(self, recipe: Recipe) -> Trial:
        time_ms = self.time_ms(recipe)
        if time_ms is None:
            return Trial(recipe, "failed", reason="no such run")
        ratio = self.base_ms / abs(time_ms)
        speedup = Interval(ratio, ratio * math.exp(-self.spread), ratio * math.exp(self.spread))
        if time_ms < 0:
            return Trial(recipe, "rejected", reason="inaccurate", time_ms=-time_ms, speedup=speedup)
        return Trial(recipe, "measured", time_ms=time_ms, speedup=speedup)

    def score(self, trial: Trial) -> float:
        return -math.log(trial.speedup.estimate) if trial.ok and trial.speedup else math.inf

    def noise(self, one: Trial, other: Trial) -> float:
        return math.sqrt(2) * self.spread


def cells() -> dict[tuple[str, str, str], dict[Recipe, float]]:
    """Throughput by recipe, by (model, torch version, container)."""
    table: dict[tuple[str, str, str], dict[Recipe, float]] = {}
    lines = (Path(__file__).parent / "data" / "bridger.csv").read_text().splitlines()
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        recipe = Recipe({name: level for name, (column, level) in SWITCHES.items() if row[column] == "1"})
        table.setdefault((row["model"], row["torch"], row["container"]), {})[recipe] = float(row["per_second"])
    return table


def space_of(cell: dict[Recipe, float], *, eval_required: bool = True) -> Space:
    """The switches that the cell knows. The source never ran channels_last with compile: exclusive, by rule."""
    tried = {item for recipe in cell for item in recipe.levels.items()}
    choices = {name: ("as-given", level) for name, (_, level) in SWITCHES.items() if (name, level) in tried}

    def conflict(recipe: Recipe) -> str:
        both = {"compile", "channels_last"} <= set(recipe.levels)
        return "compile and channels_last exclude each other in the source" if both else ""

    return Space(
        choices=choices,
        conflict=conflict,
        required=Recipe({"mode": "eval"}) if eval_required else Recipe(),
        cost=lambda recipe: 2 if "compile" in recipe.levels else 1,
    )
