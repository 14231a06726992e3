"""What a race is asked to do, and what it reports meanwhile. Plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fettle.measure._priority import may_go_first
from fettle.measure._statistics import LOOKS
from fettle.measure._trial import Accuracy, Trial
from fettle.recipe import Recipe
from fettle.workload import Target


@dataclass(frozen=True)
class Candidate:
    """A recipe at the start line: its source and what its process needs."""

    recipe: Recipe
    source: str | None
    """None: written for what its first process finds of the model."""
    environment: Mapping[str, str] = field(default_factory=dict)
    factor: int = 1
    """The batch is this many times larger."""
    calibrated: bool = False
    """Batches that calibrated it may not judge it."""
    imports: tuple[str, ...] = ()
    """Modules that its source imports, which take a second or more and start no thread."""
    ranks: int = 1
    """Processes that it is spread over."""
    once: bool = False
    """One process is enough, whatever the rules say of replicates: nothing is announced of it."""
    label: str = ""
    """What distinguishes it from others of the same recipe."""
    target: Target | None = None
    """The workload in another revision of its code; None for that of the race."""
    python: str = ""
    """The interpreter of another environment; empty for ours."""


@dataclass
class Stop:
    """Ends a race early, with what has been measured: when it is `asked`, or by Ctrl-C once there is something to show,
    which asks it. A second Ctrl-C ends everything."""

    asked: bool = False
    fewest_rounds: int = LOOKS[0]
    """Rounds that show something."""


@dataclass(frozen=True)
class Rules:
    """How a race is run."""

    slice_s: float = 0.08
    """Length of one slice; a call that is longer is a slice of its own. What a shared machine does to a slice lasts
    longer than it: of five A/A races with slices of 0.15 s, a third of each slice was worth as much as the whole."""
    max_rounds: int = 48
    confidence: float = 0.95
    """Confidence of the whole race: the looks share what is left."""
    equal_rounds: int = 0
    """Rounds for every candidate, with none dropped before: what effects are estimated from. 0: as many as it
    takes to know the leader."""
    indifference: float = 0.01
    """Differences below this are not worth more rounds."""
    precision: float | None = None
    """Go on until the leader's speed-up is known to within this share, half the interval's width: what an announced
    number needs. Only where a call of the baseline takes less than a second."""
    may_go_first: bool = field(default_factory=may_go_first)
    """On a busy machine a slice may run before all others' work, where the system allows that."""
    prepare_timeout_s: float = 900.0
    settle_verdicts: bool = False
    """Go on until each candidate's verdict against the baseline is known, not only the leader: what `bench` wants."""
    replicates: int = 1
    """Processes for each candidate, as far as `replicate_s` allows."""
    further: tuple[int, ...] = ()
    """Processes for each candidate where a speed-up is still vague after the rounds (`is_vague`), one step after the
    other."""
    is_enough: Callable[[Sequence[Trial]], bool] | None = None
    """Whether the trials need no more processes, in place of `is_vague`. What looks at more than an interval's width
    looks once more for each step, and `confidence` must leave each look its share."""
    narrow: float = 0.0
    """Where each has several processes, no more rounds than would make the interval over them narrower, or half of it
    this narrow (`is_exhausted`). 0: until the rounds alone are as precise as is asked for."""
    replicate_s: float = 60.0
    """What starting the second and further processes of all candidates may take together, in seconds; as much again for
    each step of `further`."""
    abreast: int = 1
    """Processes that import and build the workload side by side."""
    judges_abreast: Literal["none", "replicates", "all"] = "none"
    """Which processes apply their recipes side by side as well, compile and give their first answers: a start that
    somebody wants to know of is made alone. Only for calls on a CPU. What is timed is done by one at a time."""
    under_load: bool = False
    """Measure time elapsed beside whatever else the machine does: no slice waits for a quiet machine, and what others
    took is not taken out."""
    part: str = ""
    """Where text is written, what is timed: ``ttft`` or ``tpot``; empty for the whole of it."""
    rows: tuple[int, ...] = ()
    """Where text is written: numbers of rows at which tokens a second are measured, too, in each first process."""
    longest_ms: float | None = None
    """A recipe whose calls take longer is ended while it is made ready, with nothing measured; None: none is. A larger
    batch may take as many times longer."""
    deadline: float = math.inf
    """`time.monotonic()` at which to stop: what has been measured by then counts."""
    grace_s: float = 30.0
    """How long after the deadline a process that is being started may go on."""
    stop: Stop | None = None
    """How somebody ends the race early."""

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has ended the race."""
        return self.stop is not None and self.stop.asked

    @property
    def alpha(self) -> float:
        """Error rate of one look."""
        return (1 - self.confidence) / len(LOOKS)


@dataclass(frozen=True)
class Judge:
    """Where the reference outputs lie, and what an answer may be off by."""

    path: str = ""
    max_error: float | None = None
    min_agreement: float | None = None
    max_metric_drop: float | None = None
    reference_metric: float = math.nan
    exact: bool = False
    """Text must be the reference's, token by token."""

    def reason(self, accuracy: Accuracy) -> str:
        """Why an accuracy is outside the limits, one phrase; empty when it is inside. NaN is never inside."""
        if accuracy.problem:
            return accuracy.problem
        if not accuracy.finite:
            return "the outputs are not finite"
        if self.exact and accuracy.unequal != 0:
            return f"{accuracy.unequal:.2%} of the tokens it writes are not the reference's"
        if self.max_error is not None and not accuracy.error <= self.max_error:
            if accuracy.is_text:
                return f"mean KL divergence {accuracy.error:.2g} is above {self.max_error:g}"
            if accuracy.losses:
                return f"its losses are {accuracy.error:.2g} times as far off as two seeds are from each other"
            return f"relative error {accuracy.error:.2g} is above {self.max_error:g}"
        if self.min_agreement is not None:
            if math.isnan(accuracy.agreement):
                return "no output looks like logits, so there is no agreement to judge"
            if not accuracy.agreement >= self.min_agreement:
                return f"top-1 agreement {accuracy.agreement:.4g} is below {self.min_agreement:g}"
        if self.max_metric_drop is not None:
            fell = f"the metric fell from {self.reference_metric:.4g} to {accuracy.metric:.4g}"
            if not self.reference_metric - accuracy.metric <= self.max_metric_drop + 1e-12:
                return f"{fell}, more than {self.max_metric_drop:g}"
        return ""


@dataclass(frozen=True)
class Progress:
    """What a race reports while it runs."""

    doing: str = ""
    """What runs now, for people."""
    name: str = ""
    """What the workload that was built calls itself."""


OnProgress = Callable[[Progress], None]
