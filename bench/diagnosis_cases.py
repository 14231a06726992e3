"""Is the diagnosis right? Programs with one planted cause each, and healthy ones (bench/diagnosis_cases/).

    python bench/diagnosis_cases.py                    # the whole question; needs a quiet machine for the gains
    python bench/diagnosis_cases.py --collectors       # only: do the sync and compile collectors name the planted line?
    python bench/diagnosis_cases.py --gains            # only: what mending each planted cause brings
    python bench/diagnosis_cases.py --only sync --json result.json

Shown: the planted cause is the first finding in at least 90%; at most one finding over all healthy programs; and the
bound on the gain holds, that is, the measured gain of the mended twin does not exceed it by more than its noise. Gains
are of two processes that run in turn, in random order, as the median of paired ratios with a 95% bootstrap interval;
the bound is broken if the interval's lower end lies above it. Exit code 1 where any of this is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fettle.diagnose import compile_health
from fettle.errors import UsageError, first_line

FOLDER = Path(__file__).parent / "diagnosis_cases"
KINDS = ("syncs", "compiled", "inputs", "compute", "settings", "healthy")


@dataclass(frozen=True)
class Case:
    """One program: its factory in a file, and what is wrong with it ("" for a healthy one)."""

    kind: str
    name: str
    cause: str
    planted: str

    def target(self, fixed: bool = False) -> str:
        return f"{FOLDER / self.kind}.py:{self.name}{'_fixed' if fixed else ''}"


@dataclass(frozen=True)
class Gain:
    """Time as planted over time mended, with a 95% interval."""

    ratio: float
    low: float
    high: float


def all_cases() -> list[Case]:
    found = []
    for kind in KINDS:
        spec = importlib.util.spec_from_file_location(f"cases_{kind}", FOLDER / f"{kind}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += [Case(kind, name, cause, planted) for name, (cause, planted) in module.CASES.items()]
    return found


def build(target: str) -> Any:
    from fettle.workload import find_target

    return find_target(target).load()


# -- gains ------------------------------------------------------------------------------------------------------------


def serve(target: str) -> None:
    """The worker: one pass over the inputs for each line that comes in, its seconds out."""
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        workload = build(target)
        for _ in sys.stdin:
            started = time.perf_counter()
            for batch in workload.inputs:
                workload.run(workload.model, batch)
            print(time.perf_counter() - started, file=answers, flush=True)


def gain(case: Case, seconds: float) -> Gain:
    """Planted against mended, in turn."""
    workers = {
        fixed: subprocess.Popen(
            [sys.executable, __file__, "--serve", case.target(fixed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for fixed in (False, True)
    }

    def one(fixed: bool) -> float:
        workers[fixed].stdin.write("go\n")
        workers[fixed].stdin.flush()
        line = workers[fixed].stdout.readline()
        if not line:
            raise RuntimeError(f"{case.target(fixed)} ended")
        return float(line)

    try:
        for _ in range(3):
            one(False), one(True)
        ratios, deadline = [], time.perf_counter() + seconds
        while len(ratios) < 5 or (time.perf_counter() < deadline and len(ratios) < 200):
            took = {fixed: one(fixed) for fixed in random.sample([False, True], 2)}
            ratios.append(took[False] / took[True])
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(1000))
    return Gain(statistics.median(ratios), medians[25], medians[975])


# -- collectors -------------------------------------------------------------------------------------------------------


def collectors(case: Case) -> str | None:
    """What is wrong with what the collector says of this case, or None. Other causes are not its business."""
    from fettle.diagnose import find_syncs

    if case.kind in ("syncs", "healthy") or case.cause == "sync":
        for fixed in (False, True) if case.cause else (False,):
            workload = build(case.target(fixed))
            owner = getattr(workload.model, "net", workload.model)
            run = lambda work=workload: work.run(work.model, work.inputs[0])  # noqa: E731
            with contextlib.redirect_stdout(io.StringIO()):
                syncs = find_syncs(run, on_device=[owner, workload.inputs]).syncs
            here = [sync for sync in syncs if sync.file == str(FOLDER / f"{case.kind}.py")]
            if bool(here) != (bool(case.cause) and not fixed):
                return f"{'mended' if fixed else 'planted'}: {[(s.line, s.operator) for s in syncs] or 'no sync found'}"
    if case.kind == "compiled":
        for fixed in (False, True):
            health = compile_health(case.target(fixed))
            seen = {
                "graph-break": bool(health.breaks),
                "recompile": bool(health.recompiles),
                "recompile-limit": bool(health.limits),
            }
            if fixed and not health.healthy:
                return f"mended: {health.breaks or health.recompiles or health.errors}"
            if not fixed and not seen[case.cause]:
                return f"planted: seen {[name for name, value in seen.items() if value] or 'nothing'}"
    return None


# -- diagnosis --------------------------------------------------------------------------------------------------------


def diagnosed(target: str) -> list[tuple[str, float]]:
    """Findings in their order, as (rule, bound as a factor)."""
    try:
        from fettle.diagnose import diagnose
    except ImportError:
        raise SystemExit("fettle.diagnose has no diagnose() yet: use --collectors or --gains") from None
    found = diagnose(target)
    # A healthy program may be told what a technique could still do for it: only faults count as findings there.
    shown = found.findings if ":" in target and "healthy" in target else (*found.findings, *found.opportunities)
    return [(finding.rule, finding.speedup) for finding in shown]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose kind, name or cause has this in it")
    parser.add_argument("--seconds", type=float, default=3.0, help="of measuring for each gain")
    parser.add_argument("--collectors", action="store_true")
    parser.add_argument("--gains", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    cases = [case for case in all_cases() if options.only in f"{case.kind} {case.name} {case.cause}"]
    if options.collectors:  # the others are for collectors elsewhere
        cases = [case for case in cases if case.kind in ("syncs", "compiled", "healthy") or case.cause == "sync"]
    rows: list[dict[str, Any]] = []
    bad = 0
    for number, case in enumerate(cases, 1):
        row: dict[str, Any] = asdict(case)
        print(f"{number:3}/{len(cases)} {case.kind:9} {case.name:26}", end="", flush=True)
        try:
            if options.collectors:
                row["problem"] = collectors(case)
            elif options.gains:
                row["gain"] = asdict(gain(case, options.seconds)) if case.cause else None
            else:
                row["findings"] = diagnosed(case.target())
                row["gain"] = asdict(gain(case, options.seconds)) if case.cause else None
        except (UsageError, RuntimeError, ValueError, TypeError) as error:
            row["problem"] = first_line(error)
        problem = row.get("problem")
        bad += problem is not None
        told = problem or row.get("findings", "")
        measured = row.get("gain")
        print(told, f"{measured['ratio']:.2f}x [{measured['low']:.2f}, {measured['high']:.2f}]" if measured else "")
        rows.append(row)
    summary: dict[str, Any] = {"cases": len(rows), "problems": bad}
    if not (options.collectors or options.gains):
        planted = [row for row in rows if row["cause"] and "findings" in row]
        first = [row for row in planted if row["findings"] and row["findings"][0][0] in ACCEPTED[row["cause"]]]
        false = sum(len(row.get("findings", [])) for row in rows if not row["cause"])
        # A finding about something else bounds something else: only a first finding that names the cause is tested.
        broken = [row["name"] for row in first if row["gain"]["low"] > row["findings"][0][1]]
        summary |= {
            "cause_first": len(first),
            "planted": len(planted),
            "false_findings_on_healthy": false,
            "bounds_broken": broken,
            "missed": [row["name"] for row in planted if row not in first],
        }
        bad += len(first) < 0.9 * max(len(planted), 1) or false > 1 or bool(broken)
    print(json.dumps(summary, indent=1))
    if options.json:
        options.json.write_text(json.dumps({"summary": summary, "cases": rows}, indent=1) + "\n")
    raise SystemExit(1 if bad else 0)


# Which rules answer which cause. A cause may be named by more than one rule where they are about the same thing.
ACCEPTED: dict[str, tuple[str, ...]] = {
    "sync": ("syncs", "python-loop"),
    "graph-break": ("graph-breaks",),
    "recompile": ("recompiles",),
    "recompile-limit": ("recompiles",),
    "data-wait": ("data-wait", "waiting", "loading"),
    "small-batch": ("small-batch",),
    "duplicate-data": ("duplicate-data",),
    "launch-bound": ("host-bound", "small-kernels", "python-loop", "small-products"),
    "unfused-elementwise": ("not-fused",),
    "copies": ("copies",),
    "float64": ("float64",),
    "casts": ("casts",),
    "layout": ("copies", "channels-first"),
    "attention": ("attention",),
    "recomputation": ("recomputation",),
    "padding": ("padding",),
    "memory-spike": ("spike",),
    "threads": ("threads",),
    "debug-setting": ("debugging",),
    "optimizer": ("optimizer",),
    "leak": ("leak", "grad-recorded"),
    "grad": ("grad-recorded",),
    "train-mode": ("train-mode", "random"),
    "start-up": ("built-in-call", "first-call", "loading"),
}

if __name__ == "__main__":
    main()
