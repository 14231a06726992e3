"""What was seen: plain data that travels from the worker process to the rules and into the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fettle.diagnose.compile_health import CompileHealth
from fettle.diagnose.syncs import Sync
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
    """Share of the FLOPs that earlier calls of a growing sequence had done already (see `collect.repeated_share`)."""
    weights: int = 0
    """Distinct weights among the calls: several are several layers, not one in a loop."""
    growth: float = 0.0
    """Elements of the largest output over those of the largest input: what broadcasting made of it."""


@dataclass(frozen=True)
class Evidence:
    """Everything that the rules look at, of one workload on one machine. Times in seconds a call."""

    facts: Facts
    wall_s: float
    """Median time of a call as given, nothing watching."""
    operations: Sequence[Operation] = ()
    watched_s: float = 0.0
    """The same call while each operator was timed: what watching costs is the difference."""
    peaks: Mapping[str, float] = field(default_factory=dict)
    """`fettle.machine.measure_peaks`."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Process-wide switches that change speed, as found after the workload was built."""
    variants: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """Quick interleaved trials of what can be switched in place: share of the time saved, and its 95% interval."""
    threads: int = 1
    cores: int = 1
    rows: int = 1
    padding: float = 0.0
    """Share of positions in the inputs that are padding."""
    padding_where: str = ""
    subnormal_weights: float = 0.0
    """Share of nonzero weights too small for full precision: the CPU handles them in slow steps."""
    weight_bytes: int = 0
    duplicate_bytes: int = 0
    """Bytes of parameters that equal another parameter's, value for value, without sharing its memory."""
    peak_bytes: int | None = None
    load_s: float = 0.0
    first_call_s: float = 0.0
    syncs: Sequence[Sync] = ()
    compile: CompileHealth | None = None
    compiled: bool = False
    """Whether the workload's model is compiled as it was given."""
    batches_run: int = 0
    """How often a call of the workload called its outermost modules."""
    batches_seen_before: int = 0
    """How many of those had inputs equal, value for value, to an earlier one's in the same call."""
    loader_s: float = 0.0
    """Time a call in DataLoaders: making their iterators, and waiting for batches."""
    tensors_kept: float = 0.0
    """Tensors that were alive after a call and not before it, a call, once it has settled."""
    graphs_kept: float = 0.0
    """How many of those hold on to an autograd graph."""
    bytes_kept: float = 0.0
    """Bytes of those tensors, a call."""
    gc_s: float = 0.0
    """Time in Python's garbage collector a call."""
    slept_s: float = 0.0
    """Time that the process neither computed nor was kept from it by others: sleeping, waiting for files or network."""

    def seconds(self, *groups: str) -> float:
        """Time of all operators of these groups."""
        return sum(op.seconds for op in self.operations if op.group in groups)

    @property
    def outside_s(self) -> float:
        """Time of a call outside all operators: Python, autograd's and the dispatcher's own work, waiting."""
        return max(0.0, self.wall_s - sum(op.seconds for op in self.operations))

    def share(self, seconds: float) -> float:
        """Seconds as a share of the call: of its operators' time, where watching found that to be more."""
        whole = max(self.wall_s, self.seconds(*GROUPS))
        return min(1.0, max(0.0, seconds / whole)) if whole > 0 else 0.0

    def peak_flops(self, dtype: str) -> float:
        """Measured FLOP/s of a large product in `dtype`; infinite where it is unknown, so that no time is ideal."""
        return self.peaks.get(f"matmul_{dtype}") or float("inf")
