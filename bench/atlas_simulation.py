"""What foresight is worth where the truth is known: made-up studies of made-up models, one left out at a time.

    python bench/atlas_simulation.py --models 12

The models share the mean of what each level and each pair of levels brings, and differ by as much as models do. Of each
the atlas has 60 of 102 recipes, measured with an error of 2%. Processes, rounds and seconds are those of the real
session and race in a world whose clock is made up (``tests/tuning/simulated.py``): a busy machine changes nothing here.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests" / "tuning")]

# ruff: noqa: E402
from simulated import LEVELS, World, made_up_space, session_in

from fettle.atlas import rows_of, subject
from fettle.atlas.prediction import Predictor
from fettle.files import write_text
from fettle.machine import Machine
from fettle.measure import Interval, Trial
from fettle.recipe import Recipe
from fettle.search import Guide, auto, combinations_of, with_required

MEAN = {
    "grad=inference_mode": 0.05, "matmul=medium": 0.0, "precision=bf16": 0.6, "precision=autocast-bf16": 0.4,
    "compile=default": 0.3, "freeze=on": 0.15, "runtime=openvino-bf16": 0.9, "runtime=onnxruntime": 0.2,
    "channels_last=on": 0.1, "threads=1": -0.3, "mode=eval": 0.02,
}  # fmt: skip
"""Log gain of each level, over models."""
READY_S = {1: 1.0, 2: 15.0, 3: 30.0}
TRIED = 60
_MACHINE = Machine("made-up", "made up", 2, 1, (), "none", "3")


class Patch:
    """What `World.install` asks of pytest's monkeypatch."""

    def setattr(self, where, name, value) -> None:
        setattr(where, name, value)


class Model:
    """One made-up model."""

    def __init__(self, seed: int) -> None:
        own, shared = random.Random(seed), random.Random(5)
        self.name, self.kind, self.seed = f"model{seed}", own.random(), seed
        kinds = lambda level: 0.3 * (self.kind - 0.5) * (level.startswith("channels") or "bf16" in level)  # noqa: E731
        self.alone = {level: gain * own.lognormvariate(0, 0.3) + own.gauss(0, 0.08) + kinds(level)
                      for level, gain in MEAN.items()}  # fmt: skip
        names = sorted(MEAN)
        self.pairs = {frozenset((one, other)): shared.gauss(0, 0.12) + own.gauss(0, 0.04)
                      for place, one in enumerate(names) for other in names[place + 1 :]}  # fmt: skip
        self.given_ms = 20 * own.lognormvariate(0, 0.5)

    def time_ms(self, recipe: Recipe) -> float:
        levels = [f"{name}={level}" for name, level in recipe.levels.items()]
        gain = sum(self.alone.get(level, 0.0) for level in levels)
        gain += sum(self.pairs.get(frozenset((one, other)), 0.0)
                    for place, one in enumerate(levels) for other in levels[place + 1 :])  # fmt: skip
        return self.given_ms * math.exp(-gain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=12)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "atlas_simulation.json")
    options = parser.parse_args()
    LEVELS["threads"] = ["as-given", "1"]
    space, facts = made_up_space()
    every = [with_required(space, recipe) if recipe.levels else recipe for recipe in combinations_of(space, 10**6)]
    ready = lambda recipe: READY_S[space.cost(recipe)]  # noqa: E731
    models = [Model(seed) for seed in range(options.models)]
    about = {model.name: subject(model.name, model.name, facts, {"convolution": model.kind, "flops": 1e9},
                                 _MACHINE, {}, "made up") for model in models}  # fmt: skip
    rows = {model.name: rows_of(about[model.name], _recorded(model, every, ready)) for model in models}
    found = {}
    for model in models:
        best = min(map(model.time_ms, every))
        others = [row for name, own in rows.items() if name != model.name for row in own]
        found[model.name] = {}
        for way in ("without", "with"):
            world = World(model.time_ms, ready, seed=model.seed)
            world.install(Patch())
            with tempfile.TemporaryDirectory() as folder:
                session = session_in(world, Path(folder), None, facts)
                session.measure([Recipe()])
                guide = None
                if way == "with":
                    predictor = Predictor(others, about[model.name], max_error=0.02, guess_s=_guess(session))
                    guide = Guide(predictor)
                leader = auto(replace(space, cost=session.costs.of), session, guide=guide)
                assert leader is not None
                found[model.name][way] = {"seconds": round(world.now), "trials": len(session.standings.known),
                                          "regret": round(model.time_ms(leader.recipe) / best, 4)}  # fmt: skip
        print(model.name, json.dumps(found[model.name]), flush=True)
    shares = [one["with"]["seconds"] / one["without"]["seconds"] for one in found.values()]
    near = {way: sum(one[way]["regret"] <= 1.03 for one in found.values()) for way in ("without", "with")}
    result = {
        "combinations": len(every), "models": found, "of": len(found), "within 3% of the best": near,
        "share of seconds, median": round(statistics.median(shares), 3),
        "share of seconds, least and most": [round(min(shares), 3), round(max(shares), 3)],
    }  # fmt: skip
    write_text(options.output, json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "models"}, indent=1))


def _guess(session):
    return lambda recipe: session.costs.seconds_for(recipe, 6)


def _recorded(model: Model, every, ready) -> list[Trial]:
    rng = random.Random(model.seed)
    found = [Trial(Recipe(), "measured", time_ms=model.given_ms, start_s=5.0)]
    for recipe in rng.sample([recipe for recipe in every if recipe.levels], TRIED):
        ratio = model.given_ms / model.time_ms(recipe) * math.exp(rng.gauss(0, 0.02))
        found.append(Trial(recipe, "measured", time_ms=model.given_ms / ratio, start_s=4 + ready(recipe),
                           speedup=Interval(ratio, ratio / 1.04, ratio * 1.04)))  # fmt: skip
    return found


if __name__ == "__main__":
    main()
