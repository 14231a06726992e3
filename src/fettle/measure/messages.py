"""What a worker of a race is asked, and what it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from fettle.generate.speed import Generation, TextTimes
from fettle.measure._trial import Accuracy
from fettle.procs.child import ChildError, Request
from fettle.procs.forks import Imports
from fettle.techniques import Facts
from fettle.workload import Target


class Build(Request):
    """Build the workload. Answered by `Built`; the other requests are of what was built."""

    target: Target


class Probe(Request):
    """See that the model takes its inputs, and gather the facts. Answered by `Probed`."""

    allow_batch: bool = False


class MeasurePeaks(Request, tag="peaks"):
    """Measure what this machine reaches on the workload's device. Answered by `Peaks`."""


class WriteReference(Request, tag="reference"):
    """Write what answers are judged by. Answered by `Reference`."""

    path: str


class Examine(Request):
    """Hand the workload to a function. Answered by `Examined`."""

    function: str
    """``module:name``."""
    seconds: float = 0.0
    path: str = ""
    """Where the function writes what it makes."""


class MakePlan(Request, tag="plan"):
    """Predict the memory of parallel strategies. Answered by `Planned`."""

    ranks: int
    nodes: int = 1
    device_memory_bytes: int = 0


class Prepare(Request):
    """Apply a recipe's source, judge its first answers, and warm up. Answered by `Prepared`; where it is done `in_two`,
    by `Judged` before the warm-up, which `Settle` asks for."""

    source: str
    label: str
    path: str = ""
    """The reference; empty where nothing judges."""
    factor: int = 1
    """How many times over the batch is taken."""
    calibrated: bool = False
    part: str = ""
    """For a text, what is timed, see `fettle.generate.speed.PARTS`."""
    exact: bool = False
    """Every prompt's text is to be compared with the reference's, not only those of the inputs."""
    as_given: bool = False
    """The source changes nothing."""
    longest_ms: float | None = None
    """A recipe whose warm calls take longer is ended (`fettle.measure._pace`); None: none is."""
    in_two: bool = False


class Settle(Request):
    """Warm up what was judged. Answered by `Prepared`."""


class MeasureRows(Request, tag="rows"):
    """Text: write with so many rows. Answered by `RowsMeasured`."""

    rows: tuple[int, ...]


class TakeSlice(Request, tag="slice"):
    """Call for a while. Answered by `SliceTaken`."""

    seconds: float
    apart: bool = False
    """Hold each computing thread on a core of its own."""
    neighbours: int = 0
    """Threads of others that want a core."""


Asked = Build | Probe | MeasurePeaks | WriteReference | Examine | MakePlan | Prepare | Settle | MeasureRows | TakeSlice


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer of a worker."""

    def with_ranks(self, others: Sequence[Self]) -> Self:
        """One answer for all ranks, from that of the first and those of the others."""
        return self


class Built(Answer, frozen=True, kw_only=True):
    """What was built, and as what."""

    load_s: float
    fingerprint: str
    structure: str
    name: str
    mode: str
    writes: bool = False
    """The workload writes text."""
    inputs: str = ""
    """What live inputs were taken for."""
    hides_text: bool = False
    """Its call lets the model write text, as a black box."""
    hidden: list[str] = []
    """Names of the modules that a model which is none itself holds, or calls."""
    imports: Imports = Imports()
    """What a fork server may import in advance for further processes."""

    def with_ranks(self, others: Sequence[Self]) -> Self:
        """Raises `ChildError` where they differ."""
        if any(one.fingerprint != self.fingerprint for one in others):
            raise ChildError("the ranks built different weights or inputs: seed every generator")
        return msgspec.structs.replace(self, load_s=max(one.load_s for one in (self, *others)))


class Probed(Answer, frozen=True, kw_only=True):
    """What is known of the workload."""

    facts: Facts
    has_metric: bool


class Peaks(Answer, frozen=True, kw_only=True):
    """As `fettle.machine.Machine.peaks`."""

    peaks: Mapping[str, float]


class Reference(Answer, frozen=True, kw_only=True):
    """What was written, for the report."""

    dtype: str
    why: str = ""
    noise: float = 0.0
    notes: Sequence[str] = ()
    """What the user should know of it."""
    only_metric: bool = False
    """The answers hold no tensor: nothing but the metric judges them."""
    metric: float | None = None
    metric_problem: str = ""
    seconds: float
    perplexity: float | None = None
    """Text: the reference's perplexity,"""
    prefill_flops: int = 0
    """and what it computes for a prompt and for a step (`fettle.generate.limits.Work`)."""
    decode_flops: int = 0
    curves: Sequence[Sequence[float]] = ()
    """Training: losses of the baseline and of other seeds."""
    spread: float | None = None
    """Training: typical distance of two seeds."""


class Examined(Answer, frozen=True, kw_only=True):
    """What the function found."""

    evidence: msgspec.Raw
    load_s: float

    def read(self, kind: Any) -> Any:
        """The evidence as the type that the function returns."""
        return msgspec.msgpack.decode(self.evidence, type=kind, strict=False)


class Planned(Answer, frozen=True, kw_only=True):
    """A `fettle.parallel.plan.Plan`, and how it was made."""

    plan: msgspec.Raw
    note: str


class Judged(Answer, frozen=True, kw_only=True):
    """The recipe is applied, and has answered, in so many seconds."""

    seconds: float


class Prepared(Answer, frozen=True, kw_only=True):
    """What a recipe that is ready to be timed took, and how right it is."""

    load_s: float
    optimize_s: float
    first_call_s: float
    cache: str
    accuracy: Accuracy
    peak_bytes: int | None
    """On a CPU above the loaded process."""
    device: str
    gpu: str
    """As NVML names it; empty on a CPU."""
    call_ns: int
    calls: int = 1
    """Calls in one sample of time, which are made however short a slice is."""
    samples: int | float
    """Rows in one call; in a mean one where the batches differ."""
    notes: Sequence[str]
    learned: Mapping[str, Any]
    phases_ms: Mapping[str, float] = {}
    generation: Generation | None = None
    """Text: what is known of it without the race,"""
    texts: Sequence[TextTimes] = ()
    """and how texts came."""

    def with_ranks(self, others: Sequence[Self]) -> Self:
        """With the fullest rank's memory and the slowest one's start. Ranks on CPUs read from one memory: what they
        read is added up."""
        every = (self, *others)
        known = [one.generation for one in every if one.generation is not None]
        generation = self.generation
        if generation is not None and self.device == "cpu":
            generation = dataclasses.replace(
                generation,
                weight_bytes=sum(one.weight_bytes for one in known),
                cache_bytes=sum(one.cache_bytes for one in known),
            )
        return msgspec.structs.replace(
            self,
            load_s=max(one.load_s for one in every),
            optimize_s=max(one.optimize_s for one in every),
            first_call_s=max(one.first_call_s for one in every),
            peak_bytes=max((one.peak_bytes for one in every if one.peak_bytes is not None), default=None),
            call_ns=max(one.call_ns for one in every),
            notes=list(dict.fromkeys(note for one in every for note in one.notes)),
            generation=generation,
        )


class RowsMeasured(Answer, frozen=True, kw_only=True):
    """Tokens a second by the number of rows, as far as memory allows."""

    tokens_per_s: Mapping[str, float]


class SliceTaken(Answer, frozen=True, kw_only=True):
    """One slice of a race."""

    samples_ns: Sequence[int]
    unhindered_ns: float
    """What a call would have taken had no thread waited for a core; NaN where the kernel does not say."""
    waits: float
    """Share of the time that the threads waited; NaN where the kernel does not say."""
    cpu_s: float
    energy_j: float | None
    """Energy of one call."""
    gpus: Sequence[str] = ()
    """The GPUs that it is of, by NVML's names; none where it is the whole machine's."""
    pages: float = 0.0
    """Pages of memory a call that the system had to give."""
    texts: Sequence[TextTimes] = ()

    def with_ranks(self, others: Sequence[Self]) -> Self:
        """With the CPU time of all ranks, all their GPUs with their energy, and the waiting of the one that waited
        longest."""
        every = (self, *others)
        waits = [one.waits for one in every if one.waits == one.waits]
        energy = {tuple(one.gpus): one.energy_j for one in every}  # several ranks may share one
        known = [joules for joules in energy.values() if joules is not None]
        return msgspec.structs.replace(
            self, cpu_s=sum(one.cpu_s for one in every), waits=max(waits, default=self.waits),
            energy_j=sum(known) if len(known) == len(energy) else None,
            gpus=list(dict.fromkeys(gpu for one in every for gpu in one.gpus)),
        )  # fmt: skip
