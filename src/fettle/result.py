"""What a tuning comes to: everything the report, the table and the JSON show. Plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from fettle.errors import UsageError
from fettle.generate.quality import MAX_KL
from fettle.measure import Interval, Trial, verdict
from fettle.recipe import Recipe
from fettle.techniques import Facts, handed_on

Goal = Literal["throughput", "latency", "memory", "energy", "startup", "warm-startup", "ttft", "tpot"]
TIMES: frozenset[Goal] = frozenset({"throughput", "latency", "ttft", "tpot"})
"""Goals that are times, which races compare."""
Verdict = Literal["faster", "same", "slower", "cannot tell"]
Kind = Literal["inference", "training", "text"]
"""What is tuned: its answers, its losses or what it writes is judged, each in a unit of its own."""
MAX_ERROR = 0.02
_USUAL: Mapping[Kind, float] = {"inference": MAX_ERROR, "training": 1.0, "text": MAX_KL}


def goal_figure(goal: Goal, trial: Trial) -> float | None:
    """What the goal asks to be small, NaN where it is not known; None for goals that are times, which races compare.
    Energy is that of a row: a recipe may have larger batches."""
    energy = None if trial.energy_j is None else trial.energy_j / trial.samples
    values = {"memory": trial.peak_bytes, "energy": energy, "startup": trial.startup.total_s,
              "warm-startup": trial.startup.again_s}  # fmt: skip
    if goal not in values:
        return None
    value = values[goal]
    return float(value) if value is not None and math.isfinite(value) and value > 0 else math.nan


def call_ms(goal: Goal, trial: Trial) -> float:
    """Time of a whole call, also where the race goes by a part of each text."""
    text = trial.generation if goal in ("ttft", "tpot") else None
    return trial.time_ms if text is None else text.text_ms


LEAST = 1.01
"""A figure that is no time is smaller by so much where that is announced."""


def needs_less(trial: Trial, given: Trial, goal: Goal) -> bool:
    """Whether what the goal asks to be small, which is no time, is smaller than of the workload as given by a factor of
    `LEAST`; of memory, which each process has read, whether it is so of any two."""
    if goal == "memory" and trial.peaks_bytes and given.peaks_bytes:
        return LEAST * max(trial.peaks_bytes) <= min(given.peaks_bytes)
    own, theirs = goal_figure(goal, trial), goal_figure(goal, given)
    return own is not None and theirs is not None and LEAST * own <= theirs


class Usual(float):
    """The usual limit on the error, where the user gave none."""

    def __repr__(self) -> str:
        return f"Usual({float(self):g})"


@dataclass(frozen=True)
class Limits:
    """What a recipe must keep to be allowed to win. None means no limit."""

    max_error: float | None = field(default_factory=lambda: Usual(MAX_ERROR))
    """Relative L2 error against the reference, 0.02; where text is written the mean Kullback-Leibler divergence from it
    in nats per token, 0.01; in training the distance of the losses from the baseline's, in units of the typical
    distance of two seeds, 1. Where it is not given and `max_metric_drop` or `exact` is, only that decides."""
    min_agreement: float | None = None
    """Share of equal top-1 decisions, for classifiers."""
    max_metric_drop: float | None = None
    """How far the user's metric may fall below the reference's, in the metric's own unit."""
    max_latency_ms: float | None = None
    """Median time of one call; of a text all of it, whatever part the goal is about."""
    max_memory_bytes: int | None = None
    min_throughput: float | None = None
    """Samples a second; tokens where text is written."""
    max_ttft_ms: float | None = None
    """Text: time to the first token,"""
    max_tpot_ms: float | None = None
    """and time per output token after it."""
    exact: bool = False
    """Text: each token that is written must be the reference's."""
    max_kl: float | None = None
    """`max_error` by another name, for text. None: not given."""
    max_spread: float | None = None
    """`max_error` by another name, for training. None: not given."""

    def __post_init__(self) -> None:
        if isinstance(self.max_error, Usual) and (self.max_metric_drop is not None or self.exact):
            object.__setattr__(self, "max_error", None)

    def of(self, kind: Kind) -> Limits:
        """The limits as they hold for what is tuned. Raises `UsageError` for one that says nothing of it."""
        for name, kinds in _ONLY.items():
            if getattr(self, name) not in (None, False) and kind not in kinds:
                raise UsageError(f"the limit `{name}` is for {_CALLED[kinds[0]]}")
        name, named = ("max_kl", self.max_kl) if kind == "text" else ("max_spread", self.max_spread)
        is_given = self.max_error is not None and not isinstance(self.max_error, Usual)
        if named is not None and is_given:
            raise UsageError(f"`max_error` and `{name}` are the same limit here: give one of them")
        usual = _USUAL[kind] if isinstance(self.max_error, Usual) else self.max_error
        return replace(self, max_error=usual if named is None else named, max_kl=None, max_spread=None)

    def above(self, noise: float) -> Limits:
        """The limits for a model whose own answers differ by `noise` from run to run: that much more is allowed."""
        return self if self.max_error is None else replace(self, max_error=self.max_error + noise)

    def drowned(self, noise: float) -> list[str]:
        """That the limit on the error decides little, where a model's own answers differ by more than that."""
        if self.max_error is None or self.max_metric_drop is not None or noise <= self.max_error:
            return []
        return [
            f"the model's answers differ by {noise:.2g} from seed to seed, more than the error that is allowed, "
            f"{self.max_error:g}: recipes cannot be judged by it; give the workload a metric, and say how far it may "
            "fall, `max_metric_drop`"
        ]


_ONLY: Mapping[str, tuple[Kind, ...]] = {
    "max_kl": ("text",), "max_ttft_ms": ("text",), "max_tpot_ms": ("text",), "exact": ("text",),
    "max_spread": ("training",), "min_agreement": ("inference", "text"),
}  # fmt: skip
_CALLED: Mapping[Kind, str] = {
    "text": "a fettle.GenerationWorkload: give the workload new_tokens", "training": "a training loop",
    "inference": "inference",
}  # fmt: skip


def limits_given(**values: Any) -> Limits:
    """The limits that were given; what is None was not, and has its usual limit."""
    return Limits(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class Reference:
    """What the answers are judged against, and how far the workload as given is from it."""

    dtype: str = "float64"
    why: str = ""
    """Why it is not float64, where it is not."""
    noise: float = 0.0
    """Relative L2 error between two runs of the reference model with other seeds: what a recipe may be off by in
    addition to the limit, for no recipe can be nearer to a model that is random than that model is to itself."""
    metric: float = math.nan
    """The user's metric of the reference."""
    curves: Sequence[Sequence[float]] = ()
    """Training: the losses of the baseline, and of the baseline from other seeds."""
    perplexity: float = math.nan
    """Text: the reference's."""
    prefill_flops: int = 0
    """Text: what a prompt and a step compute, all rows, on the mean over the prompts; 0 where that is not known."""
    decode_flops: int = 0
    spread: float = math.nan
    """Training: typical distance of the losses of two seeds, the mean over the steps."""


@dataclass(frozen=True)
class LeftOut:
    """A level that was never tried, and the rule that says why."""

    technique: str
    level: str
    why: str


ALONE = Interval(1.0, 1.0, 1.0)
"""The speed-up of the workload as given over itself."""


def keeps(bound: float, brought: Interval, before: Interval = ALONE) -> bool | None:
    """Whether a bound, a share of the call as given, holds against what was measured.

    Something that brought the speed-up `brought` beside a recipe which itself had the speed-up `before` saved at least
    (1 - 1 / brought.low) / before.high of the call as given. None where the interval reaches from no gain to beyond the
    bound, and says nothing, and for bounds that add up to the whole call, which no gain is beyond.
    """
    if min(brought.low, before.low) <= 0 or bound >= 1:  # low is 0 after a single round
        return None
    least = (1 - 1 / brought.low) / before.high
    most = (1 - 1 / brought.high) / before.low
    if least <= 0 and most > bound:
        return None
    return 1 - least >= (1 - bound) / 1.02


@dataclass(frozen=True)
class Advice:
    """What a first look at the workload advised, and what that brought where two trials differ by it alone."""

    rule: str
    says: str
    levels: Mapping[str, str]
    bound: float
    """The most that it could save, as a share of the time of a call as given."""
    brought: Interval | None = None
    """Time without over time with it; None where no two trials differ by it alone. From intervals of two trials that
    were measured apart: wider than one of a race between them."""
    beside: Recipe = field(default_factory=Recipe)
    """The recipe that it was added to."""
    before: Interval = ALONE
    """Speed-up of that recipe over the workload as given."""
    also: float = 0.0
    """Bounds of the other findings that these levels answer, added up."""

    @property
    def speedup(self) -> float:
        """The bound as a speed-up."""
        return 1 / max(1 - self.bound, 1e-9)

    @property
    def bound_kept(self) -> bool | None:
        """Whether the least that was surely gained stays below the bounds of all that these levels answer; None where
        nothing was measured, or too little to tell."""
        return None if self.brought is None else keeps(self.bound + self.also, self.brought, self.before)


@dataclass(frozen=True)
class PlanRow:
    """What the memory plan predicted for one rank of a parallel strategy before anything was launched."""

    strategy: str
    peak_bytes: int
    parts: Mapping[str, int] = field(default_factory=dict)
    """The peak taken apart: parameters, gradients, optimizer state, activations, transients."""
    limit_bytes: int | None = None
    """What a device may hold, headroom taken off."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Collective operations in one step, by name."""
    sent_bytes: int = 0
    """What one rank sends in a step."""
    failed: str = ""
    """Why nothing could be predicted."""


@dataclass(frozen=True)
class Rung:
    """One step of the ladder from the baseline to the winner."""

    label: str
    """What this step added, for example ``precision=bf16``; the first is ``as given``."""
    trial: Trial


@dataclass(frozen=True)
class Outcome:
    """A finished (or interrupted) study of one workload."""

    name: str
    target: str
    fingerprint: str
    facts: Facts
    machine: Mapping[str, Any]
    """`fettle.machine.Machine` as plain data."""
    goal: Goal
    limits: Limits
    reference: Reference
    trials: Sequence[Trial]
    """All trials in the order they were measured, the baseline first."""
    winner: Trial | None
    """From the last, fresh race. None: no recipe keeps the limits. Its recipe may be empty: change nothing."""
    verdict: Verdict
    """The winner against the baseline, from the final race or, where that is surer, from all races together."""
    baseline_again: Trial | None = None
    """The workload as given in the race that the winner's figures are from, where it ran there: a machine's speed
    drifts, and only times of one race may stand side by side."""
    ladder: Sequence[Rung] = ()
    advice: Sequence[Advice] = ()
    """The first look's findings that name techniques, the most promising first, and what each brought."""
    left_out: Sequence[LeftOut] = ()
    nearest: Sequence[Trial] = ()
    """If there is no winner: those that missed the limits by least."""
    seconds: float = 0.0
    """Wall time of the study, earlier runs of it included."""
    command: str = ""
    """How to reproduce."""
    code: str = ""
    """``optimized.py`` of the winner."""
    created: str = ""
    """ISO 8601, UTC."""
    interrupted: bool = False
    unconfirmed: str = ""
    """Why the winner was not measured again in a race of its own, one or two sentences; empty where it was."""
    under_load: bool = False
    """Time elapsed beside whatever else the machine did was asked for."""
    notes: Sequence[str] = field(default_factory=tuple)
    plan: Sequence[PlanRow] = ()
    """Training over several ranks: the memory plan."""
    confidence: float = 0.95
    """The level of every confidence interval in it."""
    workload: ClassVar[Any] = None
    """What was tuned (`Target`, `Workload` or `TrainingWorkload`), for `apply`. No part of the data: None where the
    result was read from a file."""

    @property
    def baseline(self) -> Trial | None:
        """The workload as given: beside the winner, where that was measured, else as it was first measured."""
        return self.baseline_again or next((trial for trial in self.trials if not trial.recipe.levels), None)

    @property
    def recipe(self) -> Recipe:
        """The winner's recipe, empty when nothing won."""
        return self.winner.recipe if self.winner else Recipe()

    @property
    def learned(self) -> dict[str, Any]:
        """What the winner's levels found out and go by, see `fettle.techniques.Learned`."""
        return handed_on(self.recipe, {**self.facts.learned, **(self.winner.learned if self.winner else {})})

    def apply(self, model: Any, inputs: Any = None, *, call: Any = None) -> Any:
        """The tuned callable of `model`, which is changed in place; see `fettle.apply`.

        Without `inputs` those of the study are taken, and its `call`. Raises `UsageError` where the result was read
        from a file, which names no inputs.
        """
        from fettle.applying import apply, with_inputs
        from fettle.recipe_file import RecipeFile

        chosen = RecipeFile(levels=dict(self.recipe.levels), evidence=self.learned)
        if inputs is not None:
            return apply(model, chosen, inputs, call=call)
        if self.workload is None:
            raise UsageError("this result was read from a file: give sample inputs, result.apply(model, [batch])")
        return apply(with_inputs(model, self.workload, call), chosen)

    @property
    def payback_calls(self) -> float | None:
        """After how many calls, of as many rows as they have as given, the winner's start-up cost is paid back by its
        speed; None when it never is, or it is not certain that the winner is faster."""
        if self.winner is None or self.baseline is None:
            return None
        return self._payback(self.winner.startup.total_s - self.baseline.startup.total_s)

    @property
    def warm_payback_calls(self) -> float | None:
        """The same from the second start on, where what was compiled or converted is kept; None where it never is paid
        back, or nothing is kept."""
        if self.winner is None or self.baseline is None or not self.winner.startup.cache:
            return None
        if math.isnan(self.winner.startup.warm_s):
            return None
        return self._payback(self.winner.startup.warm_s - self.baseline.startup.again_s)

    def _payback(self, extra_s: float) -> float | None:
        assert self.winner is not None
        assert self.baseline is not None
        ratio = self.winner.speedup
        if not (self.verdict == "faster" if self.goal in TIMES else verdict(ratio, 0.0) == "faster"):
            return None
        rows = self.winner.samples / self.baseline.samples
        saved_s = (self.baseline.time_ms - self.winner.time_ms / rows) / 1e3
        if not saved_s > 0:
            return None
        return max(0.0, extra_s / saved_s)
