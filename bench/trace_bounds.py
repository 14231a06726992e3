"""Do the bounds hold that a diagnosis reads from a trace alone, with no program to run again?

    python bench/trace_bounds.py                                    # planted programs; needs a quiet machine
    python bench/trace_bounds.py --pair before.json.gz after.json.gz
    python bench/trace_bounds.py --event-cost                       # what recording one event costs here

Planted programs (bench/diagnosis_cases/) whose cause a trace of a CPU can show are recorded and the traces diagnosed.
Then the mended twin is raced against the planted one, without a profiler. The planted cause must be the first finding,
and its bound must not lie below the gain's 95% interval. A pair are traces of the same loop before and after the input
was mended: the first finding of the first must be data-wait, its bound no less than what was achieved, and the second
must not claim it. Exit code 1 where any of this is not so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from diagnosis_cases import Case, all_cases, build, gain

SHOWN = {"data-wait": "data-wait", "launch-bound": "python-bound"}
"""Planted causes that a trace of a CPU can show, and the trace rule that says so."""


def record(target: str, path: str, calls: int = 6) -> None:
    """The child: some calls of a planted program under the profiler."""
    from fettle.trace import record as recorded

    workload = build(target)
    with recorded(path, warmup=2, active=calls) as profiler:
        for _ in range(calls + 2):
            for batch in workload.inputs:
                workload.run(workload.model, batch)
            profiler.step()


def diagnose_trace(path: Path) -> list[dict[str, Any]]:
    from fettle.diagnose import diagnose, diagnosis_json

    return diagnosis_json(diagnose(path))["findings"]


def planted(case: Case, rule: str, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        subprocess.run([sys.executable, __file__, "--record", case.target(), str(path)], check=True, timeout=120)
        found = diagnose_trace(path)
    first = found[0] if found else None
    measured = gain(case, seconds)
    return {
        "case": case.name,
        "expected": rule,
        "first": first and first["rule"],
        "at_most": first and first["speedup_at_most"],
        "gain": asdict(measured),
        "right": first is not None and first["rule"] == rule,
        "kept": first is not None and measured.low <= 1.02 * first["speedup_at_most"],
    }


def pair(before: Path, after: Path) -> dict[str, Any]:
    from fettle.trace import load, steps

    first, later = diagnose_trace(before), diagnose_trace(after)
    medians = [statistics.median(steps(load(path))["wall_ns"].to_list()) for path in (before, after)]
    at_most, achieved = first[0]["speedup_at_most"] if first else 1.0, medians[0] / medians[1]
    return {
        "case": f"{before.name} -> {after.name}",
        "first": first[0]["rule"] if first else None,
        "at_most": at_most,
        "achieved": achieved,
        "right": bool(first)
        and first[0]["rule"] == "data-wait"
        and "data-wait" not in {finding["rule"] for finding in later},
        "kept": achieved <= at_most,
    }


def event_cost_us(calls: int = 200, operators: int = 200) -> float:
    """Host time that recording one event adds, by many tiny operators with and without the profiler in turn."""
    import torch

    from fettle.trace import load
    from fettle.trace import record as recorded

    x = torch.zeros(4)

    def call() -> float:
        started = time.perf_counter()
        for _ in range(operators):
            x.add(1)
        return time.perf_counter() - started

    costs = []
    for _ in range(5):
        plain = statistics.median(call() for _ in range(calls))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            with recorded(path):
                watched = statistics.median(call() for _ in range(calls))
            events = load(path).events.height / calls
        costs.append((watched - plain) / events * 1e6)
    return max(costs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=6.0, help="time for racing each program against its twin")
    parser.add_argument("--only", default="", help="programs with this in their name")
    parser.add_argument("--pair", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--event-cost", action="store_true", help="only that, in us")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        record(*options.record)
        return 0
    if options.event_cost:
        print(f"{event_cost_us():.2f} us an event")
        return 0
    rows = [pair(*options.pair)] if options.pair else []
    if not options.pair or options.only:
        cases = [case for case in all_cases() if case.cause in SHOWN and options.only in case.name]
        rows += [planted(case, SHOWN[case.cause], options.seconds) for case in cases]
    for row in rows:
        reached = row.get("achieved") or row["gain"]["ratio"]
        words = f"{'right' if row['right'] else 'WRONG'}, bound {'kept' if row['kept'] else 'BROKEN'}"
        print(f"{row['case']}: {row['first']}, at most {row['at_most'] or 1:.2f}x, brought {reached:.2f}x: {words}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["right"] and row["kept"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
