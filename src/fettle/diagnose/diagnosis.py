"""From a target, a trace, a snapshot or a folder of both to findings, the costliest first."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fettle.diagnose.compile_worker import compile_health
from fettle.diagnose.evidence import GROUPS, Cost, Evidence
from fettle.diagnose.finding import Finding
from fettle.diagnose.recordings import Examiner, Recording, joined, of_files, traces_and_snapshots
from fettle.diagnose.recordings import record as recorded
from fettle.diagnose.roofline import Roofline, roofline
from fettle.diagnose.rules import findings as rule_findings
from fettle.errors import UsageError, refusing
from fettle.files import plain
from fettle.machine import this_machine
from fettle.measure import WorkerError, busy_load
from fettle.techniques import parts_lines
from fettle.train import target_of, workload_of
from fettle.units import count_text
from fettle.workload import AUTO, Target, check_mode

OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class Watching:
    """A collector, for people."""

    what: str
    cost: str
    """How long it took, or how many times as long a call took under it."""
    says: str = ""
    command: str = ""
    """What opens the file that it kept."""


@dataclass(frozen=True)
class Diagnosis:
    """What was found, and where the time goes."""

    name: str
    """Of the workload, or the path of the trace, the snapshot or the folder."""
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
    recordings: Sequence[Recording] = ()
    """What was recorded of a workload, for a closer look."""

    def __repr__(self) -> str:
        return f"{self.name}: {self.verdict}"

    @property
    def budget_lines(self) -> list[tuple[str, float]]:
        """The budget for people: what the time went into, in words, and its share; the largest first."""
        named = [(name.replace("idle_", "idle: ", 1).replace("_", " "), share) for name, share in self.budget.items()]
        return sorted(named, key=lambda line: -line[1])

    @property
    def verdict(self) -> str:
        """One sentence, which says where others had the machine."""
        under = self.evidence.load.under if self.evidence is not None else ""
        timed = [finding for finding in (*self.findings, *self.opportunities) if finding.bound > 0]
        for first in (*timed, *self.findings, *(one for one in self.opportunities if one.most)):
            return f"{under}{first.says} Mending it could save {first.most}." if first.most else f"{under}{first.says}"
        return f"{under}Nothing stands out: no rule found more than 3% of the time to be won."

    @property
    def roofline(self) -> Roofline | None:
        """What was reached of what the machine could do, by module and operator; None for traces and snapshots."""
        kernels = next((item.kernels for item in self.recordings if item.kernels), ())
        return roofline(self.evidence, kernels) if self.evidence is not None else None

    @property
    def watching(self) -> list[Watching]:
        """What the evidence was gathered with, and what each collector cost."""
        costs = dict(self.evidence.costs) if self.evidence is not None else {}
        if self.evidence is not None and self.evidence.compile is not None:
            costs["torch.compile, in a process of its own"] = Cost(self.evidence.compile.wall_s)
        watching = [Watching(name, str(cost)) for name, cost in costs.items()]
        for item in self.recordings:
            what = f"{item.kind} of {count_text(item.cost.calls, 'call')}"
            slower = f"a call took {item.cost.slowdown:.1f}x as long"
            watching.append(Watching(what, slower, item.says, item.command))
        return watching

    def count(self, rule: str) -> int | None:
        """How often a rule's cause happens: what `--fail-on` limits. None where it was not looked for."""
        every = (*self.findings, *self.opportunities)
        count = sum(max(finding.count, 1) for finding in every if finding.rule == rule)
        needed = self.evidence and (self.evidence.compile if rule in ("graph-breaks", "recompiles") else self.evidence)
        return count if count or needed else None


def diagnose(
    model: Any,
    inputs: Any = None,
    *,
    call: Callable[..., Any] | None = None,
    metric: Callable[[Callable[..., Any]], float] | None = None,
    seconds: float = 6.0,
    compile_check: bool = True,
    record: bool = True,
    beside: str | Path | None = None,
    mode: str = AUTO,
    on_progress: OnProgress = lambda text: None,
) -> Diagnosis:
    """Diagnose a workload, a profiler trace, an allocator snapshot, or a folder of them.

    `model`, `inputs`, `call`, `metric` and `mode` are what `fettle.tune` takes: a live model with inputs, a `Workload`,
    a `TrainingWorkload`, of which a step is diagnosed, or ``"file.py:factory"``. Or `model` is the path of recordings.

    `seconds` is what the timed collectors may take, the workload's own calls apart. With `record` a trace and an
    allocator's history of a few calls are part of the evidence; `beside`, the path of a report, keeps them next to it
    as ``report.trace.json.gz`` and ``report.memory.pickle``. Raises `UsageError` for what is none of these.
    """
    check_mode(mode)
    if not callable(on_progress):
        raise UsageError(f"on_progress is a function of one text, not {on_progress!r:.80}")
    beside = None if beside is None else Path(beside)
    if isinstance(model, (str, Path)) and str(model):
        path = Path(model)
        if path.is_dir() or traces_and_snapshots(path):
            read = of_files(traces_and_snapshots(path), on_progress)
            faults, opportunities = _apart(read.findings)
            return Diagnosis(str(path), faults, read.budget, opportunities=opportunities, notes=read.notes)
    with tempfile.TemporaryDirectory(prefix="fettle-", ignore_cleanup_errors=True) as folder:
        target = target_of(workload_of(model, inputs, call, metric, mode), Path(folder))
        return _of_workload(target, seconds, compile_check, record, beside, on_progress)


def diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """As plain data; NaN becomes None."""
    told: dict[type, Callable[[Any], Any]] = {
        Finding: lambda item: {**plain(item), "speedup_at_most": item.speedup},
        Recording: lambda item: {**plain(item), "slowdown": item.cost.slowdown},
    }
    data: dict[str, Any] = {"verdict": diagnosis.verdict, **plain(diagnosis, told)}
    if diagnosis.evidence is None:
        del data["evidence"]
    else:
        roofs = diagnosis.roofline
        data["roofline"] = roofs and {
            "mfu": plain(roofs.mfu),
            "dtype": roofs.dtype,
            **{
                name: [{**plain(roof), "reached": plain(roof.reached)} for roof in getattr(roofs, name)]
                for name in ("modules", "operators", "kernels")
            },
        }
        data["parts"] = [
            {"name": name, "calls": calls, "seconds": seconds, "share": share, "parameter_bytes": held}
            for name, calls, seconds, share, held in parts_lines(diagnosis.evidence.facts)
        ]
        data["is_quiet"], data["load"] = diagnosis.evidence.load.is_quiet, plain(diagnosis.evidence.load)
    return data


def _of_workload(
    target: Target, seconds: float, compile_check: bool, record: bool, beside: Path | None, on_progress: OnProgress
) -> Diagnosis:
    made: list[Recording] = []
    more: list[Finding] = []
    notes: list[str] = []
    with closing(Examiner(target)) as examiner:
        on_progress("building the workload; timing operators, and what switches bring")
        with refusing("the workload could not be run:", WorkerError):
            answer = examiner.examine("collect:collect", seconds)
        evidence = replace(answer.read(Evidence), load_s=answer.load_s)
        if record:
            operators = {op.name for op in evidence.operations}
            try:
                made, more, notes = recorded(examiner, 0.25 * seconds, beside, on_progress, operators)
            except OSError as error:
                folder = beside.parent if beside else tempfile.gettempdir()
                raise UsageError(f"{folder}: what is recorded cannot be kept there ({error.strerror})") from error
    if evidence.facts.mode == "training":
        notes.append("a call is one step of the training loop; torch.compile was not tried on it")
    elif compile_check:
        on_progress("tracing with torch.compile")
        try:
            health = compile_health(target, backend="aot_eager", rounds=2, timeout_s=180.0)
            if health.compilations or not health.healthy:
                evidence = replace(evidence, compile=health)
            else:
                notes.append("compile health: not known, a call runs no code of the model that torch.compile takes")
        except UsageError as error:
            notes.append(f"compile health: not known, {error}")
        examiner.loads.append(examiner.around.look())
    evidence = replace(evidence, load=replace(busy_load(examiner.loads), waits=evidence.load.waits))
    faults, opportunities = _apart(joined(rule_findings(evidence), more, evidence.facts))
    return Diagnosis(
        target.name,
        faults,
        _budget(evidence),
        opportunities=opportunities,
        wall_s=evidence.wall_s,
        evidence=evidence,
        machine=this_machine().summary,
        notes=notes,
        recordings=made,
    )


def _apart(findings: Sequence[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Faults first, then opportunities."""
    return [item for item in findings if not item.opportunity], [item for item in findings if item.opportunity]


def _budget(evidence: Evidence) -> dict[str, float]:
    """Groups of operators and the rest as shares that add up to 1. Where operators took longer while they were watched
    than the whole call takes, they are scaled to it."""
    inside = {words: evidence.seconds(group) for group, words in GROUPS.items()}
    total = max(sum(inside.values()), evidence.wall_s)
    budget = {name: spent / total for name, spent in sorted(inside.items(), key=lambda item: -item[1])}
    compiled = "compiled code, and " if evidence.compiled else ""
    budget[f"{compiled}outside operators: Python, autograd, dispatch, waiting"] = max(0.0, 1 - sum(budget.values()))
    return {name: share for name, share in budget.items() if share > 5e-4}
