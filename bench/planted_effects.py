"""Do the effects of a study come back, are their intervals as sure as they say, and is the surprise found first?

Each made-up study has known main effects and two-way interactions, one of them a planted surprise, and noise; the same
code that analyses a study reads it. Three designs (every combination of four switches; of three with every cell twice,
one factor of three levels; a balanced two thirds of six switches, 43 cells) times three noises: normal, Student's t
with 4 degrees of freedom, and real: drawn from the log ratios of 100 races of a model against itself
(`measurement.json`). Each at 1% and at 3%: two processes of the same code differ by about as much.

    python bench/planted_effects.py              # 1,000 studies of each design and noise; three minutes
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np

from fettle.search import Space, combinations_of
from fettle.studies.effects import effects
from fettle.studies.model import Level, Term, fit
from fettle.studies.sentences import sentences
from fettle.studies.table import Experiment, Response, Table

RESULTS = Path(__file__).parent / "results"
RESPONSE = Response("time_ms", better="faster")
DESIGNS = ("four switches", "three levels, twice", "two thirds of six")
NOISES = ("normal", "student", "recorded")
KINDS = ("needs", "hurts", "cancels")


@dataclass(frozen=True)
class Planted:
    """A study whose truth is known."""

    table: Table
    gains: Mapping[Term, float]
    """By term: log gain of a level where all else is as given, or beyond that of two together."""
    surprise: Term


def plant(design: str, noise: str, spread: float, seed: int, kind: str | None = None) -> Planted:
    """One study: a surprise of the `kind` (by the seed where none is named), other effects of up to 1.6x, some none."""
    random = np.random.default_rng(seed)
    factors, rows = _rows(design, random)
    gains: dict[Term, float] = {
        ((name, level),): float(random.choice([0.0, random.uniform(0.05, 0.47)]))
        for name, levels in factors.items() for level in levels[1:]
    }  # fmt: skip
    names = list(random.permutation(list(factors)))
    one, two = (_switched(name, factors) for name in names[:2])
    pair: Term = (one, two) if list(factors).index(one[0]) < list(factors).index(two[0]) else (two, one)
    small: Term = tuple((name, levels[1]) for name, levels in factors.items() if name in names[1:3])
    gains[small] = math.log(1.05) * float(random.choice([-1, 1]))
    kind = kind or KINDS[seed % len(KINDS)]
    surprise: Term = pair
    if kind == "needs":
        gains |= {(one,): 0.0, (two,): 0.15, pair: math.log(1.5)}
    elif kind == "cancels":
        gains |= {(one,): math.log(1.4), (two,): math.log(1.4), pair: -math.log(1.4)}
    else:
        surprise = (one,)
        gains[surprise] = -math.log(1.3)
    made = []
    for row in rows:
        gain = sum(value for term, value in gains.items() if all(row[name] == level for name, level in term))
        made.append(Experiment(row, {RESPONSE.name: 20.0 * math.exp(-gain + spread * _noise(noise, random))}))
    return Planted(Table(factors, (RESPONSE,), tuple(made)), gains, surprise)


def truth(planted: Planted, term: Term) -> float:
    """What an effect should come to: a main effect is averaged over the levels of the other factors."""
    found = planted.gains.get(term, 0.0)
    if len(term) == 1:
        for pair, gain in planted.gains.items():
            other = [level for level in pair if level != term[0]]
            if len(pair) == 2 and term[0] in pair:
                found += gain / len(planted.table.factors[other[0][0]])
    return found


def judge(planted: Planted) -> tuple[int, int, int, bool]:
    """Intervals that hold the truth, intervals in all, false claims, and whether the first sentence is the surprise."""
    model = fit(planted.table, "", RESPONSE)
    assert model is not None
    found = effects(model)
    said = sentences(model, found)
    held = told = wrong = 0
    for effect in found:
        if effect.ratio is None:
            continue
        true = truth(planted, effect.levels)
        told += 1
        held += math.log(effect.ratio.low) <= true <= math.log(effect.ratio.high)
        wrong += effect.is_claimed and abs(true) < 1e-12
    first = said[0] if said else None
    return held, told, wrong, first is not None and set(first.levels) == set(planted.surprise)


def _switched(name: str, factors: Mapping[str, tuple[str, ...]]) -> Level:
    return str(name), factors[str(name)][1]


def _rows(design: str, random: np.random.Generator) -> tuple[dict[str, tuple[str, ...]], list[dict[str, str]]]:
    if design == "three levels, twice":
        factors = {"a": ("off", "on"), "b": ("off", "on"), "c": ("given", "one", "two")}
    else:
        factors = dict.fromkeys("abcd" if design == "four switches" else "abcdef", ("off", "on"))
    rows = [dict(zip(factors, levels, strict=True)) for levels in product(*factors.values())]
    if design == "three levels, twice":
        rows *= 2
    if design == "two thirds of six":
        rows = [rows[place] for place in _balanced("abcdef", 43)]
    return factors, [rows[place] for place in random.permutation(len(rows))]


@lru_cache
def _balanced(names: str, most: int) -> list[int]:
    """The fraction that a study of these switches would take: places among all combinations."""
    space = Space(dict.fromkeys(names, ("off", "on")), lambda recipe: "")
    chosen = [{**dict.fromkeys(names, "off"), **recipe.levels} for recipe in combinations_of(space, most)]
    rows = [dict(zip(names, levels, strict=True)) for levels in product(("off", "on"), repeat=len(names))]
    return [place for place, row in enumerate(rows) if row in chosen]


def _noise(name: str, random: np.random.Generator) -> float:
    """One draw with standard deviation 1."""
    if name == "normal":
        return float(random.normal())
    if name == "student":
        return float(random.standard_t(4) / math.sqrt(2))
    return float(random.choice(_RECORDED))


def _recorded() -> np.ndarray:
    seen = json.loads((RESULTS / "measurement.json").read_text())["seen"]["same"]
    logs = np.log([row[0] for row in seen])
    return (logs - logs.mean()) / logs.std()


_RECORDED = _recorded()


def summary(design: str, noise: str, spread: float, studies: int) -> dict[str, float | str | int]:
    """Many studies of one kind."""
    found = [judge(plant(design, noise, spread, seed)) for seed in range(studies)]
    held, told, first = (sum(one[place] for one in found) for place in (0, 1, 3))
    return {
        "design": design, "noise": noise, "spread": spread, "studies": studies, "intervals": told,
        "intervals that hold the truth": round(held / told, 4),
        "studies with a false claim": round(sum(one[2] > 0 for one in found) / studies, 4),
        "surprise first": round(first / studies, 4),
        "surprise first, by kind": {
            kind: round(Counter(seed % 3 for seed in range(studies) if found[seed][3])[place]
                        / len(range(place, studies, 3)), 3)
            for place, kind in enumerate(KINDS)
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1_000, help="of each design, noise and spread")
    parser.add_argument("--output", type=Path, default=RESULTS / "planted_effects.json")
    options = parser.parse_args()
    rows = []
    for design, noise, spread in product(DESIGNS, NOISES, (0.01, 0.03)):
        rows.append(summary(design, noise, spread, options.studies))
        print(rows[-1], flush=True)
    options.output.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
