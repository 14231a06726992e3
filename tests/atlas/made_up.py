"""An atlas whose truth is known: models of one kind gain from bf16, those of the other from channels_last."""

import itertools
import math
import random

from fettle.atlas import Row, Subject, rows_of
from fettle.measure import Interval, Trial
from fettle.recipe import Recipe

LEVELS = {
    "precision": ["bf16", "autocast-bf16"], "compile": ["default"], "channels_last": ["on"], "threads": ["1"],
    "matmul": ["medium"],
}  # fmt: skip
DEAR_S = 40.0


def gain(recipe: Recipe, kind: float) -> float:
    """Log of the speed-up on a model that is convolutional to the degree `kind`, 0 to 1."""
    alone = {"precision=bf16": 0.9 - 0.3 * kind, "precision=autocast-bf16": 0.5, "compile=default": 0.3,
             "channels_last=on": 0.6 * kind - 0.1, "threads=1": -0.5, "matmul=medium": 0.0}  # fmt: skip
    names = [f"{name}={level}" for name, level in recipe.levels.items()]
    fight = -0.25 if {"compile=default", "precision=autocast-bf16"} <= set(names) else 0.0
    return sum(alone.get(name, 0.0) for name in names) + fight


def recipes() -> list[Recipe]:
    """Every combination."""
    choices = [[None, *levels] for levels in LEVELS.values()]
    return [Recipe({name: level for name, level in zip(LEVELS, row, strict=True) if level})
            for row in itertools.product(*choices)]  # fmt: skip


def about(name: str, kind: float, machine: str = "here", **more) -> Subject:
    return Subject(
        workload=name, fingerprint=name, family="convolutional" if kind > 0.5 else "transformer", mode="inference",
        device="cpu", dtype="float32", flops=1e9, convolution=kind, matrix=0.5, machine=machine, cpu="made up",
        cores=2.0, torch="2.13", **more,
    )  # fmt: skip


def trial(recipe: Recipe, log: float, error: float = 0.02) -> Trial:
    ratio = math.exp(log)
    if not recipe.levels:
        return Trial(recipe, "measured", time_ms=100.0, start_s=4.0)
    return Trial(recipe, "measured", time_ms=100 / ratio, start_s=DEAR_S if "compile" in recipe.levels else 4.0,
                 speedup=Interval(ratio, ratio * math.exp(-2 * error), ratio * math.exp(2 * error)))  # fmt: skip


def atlas(models: int = 6, tried: int = 30, sign: float = 1.0, seed: int = 0) -> list[Row]:
    """Rows of models of both kinds; with another `sign` everything is the other way round."""
    rows = []
    for number in range(models):
        rng, kind = random.Random(f"{seed} {number}"), number % 2 * 1.0
        some = [recipe for recipe in rng.sample(recipes(), tried) if recipe.levels]
        trials = [trial(recipe, sign * gain(recipe, kind) + rng.gauss(0, 0.02)) for recipe in some]
        rows += rows_of(about(f"model{number}", kind), [trial(Recipe(), 0.0), *trials])
    return rows
