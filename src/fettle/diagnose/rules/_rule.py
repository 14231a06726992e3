"""What a rule is: a function that looks at the evidence, registered by its decorator; and what rules share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

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
GRAPHS = {"cuda_graphs": "on", "grad": "inference_mode"}

Mode = Literal["inference", "training"]
cause = functools.partial(Finding, "")
"""A finding without its rule's name, which `rule` adds."""


@dataclass(frozen=True)
class Rule:
    """One rule. Call it with evidence: it says one thing, or nothing."""

    name: str
    look: Callable[[Evidence], Finding | None]
    modes: Sequence[Mode]
    """Workloads that it is for; the others have no such fault, or could not fix it."""

    def __call__(self, call: Evidence) -> Finding | None:
        finding = self.look(call)
        return finding and replace(finding, rule=self.name, bound=min(0.999, finding.bound))


RULES: dict[str, Rule] = {}
"""By the name that `Finding.rule` has. Of two with the same bound the earlier one comes first."""


def rule(*modes: Mode) -> Callable[[Callable[[Evidence], Finding | None]], Rule]:
    """Register a function as the rule of its own name, underscores as hyphens, for workloads of these modes."""

    def register(look: Callable[[Evidence], Finding | None]) -> Rule:
        name = look.__name__.replace("_", "-")
        RULES[name] = Rule(name, look, modes)
        return RULES[name]

    return register


def named(call: Evidence, *names: str) -> list[Operation]:
    """All operators with one of these names."""
    wanted = {f"aten.{name}" for name in names}
    return [op for op in call.operations if op.name in wanted]


def taken(ops: Sequence[Operation]) -> float:
    """Seconds of a call in these operators."""
    return sum(op.seconds for op in ops)


def above_peak(call: Evidence, ops: Sequence[Operation], dtype: str = "") -> float:
    """Seconds that these operators took beyond what their FLOPs need at the measured peak: of `dtype`, or their own."""
    return sum(max(0.0, op.seconds - op.flops / call.peak_flops(dtype or op.dtype)) for op in ops)


def about_operators(
    call: Evidence,
    says: str,
    ops: Sequence[Operation],
    advice: str,
    *,
    formula: str,
    before: str = Finding.before,
    after: str,
    seconds: float | None = None,
    levels: Mapping[str, str] | None = None,
    more: Sequence[str] = (),
    besides: float = 0.0,
    least: float = LEAST,
    opportunity: bool = False,
) -> Finding | None:
    """A finding about operators, unless mending it could bring less than `least` of a call.

    Mending it could save `seconds`; None is all the time of the operators.
    Seconds that mending it could save `besides`, and time that is not accounted for (fresh memory, mostly) and that may
    belong to these operators, count in the bound, and not in the decision whether there is a finding.
    """
    seconds = taken(ops) if seconds is None else seconds
    if call.share(seconds) < least:
        return None
    if call.share(seconds) >= 0.005:
        says = f"{says.removesuffix('.')} ({call.share(seconds):.0%} of a call)."
    costliest = sorted(ops, key=lambda op: -op.seconds)[:4]
    lines = [f"{place(op)}: {op.name} {op.dtype}, {op.calls}x, {op.seconds * 1e3:.3g} ms" for op in costliest]
    return cause(
        says,
        call.share(seconds + besides + call.unexplained_s),
        where=tuple(dict.fromkeys(place(op) for op in costliest)),
        evidence=(*(line for line in more if line), *lines),
        parts=tuple((f"{place(op)}: {op.name}", call.share(op.seconds)) for op in costliest),
        levels=levels or {},
        advice=advice,
        formula=formula,
        before=before,
        after=after,
        opportunity=opportunity,
    )


def in_bf16(call: Evidence) -> dict[str, str]:
    """The level that stores float32 weights in bfloat16; none where they are of another type."""
    return {"precision": "bf16"} if call.facts.dtype == "float32" else {}


def unfused(call: Evidence) -> float:
    """For a compiled model, the share of a call that one whole graph would not need. 0 where it is not compiled."""
    groups = call.seconds(POINTWISE, LAYOUT, CAST, INDEX)
    return call.share(groups + call.outside_s) if call.compiled else 0.0


def place(op: Operation) -> str:
    """The module and the source line of an operator."""
    module = f"{op.module} ({op.kind})" if op.module else "the model itself"
    return f"{module} at {op.line}" if op.line else module


def short(path: str) -> str:
    """A file's name without its folders."""
    return path.rpartition("/")[2]
