"""The trace and the allocator's history that a diagnosis records itself, and what their rules add to it."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fettle.diagnose.collectors.recording import Recorded
from fettle.diagnose.evidence import Kernel
from fettle.diagnose.examiner import Examiner
from fettle.diagnose.files import of_snapshot, of_trace
from fettle.diagnose.finding import Finding
from fettle.errors import UsageError
from fettle.measure import WorkerError
from fettle.recipe import Recipe
from fettle.techniques import Facts, conflict

_ENDINGS = {"memory": "memory.pickle", "trace": "trace.json.gz"}
"""Collectors of `recording`, and how their files end."""
_OPENED_BY = {"memory": "memory", "trace": "trace account"}

_SAME_CAUSE = {
    "python-bound": ("host-bound", "python-loop"),
    "launch-bound": ("host-bound", "python-loop"),
    "launch-bound-calls": ("host-bound", "python-loop"),
    "launch-latency": ("host-bound", "python-loop"),
    "small-kernels": ("not-fused",),
    "between-kernels": ("not-fused",),
    "compiling": ("recompiles",),
    "allocator": ("churn",),
}
"""By rule of a recording: the rules that speak of the same cause under another name."""

_TIMED_UNWATCHED = ("data-wait", "python-bound", "garbage-collection")
"""On a CPU these are timed by collectors that leave the call as it is: a trace, which makes Python slower, may confirm
what they found, and adds no cause of its own."""


@dataclass(frozen=True)
class Recording:
    """A file that a diagnosis recorded."""

    kind: str
    """``trace`` or ``memory``."""
    cost: Recorded
    size_bytes: int
    says: str = ""
    """A sentence about all of it."""
    path: str = ""
    """Where it was kept; empty where it was not asked for."""
    kernels: Sequence[Kernel] = ()
    """Of one call, by operator; empty on a CPU, where an operator is its own kernel."""

    @property
    def command(self) -> str:
        """What opens the file; empty where it was not kept."""
        return f"fettle {_OPENED_BY[self.kind]} {shlex.quote(self.path)}" if self.path else ""


def record(
    examiner: Examiner,
    seconds: float,
    beside: Path | None,
    on_progress: Callable[[str], None],
    operators: Collection[str] = (),
) -> tuple[list[Recording], list[Finding], list[str]]:
    """Record a trace and an allocator's history; what was recorded, what their rules say, and what failed, a line each.

    With `beside`, the path of a report, the files are kept next to it under its name. Kernels are those of `operators`.
    """
    made: list[Recording] = []
    found: list[Finding] = []
    notes: list[str] = []
    if beside is not None:
        beside.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fettle-", dir=beside and beside.absolute().parent) as folder:
        for kind, ending in _ENDINGS.items():
            on_progress(f"recording: {kind}")
            path = Path(folder) / ending
            try:
                cost = examiner.examine(f"collectors.recording:{kind}", seconds, str(path)).read(Recorded)
                calls = cost.calls
                read = of_trace(path, calls, operators) if kind == "trace" else of_snapshot(path, calls)
            except (UsageError, WorkerError) as error:
                notes.append(f"{kind}: not recorded, {str(error).removeprefix(f'{path}: ')}")
                continue
            found += [_marked(item, kind) for item in read.findings]
            notes += read.notes
            made.append(Recording(kind, cost, path.stat().st_size, read.says, kernels=read.kernels))
            if beside is not None:
                kept = beside.with_name(f"{beside.stem}.{ending}")
                os.replace(path, kept)
                made[-1] = replace(made[-1], path=str(kept))
    return made, found, notes


def joined(found: Sequence[Finding], more: Sequence[Finding], facts: Facts) -> list[Finding]:
    """Findings about a workload and those from its recordings, one for each cause, the costliest first.

    Of a cause that has a finding already, a recording adds its evidence, and what that one does not know.
    """
    by_rule = {item.rule: item for item in found}
    for item in more:
        same = next((rule for rule in (item.rule, *_SAME_CAUSE.get(item.rule, ())) if rule in by_rule), None)
        if same is not None:
            by_rule[same] = _confirmed(by_rule[same], item)
        elif facts.device != "cpu" or item.rule not in _TIMED_UNWATCHED:
            by_rule[item.rule] = replace(item, levels={}) if conflict(Recipe(item.levels), facts) else item
    return sorted(by_rule.values(), key=lambda item: item.weight, reverse=True)


def _marked(item: Finding, kind: str) -> Finding:
    return replace(item, evidence=tuple(f"{kind}: {line}" for line in item.evidence))


def _confirmed(first: Finding, other: Finding) -> Finding:
    where = tuple(dict.fromkeys((*first.where, *other.where)))
    first = replace(first, where=where, evidence=(*first.evidence, *other.evidence))
    if other.bound and not (first.bound or first.bound_bytes):  # churn of the allocator, whose time only a trace shows
        first = replace(first, bound=other.bound, formula=other.formula)
    return first
