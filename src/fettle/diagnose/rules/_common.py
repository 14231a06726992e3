"""What rules share: choosing operators, and a finding about operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fettle.diagnose.evidence import CAST, INDEX, LAYOUT, POINTWISE, Evidence, Operation
from fettle.diagnose.finding import Finding

LEAST = 0.03
"""Share of the wall time below which a cause is not worth a line."""
CROWDED = 0.1
"""Share of time without a core from which on a machine is busy with other things."""
UNKNOWN = (0.0, 0.0, 0.0)
"""Share saved and its interval where nothing was tried."""
OPTIMIZER = ("addcdiv_", "addcmul_", "lerp_")
"""In-place operators that hardly anything but an optimizer's step uses."""


def named(seen: Evidence, *names: str) -> list[Operation]:
    """All operators with one of these names."""
    wanted = {f"aten.{name}" for name in names}
    return [op for op in seen.operations if op.name in wanted]


def taken(ops: Sequence[Operation]) -> float:
    """Seconds of a call in these operators."""
    return sum(op.seconds for op in ops)


def above_peak(seen: Evidence, ops: Sequence[Operation], dtype: str = "") -> float:
    """Seconds that these operators took beyond what their FLOPs need at the measured peak: of `dtype`, or their own."""
    return sum(max(0.0, op.seconds - op.flops / seen.peak_flops(dtype or op.dtype)) for op in ops)


def about(
    seen: Evidence,
    rule: str,
    says: str,
    ops: Sequence[Operation],
    advice: str,
    *,
    formula: str,
    before: str,
    after: str,
    seconds: float | None = None,
    levels: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
    besides: float = 0.0,
    least: float = LEAST,
    always: bool = False,
    opportunity: bool = False,
) -> Finding | None:
    """A finding about operators, unless mending it could bring next to nothing.

    Mending it could save `seconds`; None is all the time of the operators.
    Seconds that mending it could save `besides`, and time that nobody accounts for (fresh memory, mostly) and that may
    belong to these operators, count in the bound, and not in the decision whether there is a finding.
    """
    seconds = taken(ops) if seconds is None else seconds
    if seen.share(seconds) < least and not always:
        return None
    if seen.share(seconds) >= 0.005:
        says = f"{says.removesuffix('.')} ({seen.share(seconds):.0%} of a call)."
    dearest = sorted(ops, key=lambda op: -op.seconds)[:4]
    lines = [f"{place(op)}: {op.name} {op.dtype}, {op.calls}x, {op.seconds * 1e3:.3g} ms" for op in dearest]
    return Finding(
        rule,
        says,
        min(0.999, seen.share(seconds + besides + seen.unexplained_s)),
        where=tuple(dict.fromkeys(place(op) for op in dearest)),
        evidence=(*(line for line in more if line), *lines),
        parts=tuple((f"{place(op)}: {op.name}", seen.share(op.seconds)) for op in dearest),
        levels=levels or {},
        advice=advice,
        formula=formula,
        before=before,
        after=after,
        opportunity=opportunity,
    )


def unfused(seen: Evidence) -> float:
    """Of a compiled model: the share of a call that one whole graph would not need. 0 where nobody compiles."""
    return seen.share(seen.seconds(POINTWISE, LAYOUT, CAST, INDEX) + seen.outside_s) if seen.compiled else 0.0


def place(op: Operation) -> str:
    """The module and the source line of an operator."""
    module = f"{op.module} ({op.kind})" if op.module else "the model itself"
    return f"{module} at {op.line}" if op.line else module


def short(path: str) -> str:
    """A file's name without its folders."""
    return path.rpartition("/")[2]
