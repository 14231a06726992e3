"""What does a level bring on an average model? Student's interval of the models' own means beside mixed models.

    python bench/model_means.py              # 200 studies of each kind; six minutes

In each made-up study a level is worth the same on an average model of an average machine, and models, machines and
what single measurements show differ from that by normal draws (logs). The mean is asked for

- *Student*: over the models' own means, each counting alike (the atlas, and studies on one kind of machine);
- *Student with machines*: the variance of the means by machine beside it (`fettle.studies.charts.on_average`);
- *mixed model*: statsmodels' `MixedLM` with the model, and where there are several the machine, as random effects, by
  restricted maximum likelihood, with its own interval.

On one machine models are compared in 1 to 40 pairs of recipes each, as in the atlas; on several once on each.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from statsmodels.regression.mixed_linear_model import MixedLM, VCSpec

from fettle.files import write_text
from fettle.measure import Interval
from fettle.studies.charts import on_average

RESULTS = Path(__file__).parent / "results"
LEVEL = ("a", "on")
PAIRS = (1, 2, 3, 5, 8, 13, 21, 40)
KINDS = (
    *((models, 1, between, 0.0) for models in (3, 5, 10, 16) for between in (0.02, 0.1, 0.4)),
    *((5, machines, 0.1, apart) for machines in (3, 5) for apart in (0.02, 0.1, 0.3)),
)
"""Models, machines, and the standard deviation (of a log) of what the level brings over each of them."""
WITHIN = 0.1
"""Standard deviation of one pair of recipes, or of one model on one machine, about its model's or machine's own."""


class Study:
    """One made-up study in which the level brings nothing on average: by row its gain, and whose it is."""

    def __init__(self, models: int, machines: int, between: float, apart: float, seed: int) -> None:
        random = np.random.default_rng(seed)
        counts = random.choice(PAIRS, models) if machines == 1 else [1] * models
        self.model = np.concatenate([np.repeat(place, count * machines) for place, count in enumerate(counts)])
        self.machine = np.concatenate([np.repeat(np.arange(machines), count) for count in counts])
        self.gain = random.normal(0, between, models)[self.model] + random.normal(0, apart, machines)[self.machine]
        self.gain += random.normal(0, WITHIN, len(self.gain))

    def means(self, of: np.ndarray) -> list[float]:
        return [float(self.gain[of == place].mean()) for place in np.unique(of)]


def student(study: Study, machines: Sequence[float] = ()) -> tuple[float, float]:
    """Ends of the interval."""
    models = [{LEVEL: Interval(math.exp(mean), 0.1, 10.0)} for mean in study.means(study.model)]
    found = on_average(models, {LEVEL: machines})[LEVEL]
    return math.log(found.low), math.log(found.high)


def with_machines(study: Study) -> tuple[float, float]:
    return student(study, study.means(study.machine))


def mixed(study: Study) -> tuple[float, float]:
    parts = [of for of in (study.model, study.machine) if len(np.unique(of)) > 1]
    mats = [[(of[:, None] == np.unique(of)).astype(float)] for of in parts]
    names = [[[str(one) for one in range(mat[0].shape[1])]] for mat in mats]
    ones = np.ones(len(study.gain))
    spec = VCSpec([str(place) for place in range(len(parts))], names, mats)
    result = MixedLM(study.gain, ones[:, None], ones, exog_vc=spec).fit(reml=True, method="powell")
    if not result.converged:
        raise ValueError("it did not converge")
    low, high = result.conf_int()[0]
    return float(low), float(high)


def judge(way: Callable[[Study], tuple[float, float]], studies: Sequence[Study]) -> dict[str, float | int]:
    """How often the intervals hold the truth, and how wide they are."""
    found, failed, began = [], 0, time.perf_counter()
    for study in studies:
        try:
            low, high = way(study)
        except (ValueError, np.linalg.LinAlgError):
            failed += 1
        else:
            if math.isfinite(low):
                found.append((low, high))
            else:
                failed += 1
    return {
        "hold the truth": round(sum(low <= 0 <= high for low, high in found) / max(1, len(found)), 3),
        "half width, median": round(statistics.median((high - low) / 2 for low, high in found), 4),
        "no interval": failed,
        "ms each": round(1e3 * (time.perf_counter() - began) / len(studies), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=200, help="of each kind")
    parser.add_argument("--output", type=Path, default=RESULTS / "model_means.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # a variance of zero is on the boundary
    rows = []
    for kind in KINDS:
        studies = [Study(*kind, seed) for seed in range(options.studies)]
        row = dict(zip(("models", "machines", "models differ", "machines differ"), kind, strict=True))
        row |= {"Student": judge(student, studies), "mixed model": judge(mixed, studies)}
        row |= {"Student with machines": judge(with_machines, studies)} if kind[1] > 1 else {}
        rows.append(row)
        print(json.dumps(row), flush=True)
    write_text(options.output, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
