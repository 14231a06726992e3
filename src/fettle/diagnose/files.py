"""From traces and snapshots to findings: files from elsewhere, and files that a diagnosis recorded itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fettle.diagnose.evidence import Kernel
from fettle.diagnose.finding import Finding
from fettle.errors import UsageError

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
    """Of one call, where a trace of known operators on a device was read."""


def traces_and_snapshots(path: Path) -> list[Path]:
    """The file itself, or the files of a folder, that are traces or snapshots by their names; traces first.

    Raises `UsageError` for a folder without any.
    """
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    found = [file for endings in (_TRACES, _SNAPSHOTS) for file in files if file.name.endswith(endings)]
    if not found and path.is_dir():
        raise UsageError(f"{path}: no traces (.json, .json.gz) and no memory snapshots (.pickle) in this folder")
    return found


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
    found = sorted((item for one in read for item in one.findings), key=lambda item: item.weight, reverse=True)
    budgets = [one.budget for one in read if one.budget]
    causes = dict.fromkeys(name for budget in budgets for name in budget)
    shares = {name: sum(budget.get(name, 0.0) for budget in budgets) / len(budgets) for name in causes}
    notes = [*(f"left out: {line}" for line in unreadable), *(note for one in read for note in one.notes)]
    return OfFile(found, shares, notes)


def of_trace(path: Path, calls: int = 0, operators: Collection[str] = ()) -> OfFile:
    """What a profiler trace says: any, or one of so many calls of a workload that was recorded a moment ago.

    Raises `UsageError` for a file that is none.
    """
    from fettle.diagnose.rules.trace import trace_findings
    from fettle.trace import kernels_under, load, trace_health

    recorded = calls > 0
    trace = load(path, use_sidecar=not recorded)
    uncertain = trace_health(trace).uncertain
    if recorded and "account" not in uncertain:  # nothing else is asked of it
        uncertain = ()
    notes = [f"{path.name}: uncertain: {', '.join(uncertain)}"] if uncertain else []
    found, budget = trace_findings(trace)
    if not budget:
        raise UsageError(f"{path.name}: its events take no time, there is nothing to account for")
    table = kernels_under(trace, {name.replace(".", "::", 1) for name in operators}) if recorded else None
    kernels = [
        Kernel(row["name"], row["operator"].replace("::", ".", 1), row["count"] / calls, row["sum_ns"] / 1e9 / calls)
        for row in (table.iter_rows(named=True) if table is not None else ())
    ]
    return OfFile(found, budget, notes, kernels=kernels)


def of_snapshot(path: Path, calls: int = 0) -> OfFile:
    """What an allocator's snapshot says, of so many calls of one workload or of anything. Raises `UsageError`."""
    from fettle.diagnose.rules.snapshot import snapshot_findings
    from fettle.memory import analyse, read, verdict

    analysis = analyse(read(path))
    notes = [f"{path.name}: {note}" for note in analysis.snapshot.notes]
    broken = analysis.violations
    if broken:
        notes.append(f"{path.name}: contradicts itself in {len(broken)} place(s), for instance {broken[0]}")
    return OfFile(snapshot_findings(analysis, calls), notes=notes, says=verdict(analysis))
