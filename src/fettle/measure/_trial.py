"""The facts that measuring yields: trials and what they hold. Plain data that goes to JSON and back."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from fettle.estimates import Interval
from fettle.files import plain
from fettle.generate.speed import Generation
from fettle.measure._load import Load
from fettle.recipe import Recipe
from fettle.techniques import learned_types, respelled

_RENAMED = {"heat": "race"}
"""Fields as earlier versions called them, and as they are called now."""
Status = Literal["measured", "rejected", "failed"]
"""measured: runs and is accurate enough; rejected: runs, but its answers are wrong; failed: did not run."""


@dataclass(frozen=True)
class Accuracy:
    """A recipe's outputs against the reference, the worst over all judged batches. NaN means: not measured."""

    error: float = math.nan
    """Relative L2 error, ||y - r|| / ||r||, the worst leaf; for integer leaves the share that differs."""
    cosine: float = math.nan
    """Smallest cosine similarity of a floating leaf with its reference."""
    max_abs: float = math.nan
    """Largest absolute difference of any element."""
    agreement: float = math.nan
    """Share of rows with the same largest entry, where a leaf looks like logits."""
    finite: bool = False
    """No NaN or Inf where the reference has none, and every leaf is there with its shape."""
    metric: float = math.nan
    """The user's metric; NaN where there is none."""
    judged_batches: int = 0
    losses: Sequence[float] = ()
    """Training: the loss of each step, from the baseline's seed and data. `error` is then the mean distance from the
    baseline's losses over the typical distance of two seeds, and `max_abs` the largest difference of a loss."""
    unequal: float = math.nan
    """Text: share of the tokens that it writes which are not the reference's. `error` is then the mean Kullback-Leibler
    divergence from the reference in nats per token, `max_abs` that of the worst token, `agreement` is per token."""
    perplexity: float = math.nan
    """Text: the recipe's, and over the reference's with its interval."""
    perplexity_ratio: float = math.nan
    perplexity_low: float = math.nan
    perplexity_high: float = math.nan
    problem: str = ""
    """What is wrong with the outputs beyond a number: a missing leaf, another shape, NaN."""

    @property
    def is_text(self) -> bool:
        """Whether it was text that was judged."""
        return not math.isnan(self.perplexity)

    @property
    def distance(self) -> str:
        """How far off it is, a phrase; empty where that was not measured."""
        if not math.isfinite(self.error):
            return ""
        if self.is_text:
            return f"a mean KL divergence of {self.error:.2g}"
        if self.losses:
            return f"losses {self.error:.2g} times as far off as two seeds are from each other"
        return f"a relative error of {self.error:.2g}"


@dataclass(frozen=True)
class Startup:
    """What it takes before the first answer is there, in seconds."""

    load_s: float = math.nan
    """Building the workload; the same for every recipe."""
    optimize_s: float = math.nan
    """Running ``optimize``: converting, quantising, exporting."""
    first_call_s: float = math.nan
    """The first call on each batch, compiling included."""
    cache: str = ""
    """Whether what was compiled or converted had been kept: ``cold``, ``warm``, or nothing was (empty)."""
    warm_s: float = math.nan
    """`total_s` of a further process, which finds what the first one kept; NaN where none was started."""

    @property
    def total_s(self) -> float:
        """What the recipe itself costs before it runs at speed, the first time."""
        return self.optimize_s + self.first_call_s

    @property
    def again_s(self) -> float:
        """The same from the second start on; as the first time where none was measured."""
        return self.total_s if math.isnan(self.warm_s) else self.warm_s


@dataclass(frozen=True)
class Slice:
    """One recipe's turn in one round of a race, in one of its processes."""

    process: str
    """Tells the processes of a study apart; the workload as given and the leader keep theirs from race to race."""
    round: int
    ms: float
    """Median call, time elapsed."""
    unhindered_ms: float | None = None
    """What a call would have taken had no thread of it waited for a core; None where that is unknown."""
    quiet: bool = True
    """Others took next to nothing, and it was not run before their work or with its threads held apart."""
    waits: float | None = None
    """Seconds a second that its threads waited for a core."""
    others: float | None = None
    """Share that others had of the cores that we may use."""
    pages: float | None = None
    """Pages of memory a call that the system had to give; None in studies of earlier versions."""
    by_quota: bool = False
    """What disturbed it is a cgroup's quota alone."""

    @property
    def best_ms(self) -> float | None:
        """The time on a machine that is quiet, as well as this slice shows it; None where it does not."""
        return self.ms if self.quiet or self.waits is None else self.unhindered_ms


def by_round(slices: Sequence[Slice], *, elapsed: bool = False) -> dict[int, float]:
    """Time of a call in ms by round. A round in which others had the machine goes by its negative number, so that only
    slices of the same kind are ever paired; one that does not show what a call takes alone is left out. `elapsed`: as
    it was, with the waiting in it."""
    times = {}
    for one in slices:
        ms = one.ms if elapsed else one.best_ms
        if ms is not None and 0 < ms < math.inf:
            times[one.round if one.quiet else -one.round] = ms
    return times


def log_times(slices: Sequence[Slice], samples: float, *, elapsed: bool = False) -> dict[int, float]:
    """Log time of one row by round (see `by_round`), of the slices of one process."""
    return {number: math.log(ms / samples) for number, ms in by_round(slices, elapsed=elapsed).items()}


def by_process(slices: Sequence[Slice]) -> dict[str, list[Slice]]:
    """The slices of each process."""
    turns: dict[str, list[Slice]] = {}
    for one in slices:
        turns.setdefault(one.process, []).append(one)
    return turns


def process_logs(trial: Trial, *, elapsed: bool = False) -> list[dict[int, float]]:
    """`log_times` of each process of a trial that has been timed."""
    every = by_process(trial.slices).values()
    return [log for turns in every if (log := log_times(turns, trial.samples, elapsed=elapsed))]


_FEWEST_PAGES = 64
_LEAST_LOSS = 0.05
_EACH = 2
"""Slices of either kind."""


def fetching(slices: Sequence[Slice]) -> str:
    """How calls differ between the slices that fetch most memory from the system and those that fetch next to none, as
    a phrase; empty where they do not, by a twentieth of the time at least.

    What a call frees goes back to the system where it lies at the end of the heap, and is kept for the next call where
    anything that is still held lies behind it. Which of the two it is differs between processes, and while one runs.
    """
    known = [(one.pages, one.best_ms) for one in slices if one.pages is not None and one.best_ms]
    most = max((pages for pages, _ in known), default=0.0)
    many = [ms for pages, ms in known if pages > most / 2]
    few = [ms for pages, ms in known if pages <= most / 16]
    if most < _FEWEST_PAGES or min(len(many), len(few)) < _EACH:
        return ""
    fetched_ms, kept_ms = statistics.median(many), statistics.median(few)
    if fetched_ms <= (1 + _LEAST_LOSS) * kept_ms:
        return ""
    return (
        f"{kept_ms:.3g} ms a call where the memory that it frees is kept, {fetched_ms:.3g} ms where it goes back "
        f"to the system and {most:.0f} pages of it are fetched anew: which of the two is chance"
    )


@dataclass(frozen=True)
class Trial:
    """One recipe measured on one workload on one machine, or why that failed."""

    recipe: Recipe
    status: Status
    reason: str = ""
    """Why it failed or was rejected, one line; empty when measured."""
    time_ms: float = math.nan
    """Median time of one call."""
    p90_ms: float = math.nan
    """90th percentile of one call."""
    speedup: Interval | None = None
    """Ratio of times, baseline / this, paired by round; per sample where the batch size differs. None: no two slices
    may be compared, as where others had the machine so much that no call could be timed."""
    elapsed_speedup: Interval | None = None
    """The same in elapsed time, from the rounds in which others had the machine too; None where there were none."""
    is_quiet: bool = True
    """Whether `speedup` was measured on a quiet machine: the rounds that it is of were, for the baseline too. Where
    not, what the neighbours did was taken out as well as can be (`Slice.best_ms`), unless the race was to be run under
    load."""
    load: Load = field(default_factory=Load)
    """What others took on the mean, over all slices."""
    slices: Sequence[Slice] = field(default=(), repr=False)
    """The data under all of it, those slices too that were made again because they were disturbed."""
    processes: int = 1
    """Processes it was measured in; above 1 the interval of `speedup` is over processes, not over rounds."""
    samples: int | float = 1
    """Rows in one call; in a mean one where the batches differ."""
    peak_bytes: int | None = None
    """CUDA: allocator peak. CPU: peak resident set above the process without the workload."""
    peaks_bytes: Sequence[int] = ()
    """The same of each process."""
    too_slow: bool = False
    """It failed only in that its calls took so much longer than the baseline's that nothing was measured."""
    fingerprint: str = ""
    """Fingerprint of the weights and inputs that it was measured with."""
    energy_j: float | None = None
    """Energy of one call where the machine reports it."""
    startup: Startup = field(default_factory=Startup)
    accuracy: Accuracy = field(default_factory=Accuracy)
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    """Training: time of a watched step by part: data, forward, backward, optimizer, communication, idle."""
    generation: Generation | None = None
    """Text: its time taken apart."""
    notes: Sequence[str] = ()
    """What the recipe really did: layers matched, graph breaks, recompiles, graphs skipped."""
    learned: Mapping[str, Any] = field(default_factory=dict)
    """What its levels found out and hand on, see `fettle.techniques.Learned`."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of the packages beside torch that the recipe's levels ran by; empty where there are none, and in studies of
    earlier versions."""
    seconds: float = 0.0
    """What the trial cost in all."""
    start_s: float = math.nan
    """What one process of it took until it was ready to be timed: Python, the workload, the recipe, its first answers
    and the warm-up."""
    turn_s: float = math.nan
    """What a slice of it took of a race's time."""
    race: int = 0
    """The race it was measured in."""

    @property
    def rounds(self) -> int:
        """How many rounds it took part in."""
        return len({one.round for one in self.slices})

    @property
    def ok(self) -> bool:
        """Whether it may win."""
        return self.status == "measured"

    @property
    def known_speedup(self) -> Interval | None:
        """`speedup` where it is known well enough to be shown and to claim something, else None."""
        return self.speedup if self.speedup is not None and self.speedup.is_known else None

    @property
    def is_compared(self) -> bool:
        """Whether it is known how fast it is beside the baseline, or that it does not run."""
        return not self.ok or (self.speedup is not None and not math.isnan(self.speedup.estimate))

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.samples / self.time_ms * 1e3 if self.time_ms else math.nan

    def to_json(self) -> dict[str, Any]:
        """Plain data; NaN becomes None."""
        return plain(self, {Recipe: lambda recipe: dict(recipe.levels)})  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Trial:
        """The inverse of `to_json`. Raises `msgspec.ValidationError` or `ValueError` for anything else."""
        trial = msgspec.convert(typed(data, cls), cls)
        gain = 1.0 if trial.speedup is None else trial.speedup.estimate
        numbers = (trial.samples, trial.peak_bytes or 1, trial.energy_j or 1.0, gain)
        if any(number <= 0 or number >= 1 << 63 for number in numbers):
            raise ValueError("its samples, memory, energy and speed-up must be above 0 and below 2**63")
        for name, kind in learned_types(trial.learned).items():
            msgspec.convert(trial.learned[name], kind)
        return trial


def typed(value: Any, kind: Any, unknown: Callable[[str], None] = lambda name: None) -> Any:
    """Undo what JSON cannot say, for `msgspec.convert`: null where a plain number belongs is NaN, a recipe is its
    levels, an interval is infinite after one round. What earlier versions wrote is put as this one does; `unknown` is
    called with fields that it does not know."""
    if kind is float:
        return math.nan if value is None else value
    if kind is Recipe:
        is_one = isinstance(value, Mapping) and all(isinstance(level, str) for level in value.values())
        return {"levels": respelled(value) if is_one else value}
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        inner = [argument for argument in arguments if argument is not type(None)]
        return value if value is None or len(inner) != 1 else typed(value, inner[0], unknown)
    if isinstance(value, list) and arguments and origin in (Sequence, list, tuple):
        return [typed(item, arguments[0], unknown) for item in value]
    if not isinstance(value, Mapping):
        return value
    if origin is Mapping:
        return {key: typed(item, arguments[1], unknown) for key, item in value.items()}
    if not dataclasses.is_dataclass(kind):
        return value
    hints = _hints(typing.cast(type, kind))
    once = {key: value[key] for key in learned_types(value) if "learned" in hints}
    if once:  # earlier versions wrote what was learned beside the other fields
        value = {"learned": once, **{key: item for key, item in value.items() if key not in once}}
    value = {_RENAMED.get(key, key) if key not in hints else key: item for key, item in value.items()}
    if kind is Interval and value.get("high") is None:
        value = {**value, "high": math.inf}
    for name in value.keys() - hints.keys():
        unknown(name)
    return {key: typed(item, hints[key], unknown) for key, item in value.items() if key in hints}


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}
