"""How close the work comes to what this machine can do: the roofline of each module and operator, and the whole's MFU.

The roof of a piece of work is the larger of two times: its FLOPs at the measured peak of its dtype, and its bytes at
the measured copy bandwidth (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009). Bytes are counted from shapes,
as if nothing stayed in a cache, so small work can be above its roof. MFU is the whole's FLOPs per second over the peak
(Chowdhery et al.: PaLM, 2022, appendix B), here over the measured peak instead of the data sheet's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fettle.diagnose.evidence import MATRIX, Evidence, Kernel, Operation


@dataclass(frozen=True)
class Roof:
    """One module or operator under its roof. Of one call of the workload."""

    name: str
    kind: str
    """Class of the module; dtype of the operator."""
    seconds: float
    flops: int
    bytes: int
    least_s: float
    """The shortest that the roof allows."""
    limit: str
    """``compute`` or ``memory``: which side of the roof that is."""

    @property
    def flops_per_s(self) -> float:
        """As achieved."""
        return self.flops / self.seconds if self.seconds > 0 else math.nan

    @property
    def reachable_flops_per_s(self) -> float:
        """At the roof."""
        return self.flops / self.least_s if self.least_s > 0 else math.nan

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes if self.bytes else math.inf

    @property
    def reached(self) -> float:
        """Share of the roof, 0 to 1; small work out of a cache may be above 1."""
        return self.least_s / self.seconds if self.seconds > 0 else math.nan


@dataclass(frozen=True)
class Roofline:
    """All modules and operators, the costliest first."""

    modules: Sequence[Roof]
    operators: Sequence[Roof]
    mfu: float
    """FLOPs of a call over its wall time and the measured peak of `dtype`; NaN where no peak was measured."""
    dtype: str
    """The dtype that most FLOPs run in."""
    kernels: Sequence[Roof] = ()
    """A device's kernels, by kernel and operator (`kind`). Those of one operator share its FLOPs and bytes by time."""

    @property
    def mfu_text(self) -> str:
        """The MFU in words; empty where it is not known."""
        if math.isnan(self.mfu):
            return ""
        slowed = " (which other programs must have slowed)" if self.mfu > 1 else ""
        return f"MFU {self.mfu:.1%}: of the FLOP/s that a large {self.dtype} product reaches here{slowed}"


def roofline(evidence: Evidence, kernels: Sequence[Kernel] = ()) -> Roofline | None:
    """The roofline of what was watched; None where nothing was, or no peak is known."""
    if not evidence.operations or not evidence.peaks:
        return None
    modules, operators = defaultdict(list), defaultdict(list)
    flops: dict[str, int] = defaultdict(int)
    for op in evidence.operations:
        modules[op.module, op.kind].append(op)
        operators[op.name, op.dtype].append(op)
        flops[op.dtype] += op.flops
    dtype = max(flops, key=lambda key: flops[key])
    peak = evidence.peak_flops(dtype)
    known = math.isfinite(peak) and evidence.wall_s > 0
    return Roofline(
        modules=_sorted(
            _roof(evidence, name or "(outside modules)", kind, ops) for (name, kind), ops in modules.items()
        ),
        operators=_sorted(_roof(evidence, name, kind, ops) for (name, kind), ops in operators.items()),
        mfu=sum(flops.values()) / evidence.wall_s / peak if known else math.nan,
        dtype=dtype,
        kernels=_sorted(_kernel_roofs(evidence, kernels)),
    )


def _kernel_roofs(evidence: Evidence, kernels: Sequence[Kernel]) -> Iterable[Roof]:
    taken: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        taken[kernel.operator] += kernel.seconds
    for kernel in kernels:
        ops = [op for op in evidence.operations if op.name == kernel.operator]
        whole = _roof(evidence, kernel.name, kernel.operator, ops)
        part = kernel.seconds / taken[kernel.operator] if taken[kernel.operator] else 0.0
        flops, moved, least_s = round(whole.flops * part), round(whole.bytes * part), whole.least_s * part
        yield replace(whole, seconds=kernel.seconds, flops=flops, bytes=moved, least_s=least_s)


def _roof(evidence: Evidence, name: str, kind: str, ops: Iterable[Operation]) -> Roof:
    seconds = least = computing = 0.0
    flops = moved = 0
    bandwidth = evidence.peaks.get("copy", math.inf)
    for op in ops:
        compute_s = op.flops / evidence.peak_flops(op.dtype) if op.group == MATRIX else 0.0
        memory_s = op.bytes / bandwidth
        seconds, flops, moved = seconds + op.seconds, flops + op.flops, moved + op.bytes
        least += max(compute_s, memory_s)
        computing += compute_s if compute_s > memory_s else 0.0
    return Roof(name, kind, seconds, flops, moved, least, "compute" if computing > 0.5 * least else "memory")


def _sorted(roofs: Iterable[Roof]) -> list[Roof]:
    return sorted((roof for roof in roofs if roof.bytes or roof.flops), key=lambda roof: -roof.seconds)
