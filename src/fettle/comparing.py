"""Comparing named recipes: one interleaved race, verdicts for each against the workload as given."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fettle.errors import UsageError
from fettle.machine import Machine, this_machine
from fettle.measure import Rules, Trial, close_all, verdict
from fettle.recipe import Recipe
from fettle.result import Limits
from fettle.study import storage_url
from fettle.techniques import conflict, normal
from fettle.tuning import WAITING, Session, Tell
from fettle.workload import Target, find_target

REPLICATES = 4
"""Processes for each recipe of a comparison, where starting them is cheap: with a spread of 0.7% between processes of
the same code, four against four show a difference of 3% in nine comparisons of ten."""
MOST_REPLICATES = 6
"""The same where one process is slow for life, so that the slowest and the fastest of each recipe can be left out."""

_WAIT_S = 60.0
"""Longest that a comparison waits for a quiet machine, all its slices together."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found."""

    name: str
    fingerprint: str
    machine: Machine
    trials: Sequence[Trial]
    """The workload as given first, then the recipes in the order they were named."""
    verdicts: Sequence[str]
    """For each trial against the first: ``faster``, ``same``, ``slower``, ``cannot tell``."""

    @property
    def failed(self) -> bool:
        """Whether a recipe did not run or gave wrong answers."""
        return any(trial.status != "measured" for trial in self.trials[1:])


def bench(
    target: str | Target,
    recipes: Sequence[Recipe],
    *,
    limits: Limits | None = None,
    confidence: float = 0.95,
    budget_s: float | None = None,
    max_rounds: int = 48,
    slice_s: float = Rules.slice_s,
    settle: bool = True,
    fingerprint: str = "",
    int8_layers: Sequence[int] = (),
    under_load: bool = False,
    tell: Tell = lambda event: None,
) -> Comparison:
    """Race `recipes` and the workload as given, side by side, until each verdict is known.

    With `settle` the race goes on until each verdict is known; without, until the fastest is. `fingerprint`, when
    given, is what the workload must be. `int8_layers` are those that runtime=openvino-int8-part has chosen already; by
    default each of its processes chooses. With `under_load` nothing waits for a quiet machine and time elapsed decides.
    Raises `UsageError` for a recipe that cannot work here.
    """
    found = find_target(target) if isinstance(target, str) else target
    with tempfile.TemporaryDirectory(prefix="fettle-", ignore_cleanup_errors=True) as folder:
        session = Session(
            found, Path(folder), limits or Limits(), "throughput", None, time.monotonic(), tell, confidence,
            under_load=under_load,
        )  # fmt: skip
        try:
            session.tell("building the workload and its reference")
            storage = storage_url(None, Path(folder))
            session.open(found.name or "bench", storage, this_machine(), allow_batch=True, fingerprint=fingerprint)
            session.facts = replace(session.facts, int8_layers=tuple(int8_layers))
            for recipe in recipes:
                why_not = conflict(normal(recipe), session.facts)
                if why_not:
                    raise UsageError(f"the recipe {recipe} cannot work here: {why_not}")
            session.patience.left_s = _WAIT_S if budget_s is None else min(_WAIT_S, WAITING * budget_s)
            rules = replace(session.rules, settle_verdicts=settle, max_rounds=max_rounds, slice_s=slice_s)
            rules = replace(rules, replicates=REPLICATES, most_replicates=MOST_REPLICATES if settle else REPLICATES)
            if budget_s is not None:
                rules = replace(rules, deadline=time.monotonic() + budget_s)
            trials = session.run([Recipe(), *(normal(recipe) for recipe in recipes)], rules)
        finally:
            close_all()
    verdicts = ["same"] + [
        verdict(trial.speedup, rules.indifference) if trial.status != "failed" else "failed" for trial in trials[1:]
    ]
    return Comparison(found.name, session.probed.fingerprint, this_machine(), trials, verdicts)


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain data."""
    import msgspec

    return {
        "workload": comparison.name,
        "machine": msgspec.to_builtins(comparison.machine),
        "trials": [
            {**trial.to_json(), "verdict": word}
            for trial, word in zip(comparison.trials, comparison.verdicts, strict=True)
        ],
    }
