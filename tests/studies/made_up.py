"""Tables of experiments whose truth is known."""

import itertools
import math
import random

from fettle.studies.table import Experiment, Response, Table

TIME = Response("time_ms", better="faster")


def table(gains, factors, *, noise=0.0, repeats=1, seed=0, skip=lambda on: False, errors=None, apart=()):
    """Every combination of the levels of `factors`, less those to `skip`. `gains`: log gain by the levels it needs,
    written ``"a=on"`` or ``"a=on b=on"``."""
    rng = random.Random(seed)
    rows = []
    for levels in itertools.product(*factors.values()):
        row = dict(zip(factors, levels, strict=True))
        on = {f"{name}={level}" for name, level in row.items()}
        if skip(on):
            continue
        gain = sum(value for term, value in gains.items() if set(term.split()) <= on)
        rows += [
            Experiment(row, {TIME.name: 100 * math.exp(-gain + rng.gauss(0, noise))}, errors=errors or {})
            for _ in range(repeats)
        ]
    return Table(factors, (TIME,), tuple(rows), apart=frozenset(apart))


def switches(names):
    return dict.fromkeys(names, ("off", "on"))
