"""From a target, a trace, a snapshot or a folder of both to findings, the costliest first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fettle.diagnose.compile_worker import compile_health
from fettle.diagnose.evidence import GROUPS, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.roofline import Roof, Roofline, roofline
from fettle.diagnose.rules import findings as rule_findings
from fettle.errors import UsageError
from fettle.machine import this_machine
from fettle.measure import Worker, WorkerError
from fettle.workload import Target, check_mode, find_target

Tell = Callable[[str], None]
_SNAPSHOTS = (".pickle", ".pkl")


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and where the time goes."""

    subject: str
    findings: Sequence[Finding]
    """Faults, the costliest first."""
    budget: Mapping[str, float] = field(default_factory=dict)
    """Shares of the wall time by what it went into; they add up to 1 for a workload."""
    wall_s: float = math.nan
    """A call of the workload; NaN for traces and snapshots."""
    evidence: Evidence | None = None
    machine: str = ""
    opportunities: Sequence[Finding] = ()
    """What techniques could bring on top, the most promising first: nothing is wrong there."""
    notes: Sequence[str] = ()

    @property
    def verdict(self) -> str:
        """One sentence."""
        timed = [finding for finding in (*self.findings, *self.opportunities) if finding.bound > 0]
        if timed:
            first = timed[0]
            return f"{first.says} Mending it could save {first.most}."
        for first in self.findings:
            return f"{first.says} Mending it could save {first.most}." if first.most else first.says
        if self.opportunities:
            return self.opportunities[0].says
        return "Nothing stands out: no rule found more than 3% of the time to be won."

    @property
    def roofline(self) -> Roofline | None:
        """What was reached of what the machine could do, by module and operator; None for traces and snapshots."""
        return roofline(self.evidence) if self.evidence is not None else None

    def count(self, rule: str) -> int:
        """How often a rule's cause happens: what `--fail-on` limits."""
        every = (*self.findings, *self.opportunities)
        return sum(max(finding.count, 1) for finding in every if finding.rule == rule)


def diagnose(
    target: str | Path | Target,
    *,
    seconds: float = 6.0,
    compile_check: bool = True,
    mode: str = "inference",
    tell: Tell = lambda text: None,
) -> Diagnosis:
    """Diagnose a workload (``file.py:factory``), a profiler trace, an allocator snapshot, or a folder of them.

    `seconds` is what the timed collectors may take, the workload's own calls apart. With `mode` "training" the factory
    returns a `TrainingWorkload`, and what is diagnosed is its step. Raises `UsageError` for a target that is none of
    these.
    """
    check_mode(mode)
    if isinstance(target, Target):
        return _of_workload(target, seconds, compile_check, tell)
    path = Path(target)
    if path.is_dir():
        return _of_folder(path, tell)
    if path.suffix in _SNAPSHOTS:
        return _of_files([], [path], str(path), tell)
    if path.name.endswith((".json", ".json.gz")):
        return _of_files([path], [], str(path), tell)
    return _of_workload(replace(find_target(str(target)), mode=mode), seconds, compile_check, tell)


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """As plain data; NaN becomes None."""
    data: dict[str, Any] = {
        "subject": diagnosis.subject,
        "verdict": diagnosis.verdict,
        "machine": diagnosis.machine,
        "wall_s": None if math.isnan(diagnosis.wall_s) else diagnosis.wall_s,
        "budget": dict(diagnosis.budget),
        "findings": [{**msgspec.to_builtins(f), "speedup_at_most": f.speedup} for f in diagnosis.findings],
        "opportunities": [{**msgspec.to_builtins(f), "speedup_at_most": f.speedup} for f in diagnosis.opportunities],
        "notes": list(diagnosis.notes),
    }
    if diagnosis.evidence is not None:
        data["roofline"] = _roofline_json(diagnosis.roofline)
        data["evidence"] = msgspec.to_builtins(diagnosis.evidence)
    return data


def _roofline_json(roofs: Roofline | None) -> dict[str, Any] | None:
    if roofs is None:
        return None

    def row(roof: Roof) -> dict[str, Any]:
        reached = None if math.isnan(roof.reached) else roof.reached
        return {**msgspec.to_builtins(roof), "reached": reached}

    return {
        "mfu": None if math.isnan(roofs.mfu) else roofs.mfu,
        "dtype": roofs.dtype,
        "modules": [row(roof) for roof in roofs.modules],
        "operators": [row(roof) for roof in roofs.operators],
    }


def examine(worker: Worker, function: str, seconds: float, timeout_s: float = 300.0) -> dict[str, Any]:
    """Run one collector on the workload that `worker` has built."""
    answer = worker.ask("examine", timeout_s, label=f"fettle.diagnose.collect:{function}", seconds=seconds)
    return dict(answer)


def _of_workload(target: Target, seconds: float, compile_check: bool, tell: Tell) -> Diagnosis:
    notes = []
    plain = msgspec.to_builtins(target)
    with Worker() as worker:
        tell("building the workload")
        _ask_build(worker, plain)
        tell("timing operators, and what switches bring")
        try:
            answer = examine(worker, "collect", seconds)
        except WorkerError as error:
            raise UsageError(f"the workload could not be run: {error}") from error
    seen = replace(msgspec.convert(answer["found"], Evidence, strict=False), load_s=answer["load_s"])
    if target.mode == "training":
        notes.append("a call is one step of the training loop; torch.compile was not tried on it")
    elif compile_check:
        tell("tracing with torch.compile")
        try:
            seen = replace(seen, compile=compile_health(target, backend="aot_eager", rounds=2, timeout_s=180.0))
        except UsageError as error:
            notes.append(f"compile health: not known, {error}")
    found = rule_findings(seen)
    return Diagnosis(
        subject=target.name,
        findings=[finding for finding in found if not finding.opportunity],
        opportunities=[finding for finding in found if finding.opportunity],
        budget=_budget(seen),
        wall_s=seen.wall_s,
        evidence=seen,
        machine=this_machine().summary,
        notes=notes,
    )


def _ask_build(worker: Worker, target: Mapping[str, Any]) -> None:
    try:
        worker.ask("build", 600.0, target=target)
    except WorkerError as error:
        raise UsageError(f"the workload could not be built: {error}") from error


def _budget(seen: Evidence) -> dict[str, float]:
    """Groups of operators and the rest as shares that add up to 1. Where operators took longer while they were watched
    than the whole call takes, they are scaled to it."""
    inside: dict[str, float] = {}
    for op in seen.operations:
        inside[GROUPS[op.group]] = inside.get(GROUPS[op.group], 0.0) + op.seconds
    total = max(sum(inside.values()), seen.wall_s)
    budget = {name: spent / total for name, spent in sorted(inside.items(), key=lambda item: -item[1])}
    budget["outside operators: Python, autograd, dispatch, waiting"] = max(0.0, 1 - sum(budget.values()))
    return {name: share for name, share in budget.items() if share > 5e-4}


def _of_folder(folder: Path, tell: Tell) -> Diagnosis:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    traces = [path for path in files if path.name.endswith((".json", ".json.gz"))]
    snapshots = [path for path in files if path.suffix in _SNAPSHOTS]
    if not traces and not snapshots:
        raise UsageError(f"{folder}: no traces (.json, .json.gz) and no memory snapshots (.pickle) in this folder")
    return _of_files(traces, snapshots, str(folder), tell)


def _of_files(traces: Sequence[Path], snapshots: Sequence[Path], subject: str, tell: Tell) -> Diagnosis:
    """Of several files, those that cannot be read are left out with a note."""
    several = len(traces) + len(snapshots) > 1
    found: list[Finding] = []
    budgets: list[Mapping[str, float]] = []
    notes: list[str] = []
    left_out = 0
    for path in (*traces, *snapshots):
        tell(f"reading {path.name}")
        try:
            items, budget, remarks = _of_trace(path) if path in traces else _of_snapshot(path)
        except UsageError as error:
            if not several:
                raise
            left_out += 1
            notes.append(f"left out: {error}")
            continue
        found += [replace(item, evidence=(f"in {path.name}", *item.evidence)) if several else item for item in items]
        budgets += [budget] if budget else []
        notes += remarks
    if left_out == len(traces) + len(snapshots):
        raise UsageError(f"{subject}: none of its files can be read; {notes[0]}")
    found.sort(key=lambda finding: finding.weight, reverse=True)
    causes = dict.fromkeys(name for budget in budgets for name in budget)
    return Diagnosis(
        subject,
        [finding for finding in found if not finding.opportunity],
        {name: sum(budget.get(name, 0.0) for budget in budgets) / len(budgets) for name in causes},
        opportunities=[finding for finding in found if finding.opportunity],
        notes=notes,
    )


_OfFile = tuple[list[Finding], Mapping[str, float], list[str]]
"""Findings, time budget and notes of one file."""


def _of_trace(path: Path) -> _OfFile:
    from fettle.diagnose.trace_rules import trace_findings
    from fettle.trace import load, trace_health

    trace = load(path)
    uncertain = trace_health(trace).uncertain
    notes = [f"{path.name}: uncertain: {', '.join(uncertain)}"] if uncertain else []
    found, budget = trace_findings(trace)
    if not budget:
        notes.append(f"{path.name}: its events take no time, there is nothing to account for")
    return found, budget, notes


def _of_snapshot(path: Path) -> _OfFile:
    from fettle.diagnose.memory_rules import memory_findings
    from fettle.memory import analyse, read

    return memory_findings(analyse(read(path))), {}, []
