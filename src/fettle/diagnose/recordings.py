"""From traces and snapshots to findings: files from elsewhere, and files that a diagnosis records itself, in the
process that a workload is examined in."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fettle.diagnose.collectors.recording import Recorded
from fettle.diagnose.evidence import Kernel
from fettle.diagnose.finding import Finding
from fettle.diagnose.rules.snapshot import snapshot_findings
from fettle.diagnose.rules.trace import trace_findings
from fettle.errors import UsageError
from fettle.measure import Load, Surroundings, Worker, WorkerError, messages
from fettle.memory import analyse, verdict
from fettle.memory import read as read_snapshot
from fettle.recipe import Recipe
from fettle.techniques import Facts, conflict
from fettle.trace import kernels_under, load, trace_health
from fettle.workload import Target

_SNAPSHOTS = (".pickle", ".pkl")
_TRACES = (".json", ".json.gz")


@dataclass(frozen=True)
class OfFile:
    """What one file says, or several."""

    findings: Sequence[Finding]
    budget: Mapping[str, float] = field(default_factory=dict)
    """Shares of the wall time; empty for snapshots."""
    notes: Sequence[str] = ()
    says: str = ""
    """A sentence about all of it."""
    kernels: Sequence[Kernel] = ()
    """The kernels of one call, where a trace of known operators on a device was read."""


def traces_and_snapshots(path: Path) -> list[Path]:
    """The file itself, or the files of a folder, that are traces or snapshots by their names; traces first.

    Raises `UsageError` for a folder without any.
    """
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    recordings = [file for endings in (_TRACES, _SNAPSHOTS) for file in files if file.name.endswith(endings)]
    if not recordings and path.is_dir():
        raise UsageError(f"{path}: no traces (.json, .json.gz) and no memory snapshots (.pickle) in this folder")
    return recordings


def of_files(files: Sequence[Path], on_progress: Callable[[str], None]) -> OfFile:
    """What the files say. Of several, those that cannot be read are left out with a note."""
    read: list[OfFile] = []
    unreadable: list[str] = []
    for path in files:
        on_progress(f"reading {path.name}")
        try:
            one = of_trace(path) if path.name.endswith(_TRACES) else of_snapshot(path)
        except UsageError as error:
            if len(files) == 1:
                raise
            unreadable.append(str(error))
            continue
        if len(files) > 1:
            named = [replace(item, evidence=(f"in {path.name}", *item.evidence)) for item in one.findings]
            one = replace(one, findings=named)
        read.append(one)
    if not read:
        raise UsageError(f"{files[0].parent}: none of its files can be read, for instance {unreadable[0]}")
    findings = sorted((item for one in read for item in one.findings), key=lambda item: item.weight, reverse=True)
    budgets = [one.budget for one in read if one.budget]
    causes = dict.fromkeys(name for budget in budgets for name in budget)
    shares = {name: sum(budget.get(name, 0.0) for budget in budgets) / len(budgets) for name in causes}
    notes = [*(f"left out: {line}" for line in unreadable), *(note for one in read for note in one.notes)]
    return OfFile(findings, shares, notes)


def of_trace(path: Path, calls: int = 0, operators: Collection[str] = ()) -> OfFile:
    """What a profiler trace says: any, or one of so many calls of a workload that was recorded a moment ago.

    Raises `UsageError` for a file that is none.
    """
    recorded = calls > 0
    trace = load(path, use_sidecar=not recorded)
    uncertain = trace_health(trace).uncertain
    if recorded and "account" not in uncertain:  # nothing else is asked of it
        uncertain = ()
    notes = [f"{path.name}: uncertain: {', '.join(uncertain)}"] if uncertain else []
    from fettle.page import clean  # takes a while to load

    findings, budget = clean(trace_findings(trace))
    if not budget:
        raise UsageError(f"{path.name}: its events take no time, there is nothing to account for")
    table = kernels_under(trace, {name.replace(".", "::", 1) for name in operators}) if recorded else None
    kernels = [
        Kernel(row["name"], row["operator"].replace("::", ".", 1), row["count"] / calls, row["sum_ns"] / 1e9 / calls)
        for row in (table.iter_rows(named=True) if table is not None else ())
    ]
    return OfFile(findings, budget, notes, kernels=kernels)


def of_snapshot(path: Path, calls: int = 0) -> OfFile:
    """What an allocator's snapshot says, of so many calls of one workload or of anything. Raises `UsageError`."""
    analysis = analyse(read_snapshot(path))
    notes = [f"{path.name}: {note}" for note in analysis.snapshot.notes]
    broken = analysis.violations
    if broken:
        notes.append(f"{path.name}: contradicts itself in {len(broken)} place(s), for instance {broken[0]}")
    return OfFile(snapshot_findings(analysis, calls), notes=notes, says=verdict(analysis))


_ENDINGS = {"memory": "memory.pickle", "trace": "trace.json.gz"}
"""Collectors of `recording`, and how their files end."""
_OPENED_BY = {"memory": "memory", "trace": "trace account"}

_SAME_CAUSE = {
    "python-bound": ("host-bound", "python-loop", "other-work"),
    "launch-bound": ("host-bound", "python-loop"),
    "launch-bound-calls": ("host-bound", "python-loop"),
    "launch-latency": ("host-bound", "python-loop"),
    "small-kernels": ("not-fused",),
    "between-kernels": ("not-fused",),
    "compiling": ("recompiles",),
    "allocator": ("churn",),
}
"""By rule of a recording: the rules that report the same cause under another name."""

_TIMED_UNWATCHED = ("data-wait", "python-bound", "garbage-collection")
"""On a CPU these are timed by collectors that leave the call as it is: a trace, which makes Python slower, may confirm
what they found, and adds no cause of its own."""

_LONGEST_S = 1800.0
"""A collector may take so long: that of a slow call makes some twenty, a few of them with one thread."""


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
    """The kernels of one call, by operator; empty on a CPU, where an operator is its own kernel."""

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
    findings: list[Finding] = []
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
            findings += [
                replace(item, evidence=tuple(f"{kind}: {line}" for line in item.evidence)) for item in read.findings
            ]
            notes += read.notes
            made.append(Recording(kind, cost, path.stat().st_size, read.says, kernels=read.kernels))
            if beside is not None:
                kept = beside.with_name(f"{beside.stem}.{ending}")
                os.replace(path, kept)
                made[-1] = replace(made[-1], path=str(kept))
    return made, findings, notes


def joined(findings: Sequence[Finding], more: Sequence[Finding], facts: Facts) -> list[Finding]:
    """Findings about a workload and those from its recordings, one for each cause, the costliest first.

    Of a cause that has a finding already, a recording adds its evidence, and what that one does not know.
    """
    by_rule = {item.rule: item for item in findings}
    for item in more:
        same = next((rule for rule in (item.rule, *_SAME_CAUSE.get(item.rule, ())) if rule in by_rule), None)
        if same is not None:
            by_rule[same] = _confirmed(by_rule[same], item)
        elif facts.device != "cpu" or item.rule not in _TIMED_UNWATCHED:
            by_rule[item.rule] = replace(item, levels={}) if conflict(Recipe(item.levels), facts) else item
    return sorted(by_rule.values(), key=lambda item: item.weight, reverse=True)


def _confirmed(first: Finding, other: Finding) -> Finding:
    where = tuple(dict.fromkeys((*first.where, *other.where)))
    first = replace(first, where=where, evidence=(*first.evidence, *other.evidence))
    if other.bound and not (first.bound or first.bound_bytes):  # churn of the allocator, whose time only a trace shows
        first = replace(first, bound=other.bound, formula=other.formula)
    return first


class Examiner:
    """Runs collectors on a workload in a worker process, and in a new one after a collector that ended it."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._worker: Worker | None = None
        self.around, self.loads = Surroundings(), list[Load]()
        """What others had of the machine meanwhile, by collector."""

    def examine(self, collector: str, seconds: float, path: str = "") -> messages.Examined:
        """What ``module:function`` of this room finds.

        Raises `WorkerError` where it fails, `UsageError` where the workload cannot be built.
        """
        if self._worker is None:
            worker = Worker()
            worker.build(self._target)
            self._worker = worker
        try:
            request = messages.Examine(f"fettle.diagnose.{collector}", seconds, path)
            self.around.mark()
            answer = self._worker.ask(request, messages.Examined, _LONGEST_S)
        except WorkerError as error:
            if error.kind != "error":  # anything but an exception, and the process is gone
                self.close()
            raise
        self.loads.append(self.around.look())
        return answer

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
