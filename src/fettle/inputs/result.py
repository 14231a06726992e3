"""What a search found about a pipeline, and the answer in a sentence or two."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fettle.errors import UsageError
from fettle.inputs.lint import RAISES, Lint
from fettle.inputs.setting import WITHIN, Measured, ratio, shared
from fettle.measure import Load, busy_load
from fettle.units import count_text, seconds_text, size_text

_RAISED = re.compile(r"(item|items|one of the rows|the items) .* raised ")
"""How a failure that is the data set's own begins: see `fettle.inputs._fetch`."""


class RowRaises(UsageError):
    """A row of the data set raises before anything could be measured."""

    exit_code: ClassVar[int] = 1


def is_of_a_row(failure: str) -> bool:
    """Whether what a loader failed of is a row of its data set."""
    return _RAISED.match(failure) is not None


@dataclass(frozen=True)
class PipelineResult:
    """What was found about a pipeline. Times in seconds."""

    target: str
    as_given: Measured
    plain: Measured
    """torch's own default: no workers."""
    best: Measured
    settings: Sequence[Measured]
    step_s: float
    """A step alone on a batch that is there already; 0 where the target has no step."""
    cores: int
    cores_why: str
    verdict: str
    notes: Sequence[str] = ()
    lints: Sequence[Lint] = ()
    search_s: float = 0.0
    seconds: float = 0.0
    """The search and the looking for faults."""
    interrupted: bool = False
    reused: int = 0
    """Answers taken over from a search that was killed."""

    @property
    def before(self) -> Measured:
        """What a gain is relative to: the setting as given, or no workers where that fails."""
        return self.as_given if self.as_given.able else self.plain

    @property
    def load(self) -> Load:
        """What others had of the machine in the slices that the gain is of."""
        rounds = shared(self.best, self.before)
        slices = [one.slices[number] for one in (self.best, self.before) for number in rounds]
        return busy_load(Load.from_json(item.load) for item in slices)

    @property
    def waiting(self) -> float:
        """Share of a step spent waiting for data, as given."""
        return self.before.waiting

    @property
    def bound(self) -> float:
        """The most that removing the wait could bring: 1 / (1 - waiting). Infinite without a step."""
        return 1 / (1 - self.waiting) if self.step_s and self.waiting < 1 else math.inf

    @property
    def batch_p50_s(self) -> float:
        """One batch made by one process alone."""
        return self.plain.first.fetch_p50_s

    @property
    def batch_p95_s(self) -> float:
        return self.plain.first.fetch_p95_s

    @property
    def gain(self) -> float:
        """Batches a second of the best over those as given."""
        return 1.0 if self.best.setting == self.before.setting else ratio(self.best, self.before)

    @property
    def raises(self) -> str:
        """What a run would die of: the row, its error and how often, in a sentence or two; empty where none was met."""
        for lint in self.lints:
            if lint.name == RAISES:
                return f"{lint.says} {lint.evidence}"
        tried = [item for item in self.settings if not item.left_out]
        met = [item.failure for item in tried if is_of_a_row(item.failure)]
        if not met:
            return ""
        return (f"A run over this data set ends with an error: {met[0]}. "
                f"{len(met)} of {count_text(len(tried), 'setting')} met it.")  # fmt: skip

    @property
    def code(self) -> str:
        """The lines to take away."""
        return self.best.setting.code


def cannot_help(plain: Measured, step_s: float, cores: int) -> str:
    """Why workers cannot help, as a sentence, where the costs alone say so; empty where they may."""
    if step_s and plain.waiting < WITHIN:
        return (f"Workers cannot help: making a batch takes {plain.waiting:.1%} of a step, so that removing all of it "
                f"brings at most {1 / (1 - plain.waiting):.2f}x.")  # fmt: skip
    if cores == 1 and plain.last.cpu_share > 0.9:
        return "Workers cannot help: there is one core, and loading and stepping keep it busy."
    return ""


def verdict(result: PipelineResult, why: str = "") -> str:
    """The answer in a few sentences, the worst first: a row that raises, then the setting."""
    return " ".join(filter(None, (result.raises, f"{result.load.under}{_setting_verdict(result, why)}")))


def _setting_verdict(result: PipelineResult, why: str) -> str:
    before, best = result.before, result.best
    takes = f"{result.gain:.2f}x the batches a second with {best.setting.name}"
    if not result.as_given.able:
        takes += ", over no workers: as given it fails"
    waited = f"{before.waiting:.0%} of the time was waiting" if result.step_s else "no step was given"
    helped = best is not before and result.gain >= 1 + WITHIN
    if not best.setting.num_workers and not why:
        why = _why_workers_lost(result)
    if why:
        if helped:
            return f"{why} {takes}."
        if before.setting.num_workers and best is not before:
            return f"{why} {best.setting.arguments} is as fast as the {before.setting.num_workers} given."
        return why
    if helped:
        return f"{takes} ({waited})."
    if best is not before:
        return f"No setting is more than 3% faster than the one given; {best.setting.arguments} is as fast and smaller."
    return f"The setting as given is the smallest within 3% of the best ({waited})."


def _why_workers_lost(result: PipelineResult) -> str:
    """What was seen of settings with workers, where none won."""
    tried = [item for item in result.settings if item.setting.num_workers and item.able]
    failed = [item for item in result.settings if item.setting.num_workers and item.failure and not item.left_out]
    if not tried:
        reasons = failed or [item for item in result.settings if item.left_out]
        return f"Workers do not run: {reasons[0].failure}." if reasons else ""
    fastest = max(tried, key=lambda item: ratio(item, result.plain))
    timing, reached = fastest.first, ratio(fastest, result.plain)
    many = fastest.setting.num_workers
    beside = f"one brings {reached:.2f}x" if many == 1 else f"{many} of them bring {reached:.2f}x"
    if reached >= 1 + WITHIN:
        return f"Workers cannot help beside {result.best.setting.name}: alone {beside}."
    if result.step_s and reached > 1 - WITHIN and result.plain.waiting < 0.1:
        return f"Workers cannot help: waiting is {result.plain.waiting:.1%} of a step, and {beside}."
    if timing.fetch_p50_s * timing.rate < 0.5 * fastest.setting.num_workers:
        handing = max(1 / timing.rate - result.step_s, 0.0)
        return (
            f"Workers cannot help: making a batch of {size_text(timing.batch_bytes)} takes "
            f"{seconds_text(result.batch_p50_s)}, getting it from a worker {seconds_text(handing)}; {beside}."
        )
    if result.plain.last.cpu_share > 0.9 * result.cores:
        return f"Workers cannot help: the loop keeps all {result.cores} cores busy without them; {beside}."
    return f"Workers cannot help: {beside}."
