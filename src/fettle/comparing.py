"""Comparing named recipes: one interleaved race, verdicts for each against the workload as given."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fettle.errors import UsageError
from fettle.files import plain
from fettle.machine import Machine, this_machine
from fettle.measure import Interval, Rules, Stop, Trial, close_all, verdict
from fettle.recipe import Recipe
from fettle.recipe_file import RecipeFile, read_recipe
from fettle.result import TIMES, Goal, Limits, goal_figure, needs_less
from fettle.techniques import batch_factor, canonical, conflict
from fettle.train import target_of, workload_of
from fettle.tuning import (
    WAITING,
    Effort,
    OnProgress,
    Options,
    Session,
    another_hour,
    check_options,
    check_ranks,
    misses_of,
    widened,
)
from fettle.workload import AUTO

REPLICATES = 4
"""Processes for each recipe of a comparison, where starting them is cheap: with a spread of 0.7% between processes of
the same code, four against four show a difference of 3% in nine comparisons of ten."""
MOST_REPLICATES = 6
"""The same where one process is slow for life, so that the slowest and the fastest of each recipe can be left out."""
_NARROW = Rules.indifference / 2
"""Half an interval that needs no more rounds. Where processes differ by more than their rounds, these end before."""
_MUCH = 1.5
"""How many times as wide an interval of other hours is that is worth a line."""
_WAIT_S = 30.0
"""Longest that a comparison waits for a quiet machine, all its slices together."""

AnyRecipe = Recipe | RecipeFile | str | Path
"""A recipe, its text (``"precision=bf16 compile=default"``), or the path of a ``recipe.toml``."""


@dataclass(frozen=True)
class Comparison:
    """What a comparison found; its `repr` says it in a line for each recipe."""

    name: str
    fingerprint: str
    machine: Machine
    trials: Sequence[Trial]
    """The workload as given first, then the recipes in the order they were named."""
    verdicts: Sequence[str]
    """For each trial against the first: ``faster``, ``same``, ``slower``, ``cannot tell``."""
    interrupted: bool = False
    """Ctrl-C ended the race: more rounds were to come."""
    left_out: Sequence[Recipe] = ()
    """Recipes for which there was no time."""
    goal: Goal = "throughput"
    """What the recipe was tuned for, where one is checked."""
    under_load: bool = False
    """Whether it is of time elapsed beside whatever else the machine did."""
    confidence: float = 0.95
    """Of the intervals."""

    def __repr__(self) -> str:
        from fettle.report import interval  # brings the charts' library

        lines = [
            f"{trial.recipe}: {word}, {interval(trial.speedup)}" if trial.ok else
            f"{trial.recipe}: {trial.status}, {trial.reason}"
            for trial, word in zip(self.trials, self.verdicts, strict=True)
        ]  # fmt: skip
        return "\n".join([f"{self.name}, beside the workload as given:", *lines[1:]])

    @property
    def another_hour(self) -> Interval | None:
        """What a race of another hour may say of the fastest recipe where others share the machine; None where this one
        leaves about as much open, and where none is faster."""
        faster = [trial.speedup for trial, word in zip(self.trials, self.verdicts, strict=True) if word == "faster"]
        best = max((ratio for ratio in faster if ratio is not None), key=lambda ratio: ratio.estimate, default=None)
        if best is None:
            return None
        wider = another_hour(best, self.confidence)
        return wider if math.log(wider.high / wider.low) > _MUCH * math.log(best.high / best.low) else None

    @property
    def failed(self) -> bool:
        """Whether a recipe did not run or gave wrong answers, or the workload as given did not run."""
        off = any(trial.status != "measured" for trial in self.trials[1:])
        return off or bool(self.left_out) or self.trials[0].status == "failed"

    @property
    def gains_nothing(self) -> bool:
        """Whether the first recipe is slower than the workload as given or, where the goal is no time, needs no less of
        what the goal asks for, as far as that was read."""
        given, recipe = self.trials[0], self.trials[1]
        if self.goal in TIMES:
            return self.verdicts[1] == "slower"
        is_read = all(math.isfinite(goal_figure(self.goal, trial) or math.nan) for trial in (given, recipe))
        return is_read and not needs_less(recipe, given, self.goal)


def bench(
    model: Any,
    recipes: AnyRecipe | Sequence[AnyRecipe],
    inputs: Any = None,
    *,
    call: Callable[..., Any] | None = None,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    mode: str = AUTO,
    nproc: int = 1,
    limits: Limits | None = None,
    confidence: float = 0.95,
    budget_s: float | None = None,
    trial_timeout_s: float = Options.trial_timeout_s,
    max_rounds: int = Rules.max_rounds,
    slice_s: float = Rules.slice_s,
    settle: bool = True,
    under_load: bool = False,
    polite: bool = False,
    on_progress: OnProgress = lambda event: None,
) -> Comparison:
    """Race `recipes` and the workload as given, side by side, until each verdict is known.

    ```python
    comparison = fettle.bench(model, ["precision=bf16", "precision=bf16 grad=inference_mode"], batches)
    for trial, verdict in zip(comparison.trials, comparison.verdicts):
        print(trial.recipe, trial.speedup, verdict)
    ```

    `model`, `inputs`, `call`, `metric` and `mode` are what `fettle.tune` takes: a live model with inputs, a `Workload`,
    a `TrainingWorkload`, or ``"file.py:factory"``. A recipe is a `Recipe`, its text, or the path of a ``recipe.toml``;
    one or several; those that need several ranks have `nproc` of them. The `limits` are those of `fettle.tune`, and a
    recipe that breaks one is rejected. `budget_s` is the time for the whole race, None or 0 for no limit; a recipe that
    is not ready within `trial_timeout_s` has failed. With `settle` the race goes on until each verdict is known;
    without, until the fastest is. With `under_load` time elapsed beside whatever else the machine does is compared;
    with `polite` no slice goes before other processes' work. Raises `UsageError` for a recipe that cannot work here.
    """
    several: Sequence[Any] = recipes if isinstance(recipes, (list, tuple)) else [recipes]
    options = Options(
        limits=limits or Limits(), budget_s=budget_s, confidence=confidence, nproc=nproc, under_load=under_load,
        polite=polite, trial_timeout_s=trial_timeout_s, effort=Effort(slice_s, max_rounds, REPLICATES),
    )  # fmt: skip
    workload = workload_of(model, inputs, call, metric, mode)
    return _race(workload, several, options, on_progress, settle=settle)


def check(
    model: Any,
    recipe: AnyRecipe,
    inputs: Any = None,
    *,
    call: Callable[..., Any] | None = None,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    mode: str = AUTO,
    nproc: int = 1,
    force: bool = False,
    budget_s: float | None = None,
    under_load: bool = False,
    polite: bool = False,
    on_progress: OnProgress = lambda event: None,
) -> Comparison:
    """Is a recipe still faster here, and are its answers still right?

    `model`, `inputs`, `call`, `metric` and `mode` are what `fettle.tune` takes. It is raced as by `bench`, for the
    goal, under the limits and, where it was found so, under the load that it was tuned for. One for several ranks needs
    `nproc` of them.

    A recipe file names the workload that it was found on: `UsageError` for another one, unless `force`.
    """
    file = read_recipe(recipe)
    limits, goal = Limits(), file.evidence.get("goal") or Options.goal
    if (kept := file.evidence.get("limits")) is not None:
        # Earlier versions took a limit that said nothing of what was tuned.
        idle = "min_agreement" if mode == "training" else ""
        names = [one.name for one in fields(Limits) if one.name in kept and one.name != idle]
        limits = Limits(**{"max_error": None, **{name: kept[name] for name in names}})
    options = Options(
        limits=limits, goal=goal, budget_s=budget_s, nproc=nproc, polite=polite,
        under_load=under_load or bool(file.evidence.get("under_load")),
        effort=Effort(rounds=Rules.max_rounds, replicates=REPLICATES),
    )  # fmt: skip
    workload = workload_of(model, inputs, call, metric, mode)
    fingerprint = "" if force else file.workload.get("fingerprint", "")
    return _race(workload, [file], options, on_progress, fingerprint=fingerprint)


def _race(
    workload: Any,
    recipes: Sequence[AnyRecipe],
    options: Options,
    on_progress: OnProgress,
    *,
    settle: bool = True,
    fingerprint: str = "",
) -> Comparison:
    """The race of a comparison. `fingerprint`, when given, is what the workload must be."""
    files = [read_recipe(recipe) for recipe in recipes]
    check_options(options)
    with tempfile.TemporaryDirectory(prefix="fettle-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        larger = any(batch_factor(file.recipe) > 1 for file in files)
        budget_s = options.budget_s  # the race's, not the session's
        options = replace(options, output=folder, budget_s=None, allow_batch=larger)
        session = Session(check_ranks(options, target_of(workload, folder)), options, on_progress)
        try:
            session.report("building the workload and its reference")
            session.open(this_machine(), fingerprint, searches=False)
            session.facts = replace(session.facts, learned=_learned(files))
            wanted = [canonical(item.recipe, session.facts) for item in files]
            for recipe in wanted:
                why_not = conflict(recipe, session.facts)
                if why_not:
                    raise UsageError(f"the recipe {recipe} cannot work here: {why_not}")
            session.patience.left_s = min(_WAIT_S, WAITING * budget_s) if budget_s else _WAIT_S
            stop = Stop(fewest_rounds=1)
            rules = replace(
                session.rules, settle_verdicts=settle, replicates=options.effort.replicates,
                further=(MOST_REPLICATES,) if settle else (), narrow=_NARROW, stop=stop,
                deadline=time.monotonic() + budget_s if budget_s else math.inf,
            )  # fmt: skip
            trials = session.run([Recipe(), *wanted], rules)
            if not trials:
                raise UsageError("there was no time to start the workload as given: give the race a larger `budget`")
        finally:
            close_all()
            session.let_go()
    limits = session.standings.limits
    trials = [trials[0], *(_within(trial, limits, options.goal) for trial in trials[1:])]
    if not rules.under_load:
        trials = [widened(trial, trials[0], rules.confidence) for trial in trials]
    verdicts = [
        "failed" if trial.status == "failed" else verdict(trial.speedup, rules.indifference) for trial in trials
    ]
    return Comparison(
        session.target.name, session.probed.fingerprint, this_machine(), trials, verdicts, stop.asked,
        wanted[len(trials) - 1 :], options.goal, options.under_load, rules.confidence,
    )  # fmt: skip


def _within(trial: Trial, limits: Limits, goal: Goal) -> Trial:
    """A trial, rejected where it breaks a limit on time or memory."""
    broken = misses_of(trial, limits, goal) if trial.ok else ""
    return replace(trial, status="rejected", reason=broken) if broken else trial


def _learned(files: Sequence[RecipeFile]) -> dict[str, Any]:
    """What the recipes' levels have found out. Raises `UsageError` where two go by different findings of one kind."""
    learned: dict[str, Any] = {}
    for key, found in (item for file in files for item in file.learned.items()):
        if learned.setdefault(key, found) != found:
            raise UsageError(f"two of the recipes hold different {key}: compare each with the workload as given alone")
    return learned


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain data."""
    return {
        "name": comparison.name,
        "goal": comparison.goal,
        "under_load": comparison.under_load,
        "machine": plain(comparison.machine),
        "interrupted": comparison.interrupted,
        "another_hour": plain(comparison.another_hour),
        "left_out": [dict(recipe.levels) for recipe in comparison.left_out],
        "trials": [
            {**trial.to_json(), "verdict": word}
            for trial, word in zip(comparison.trials, comparison.verdicts, strict=True)
        ],
    }
