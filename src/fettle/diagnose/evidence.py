"""What was seen: plain data that travels from the worker process to the rules and into the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fettle.diagnose.compile_health import CompileHealth
from fettle.measure import Load
from fettle.techniques import Facts

MATRIX, POINTWISE, LAYOUT, CAST, INDEX, OTHER = "matrix", "pointwise", "layout", "cast", "index", "other"
GROUPS = {
    MATRIX: "matrix products, convolutions, attention",
    POINTWISE: "element-wise work, norms, softmax, reductions",
    LAYOUT: "copies and layout changes",
    CAST: "casts between types",
    INDEX: "indexing, gathering, embedding",
    OTHER: "other operators",
}
"""Groups of operators, and what people call them."""


_HOST_S = 10e-6
"""Host time around one operator that is nothing special."""


@dataclass(frozen=True)
class Operation:
    """All calls of one operator from one module and source line with one dtype, in one call of the workload."""

    name: str
    """For example ``aten.mm``."""
    group: str
    module: str
    """Path of the innermost module, for example ``layers.3.attention``."""
    kind: str
    """Class of that module."""
    line: str
    """``file.py:12`` outside torch, where it was called from."""
    dtype: str
    calls: int
    seconds: float
    flops: int
    bytes: int
    """Read and written, counted once each."""
    largest: tuple[int, ...] = ()
    """Shape of the largest output."""
    repeated: float = 0.0
    """Share of the FLOPs that earlier calls of a growing sequence had done already (`repeated_share`)."""
    weights: int = 0
    """Distinct weights among the calls: several are several layers, not one in a loop."""
    function: str = ""
    """Function that `line` is in, for example ``Net.forward``; without a line, that of fettle's own training loop."""
    written: int = 0
    """Bytes of its outputs; views write nothing."""
    growth: float = 0.0
    """Elements of the largest output over those of the largest input: what broadcasting made of it."""


@dataclass(frozen=True)
class Kernel:
    """One kernel of a device under one operator, in one call of the workload."""

    name: str
    operator: str
    """As `Operation.name` has it: the innermost such around the launch."""
    calls: float
    seconds: float


SyncKind = Literal["read", "size", "check", "upload", "wait"]
"""read: a value comes to the host. size: the shape of a result depends on values. check: an operator reads back whether
it went well. upload: the host copies to the device and waits. wait: seen by CUDA's checks, which do not say why."""


@dataclass(frozen=True)
class Sync:
    """One source line that makes the host wait, with how often it did."""

    file: str
    line: int
    function: str
    code: str
    operator: str
    kind: SyncKind
    reason: str
    count: int
    stack: tuple[str, ...] = ()
    """The callers outside torch, nearest first, as file:line."""

    @property
    def where(self) -> str:
        """file:line, as an editor opens it."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Cost:
    """What a collector cost."""

    seconds: float
    """How long it took, all in all."""
    slowdown: float = 1.0
    """How many times as long a call took while it looked; 1 where no call ran under it."""

    def __str__(self) -> str:
        took = f"{self.seconds:.2g} s" if self.seconds >= 0.01 else "under 0.01 s"
        return f"{took}, a call took {self.slowdown:.1f}x as long" if self.slowdown > 1 else took


@dataclass(frozen=True)
class Batches:
    """What a call of the workload gave to its outermost modules."""

    run: int = 0
    """How often it called them."""
    seen_before: int = 0
    """How many of those had inputs equal, value for value, to an earlier one's in the same call."""


@dataclass(frozen=True)
class Padding:
    """Padded positions in the inputs."""

    share: float = 0.0
    where: str = ""
    """What shows it: a mask's zeros, or a repeated last token."""


@dataclass(frozen=True)
class Weights:
    """Parameters of the model. Sizes in bytes."""

    bytes: int = 0
    duplicate_bytes: int = 0
    """Parameters that equal another one, value for value, without sharing its memory."""
    subnormal: float = 0.0
    """Share of weights too small for full precision: the CPU handles them in slow steps."""


@dataclass(frozen=True)
class Loading:
    """What the DataLoaders did, for each call."""

    seconds: float = 0.0
    """Making their iterators, and waiting for batches."""
    rows: int = 0
    """Smallest batch size; 0 where there is no loader, or where it batches in its own way."""
    batches: int = 0
    at_hand_s: float = 0.0
    """The whole call with the loaders' batches kept from an earlier one; 0 where that was not tried."""


@dataclass(frozen=True)
class Kept:
    """Tensors that a call made and that outlived the next call too, a call, once it has settled."""

    tensors: float = 0.0
    graphs: float = 0.0
    """How many of those hold on to an autograd graph."""
    bytes: float = 0.0


@dataclass(frozen=True)
class Fresh:
    """Memory that a call fetched from the system, on a CPU."""

    pages: float = 0.0
    seconds: float = 0.0
    """Their number times what one was seen to cost."""
    s_per_byte: float = 0.0
    """What it costs to write memory for the first time, over what it costs later. 0 where it does not matter: the
    call fetches little and keeps no graph alive."""


@dataclass(frozen=True)
class Evidence:
    """Everything that the rules look at, of one workload on one machine. Times in seconds a call."""

    facts: Facts
    wall_s: float
    """Median time of a call as given, nothing watching."""
    operations: Sequence[Operation] = ()
    peaks: Mapping[str, float] = field(default_factory=dict)
    """`fettle.machine.measure_peaks`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Process-wide switches that change speed, as found after the workload was built."""
    variants: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Quick interleaved trials of what can be switched in place: share of the time saved, and its 95% interval."""
    crowded: float = 0.0
    """Share of the plain calls in which threads that could have run had no core: other programs took it."""
    load: Load = field(default_factory=Load)
    """What others took while it was gathered, recorded and compiled; of waiting for a core what plain calls did."""
    load_s: float = 0.0
    first_call_s: float = 0.0
    gc_s: float = 0.0
    """Time in Python's garbage collector a call."""
    slept_s: float = 0.0
    """Time that the process neither computed nor was kept from it by others: sleeping, waiting for files or network."""
    pauses: Mapping[str, float] = field(default_factory=dict)
    """Seconds between two operators, where these are more than the host's work around any operator, by what came next:
    a source line, or the end of the call."""
    syncs: Sequence[Sync] = ()
    compiled: bool = False
    """Whether the workload's model is compiled as it was given."""
    compile: CompileHealth | None = None
    batches: Batches = Batches()
    built: Mapping[str, int] = field(default_factory=dict)
    """Parameters that modules were given during a call, by source line."""
    padding: Padding = Padding()
    weights: Weights = Weights()
    loading: Loading = Loading()
    kept: Kept = Kept()
    fresh: Fresh = Fresh()
    allocator: Mapping[str, int] = field(default_factory=dict)
    """Counters of the device's allocator over the plain calls (`torch.cuda.memory_stats`); empty on a CPU."""
    costs: Mapping[str, Cost] = field(default_factory=dict)
    """What each collector cost, by its name."""

    def seconds(self, *groups: str) -> float:
        """Time of all operators of these groups."""
        return sum(op.seconds for op in self.operations if op.group in groups)

    @property
    def outside_s(self) -> float:
        """Time of a call outside all operators and loaders: Python, autograd's and the dispatcher's work, waiting."""
        return max(0.0, self.wall_s - sum(op.seconds for op in self.operations) - self.loading.seconds)

    @property
    def other_work_s(self) -> float:
        """Time in long pauses between operators in which the process neither waited nor fetched memory: Python, NumPy
        or another library at work."""
        if self.compiled:
            return 0.0
        idle_s = self.slept_s + self.gc_s
        host_s = _HOST_S * sum(op.calls for op in self.operations)
        without_core_s = self.crowded * self.wall_s
        left_s = self.outside_s - idle_s - host_s - without_core_s - self.fresh.seconds
        return max(0.0, min(sum(self.pauses.values()) - self.loading.seconds - idle_s, left_s))

    @property
    def host_s(self) -> float:
        """Time outside operators and loaders that is no work of another kind; none of a compiled model, whose own work
        cannot be told from it."""
        return 0.0 if self.compiled else self.outside_s - self.other_work_s

    @property
    def unexplained_s(self) -> float:
        """Time outside operators beyond what Python and the dispatcher need: its cause is not known."""
        if self.compiled:  # what runs inside a compiled graph is not seen
            return 0.0
        slept_s = self.slept_s if self.share(self.slept_s) >= 0.1 else 0.0  # less is noise
        known = slept_s + self.gc_s + self.other_work_s + _HOST_S * sum(op.calls for op in self.operations)
        return max(0.0, self.outside_s - known)

    def ideal_s(self) -> float:
        """What the products would take at the machine's measured peak."""
        products = [op for op in self.operations if op.group == MATRIX]
        return sum(min(op.seconds, op.flops / self.peak_flops(op.dtype)) for op in products)

    def share(self, seconds: float) -> float:
        """Seconds as a share of `whole_s`."""
        return min(1.0, max(0.0, seconds / self.whole_s)) if self.whole_s > 0 else 0.0

    @property
    def whole_s(self) -> float:
        """What shares are shares of: the call, or its operators' time where watching found that to be more."""
        return max(self.wall_s, self.seconds(*GROUPS))

    def peak_flops(self, dtype: str) -> float:
        """Measured FLOP/s of a large product in `dtype`; infinite where it is unknown, so that no time is ideal."""
        return self.peaks.get(f"matmul_{dtype}") or float("inf")
