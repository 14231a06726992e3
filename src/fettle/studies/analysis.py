"""The analysis of a study: for each group and each response a fit, what it says, and whether to believe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.trial import create_trial

from fettle.studies.checks import Checks, Doubt, check
from fettle.studies.effects import Effect, effects, shares
from fettle.studies.model import NEVER_APART, Level, Model, fit, holds
from fettle.studies.pooled import Pooled, pool
from fettle.studies.sentences import Sentence, sentences
from fettle.studies.table import MACHINE, Response, Table


@dataclass(frozen=True)
class Analysis:
    """One response of one group."""

    group: str
    response: Response
    experiments: int
    """How many have the response."""
    missing: int
    """How many have not: they failed, and are nowhere in the fit."""
    effects: tuple[Effect, ...] = ()
    shares: Mapping[tuple[str, ...], float] = field(default_factory=dict)
    """By factor or pair: share of variance explained."""
    sentences: tuple[Sentence, ...] = ()
    checks: Checks | None = None
    """None where there is no fit."""
    why_not: str = ""
    """Why there is no fit."""
    pooling: str = ""
    """For a study on several machines, how they were pooled, or why not."""
    spreads: Mapping[Level, float] = field(default_factory=dict)
    """By level: standard deviation of its gain from machine to machine, as a factor; where machines were pooled."""
    model: Model | None = field(default=None, compare=False, repr=False)
    """With the machine as an ordinary factor: the residuals and shares are its."""

    @property
    def title(self) -> str:
        """What it is of, and what its ratios count."""
        name = f"{self.group}: {self.response.name}" if self.group else self.response.name
        return name if self.response.better == "better" else f"{name}, as times {self.response.better}"

    @cached_property
    def importance(self) -> Mapping[str, float]:
        """By factor: what Optuna's functional ANOVA says; empty where there is no fit or scikit-learn is missing."""
        return importance(self.model) if self.model is not None else {}

    @property
    def dominant(self) -> list[str]:
        """The factors by the share of variance that each explains, half of each of its pairs with it, largest first."""
        most: dict[str, float] = {}
        for names, share in self.shares.items():
            for name in names:
                most[name] = most.get(name, 0.0) + share / len(names)
        return sorted(most, key=lambda name: -most[name])

    @property
    def surprises(self) -> list[Sentence]:
        """What hurts, what needs what, what cancels: largest first."""
        return [sentence for sentence in self.sentences if sentence.is_surprise]


def analyse(table: Table) -> list[Analysis]:
    """Analyse each group and response of a table. Raises `UsageError` where statsmodels is not installed."""
    return [_analyse(table, group, response) for group in table.groups for response in table.responses]


def _analyse(table: Table, group: str, response: Response) -> Analysis:
    rows = table.of(group)
    known = sum(row.value(response.name) is not None for row in rows)
    missing = len(rows) - known
    model = fit(table, group, response)
    if model is None:
        too_few = "it takes three experiments in which a factor and the result vary"
        why = too_few if known else "nothing was measured"
        return Analysis(group, response, known, missing, why_not=why)
    pooled = pool(table, group, response) if MACHINE in model.levels else ""
    fitted, spreads = (pooled.model, pooled.spreads) if isinstance(pooled, Pooled) else (model, {})
    estimated = effects(fitted)
    return Analysis(
        group, response, known, missing, tuple(estimated), shares(model), tuple(sentences(fitted, estimated)),
        _checked(table, model), pooling=str(pooled), spreads=spreads, model=model,
    )  # fmt: skip


_LISTED = 6
"""Levels that were never varied apart and are named, with those they came with."""


def _checked(table: Table, model: Model) -> Checks:
    """What the residuals say, after what the levels that were tried say: a factor that was never as given, and levels
    that were never apart."""
    checks = check(model)
    doubts = [
        Doubt(f"{name}={table.factors[name][0]} was not measured here: effects of {name} are over {name}={levels[0]}")
        for name, levels in model.levels.items() if levels[0] != table.factors[name][0]
    ]  # fmt: skip
    together = []
    for term in (term for term, why in model.left_out.items() if len(term) == 1 and why == NEVER_APART):
        rows = {place for place, row in enumerate(model.rows) if holds(row, term)}
        twins = [
            "=".join(other[0]) for other in model.columns
            if len(other) == 1 and rows == {place for place, row in enumerate(model.rows) if holds(row, other)}
        ]  # fmt: skip
        together.append(f"{'='.join(term[0])} from {' and '.join(twins) or 'other levels'}")
    if together:
        more = f" and {len(together) - _LISTED} more" if together[_LISTED:] else ""
        listed = ", ".join(together[:_LISTED]) + more
        doubts.append(Doubt(f"never varied apart: {listed}; what is said of one may be due to the other"))
    return replace(checks, doubts=(*doubts, *checks.doubts))


_TREES, _DEPTH = 32, 8
"""On 5,000 rows of eight factors full depth told every share within 0.003 of this, in ten times the seconds."""


def importance(model: Model) -> dict[str, float]:
    """The importance of each factor by another method, Optuna's functional ANOVA (Hutter, Hoos and Leyton-Brown,
    *ICML*, 2014), adding up to 1, largest first; empty where scikit-learn is not installed, or fewer than two factors
    vary.

    It is what a factor does on average over the others, like its own share of variance, but by a random forest in place
    of a linear model; it says nothing of direction or of how sure that is. Levels are numbered by their means, among
    which trees split as well as among all groups of levels (Breiman et al., *Classification and Regression Trees*,
    1984, 9.4): with a column for each, Optuna's work doubles with every level.
    """
    if len(model.levels) < 2:
        return {}
    places = {name: _by_mean(model, name) for name in model.levels}
    varied: Mapping[str, BaseDistribution] = {
        name: FloatDistribution(-0.5, len(numbers) - 0.5) for name, numbers in places.items()
    }
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    study.add_trials([
        create_trial(params={name: numbers[row.levels[name]] for name, numbers in places.items()},
                     distributions=dict(varied), value=float(value))
        for row, value in zip(model.rows, model.y, strict=True)
    ])  # fmt: skip
    try:
        importances = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.FanovaImportanceEvaluator(n_trees=_TREES, max_depth=_DEPTH, seed=0)
        )
    except ImportError:
        return {}
    return {name: float(value) for name, value in importances.items()}


def _by_mean(model: Model, name: str) -> dict[str, float]:
    """The levels of a factor, numbered by the mean response."""
    costs: dict[str, list[float]] = {}
    for row, cost in zip(model.rows, model.y, strict=True):
        costs.setdefault(row.levels[name], []).append(float(cost))
    ranked = sorted(costs, key=lambda level: (fmean(costs[level]), level))
    return {level: float(place) for place, level in enumerate(ranked)}
