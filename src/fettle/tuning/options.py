"""The options of a study, in one place: `fettle.tune` takes the fields as keywords, the command as its options."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from fettle.errors import UsageError
from fettle.measure import Rules, may_go_first
from fettle.result import Goal, Limits
from fettle.tuning._budget import REPLICATES
from fettle.workload import AUTO

_ENERGY_SLICE_S = 0.5
"""A GPU's counter is renewed every 20 to 100 ms (Yang, Adamek and Armour, *Part-time Power Measurements*, 2023): in the
usual slice it may not move at all."""


@dataclass(frozen=True)
class Effort:
    """How much is measured of each recipe: less is for a quick look and for tests, and makes verdicts less certain."""

    slice_s: float = Rules.slice_s
    """Length of one slice."""
    rounds: int = 20
    """Most rounds of a race. Processes differ by more than these leave open: the final race has more of them."""
    replicates: int = REPLICATES
    """Processes of each finalist in the final race, as far as time allows."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Goal, limits, budget, and what may be tried. The defaults are those of `fettle.tune`."""

    goal: Goal = "throughput"
    """``throughput``, ``latency``, ``memory``, ``energy``, ``startup`` (the first answer where nothing was compiled
    before) or ``warm-startup`` (where it was kept: each recipe is started twice); for text also ``ttft``, the time to
    the first token, and ``tpot``, the time per output token."""

    limits: Limits = field(default_factory=Limits)
    """What a recipe must keep. `fettle.tune` takes its fields too: ``max_error=0.01``."""

    budget_s: float | None = 900.0
    """Seconds to spend; None or 0 for no limit."""

    techniques: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    """Levels that are allowed, by technique; one level pins it. Of techniques that are not named all are allowed."""

    allow_batch: bool = False
    """Whether the batch size may be changed."""

    design: str = "auto"
    """Which recipes are tried: ``auto``, ``ladder``, ``factorial`` or ``ablation``."""

    first: Sequence[str] = ()
    """Techniques that the design ``auto`` tries before others, the most promising first."""

    atlas: Path | None = None
    """An atlas, from which the design ``auto`` knows what to expect of a model that it has not seen."""

    mode: str = AUTO
    """``inference`` or ``training``; ``auto`` goes by what is handed over."""

    nproc: int = 1
    """Ranks on this machine that training strategies, or tensor parallelism in inference, may use."""

    nodes: int = 1
    """Training: machines with so many ranks each."""

    listen: str = ""
    """``host:port`` at which the other nodes reach this one."""

    device_memory_bytes: int | None = None
    """Training: memory of one rank's device; what the memory plan says is above is not tried. None: as it is here."""

    output: Path = Path("fettle-out")
    """Folder for the study, caches and logs."""

    storage: str | None = None
    """Optuna storage URL. None: ``study.db`` in `output`."""

    study: str | None = None
    """Name of the study. None: the workload's; where the model was edited since, a new one beside it."""

    confidence: float = 0.95
    """Level of the confidence intervals."""

    trial_timeout_s: float = 900.0
    """Longest time for one recipe to get ready."""

    under_load: bool = False
    """Find the fastest beside whatever else this machine does, by time elapsed, not the fastest on a quiet machine."""

    polite: bool = False
    """Never go before other processes' work, also where the system allows it."""

    effort: Effort = Effort()
    """How much is measured of each recipe."""


class Keywords(TypedDict, total=False):
    """The fields of `Options` and of `Limits`, as keywords of `fettle.tune`."""

    goal: Goal
    max_error: float | None
    min_agreement: float | None
    max_metric_drop: float | None
    max_latency_ms: float | None
    max_memory_bytes: int | None
    min_throughput: float | None
    max_ttft_ms: float | None
    max_tpot_ms: float | None
    exact: bool
    max_kl: float | None
    max_spread: float | None
    budget_s: float | None
    techniques: Mapping[str, str | Sequence[str]] | None
    allow_batch: bool
    design: str
    first: Sequence[str]
    atlas: str | Path | None
    mode: str
    nproc: int
    nodes: int
    listen: str
    device_memory_bytes: int | None
    output: str | Path
    storage: str | None
    study: str | None
    confidence: float
    trial_timeout_s: float
    under_load: bool
    polite: bool
    effort: Effort


def options_of(options: Options | None, keywords: Keywords) -> Options:
    """The `options` with what the keywords change. Raises `UsageError` for an unknown keyword."""
    of_limits = {item.name for item in dataclasses.fields(Limits)}
    changes: dict[str, Any] = dict(keywords)
    for name in changes.keys() - get_type_hints(Keywords).keys():
        near = difflib.get_close_matches(name, get_type_hints(Keywords), 1)
        raise UsageError(f"tune has no option {name}" + (f": did you mean {near[0]}?" if near else ""))
    chosen = options or Options()
    if not isinstance(chosen, Options):
        raise UsageError(f"options takes fettle.Options(...), not {chosen!r:.80}: its fields may be keywords too")
    limits = replace(chosen.limits, **{name: changes.pop(name) for name in of_limits & changes.keys()})
    if changes.get("techniques", {}) is None:
        changes["techniques"] = {}
    for name in ("output", "atlas"):  # as text, also in `options`
        path = changes.get(name, getattr(chosen, name))
        changes[name] = Path(path) if isinstance(path, (str, os.PathLike)) else path
    return replace(chosen, limits=limits, **changes)


def rules_of(options: Options) -> Rules:
    """What the options, the goal above all, ask of every race."""
    effort, goal = options.effort, options.goal
    return Rules(
        slice_s=_ENERGY_SLICE_S if goal == "energy" else effort.slice_s,
        max_rounds=effort.rounds,
        confidence=options.confidence,
        prepare_timeout_s=options.trial_timeout_s,
        may_go_first=may_go_first() and not options.polite,
        under_load=options.under_load,
        part=goal if goal in ("ttft", "tpot") else "",
        replicates=2 if goal == "warm-startup" else 1,
    )
