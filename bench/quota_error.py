"""How well is the time of a call known that a cgroup's quota stopped?

For each model of `busy_workloads.py`, as given and by a recipe, a slice outside a quota of one and a half cores and one
under it in turn, as this host changes its times from minute to minute. Under it each thread that computes has a core
of its own, and what is taken out is what a race takes out (`held_up_ns`). `QUOTA_ERROR` is from here.

    python bench/quota_error.py             # six minutes; nothing else may run meanwhile; cgroups must be writable
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from busy import HERE, _join, others, quota
from busy_estimators import prepared

from fettle.machine import this_machine
from fettle.measure._waits import Waits, busiest, held_up_ns, one_core_each, ran_ns, waited_ns, without_waits

CASES = (
    "t5", "t5 runtime=openvino", "t5 compile=default freeze=on grad=inference_mode", "distilbert",
    "distilbert runtime=openvino", "resnet", "resnet runtime=openvino", "mlp", "mlp runtime=openvino",
    "mlp grad=inference_mode threads=1",
)  # fmt: skip
SLICE_S, CHUNK_NS, ROUNDS = 0.25, 10_000_000, 24


def measure(case: str) -> dict[str, float]:
    """Elapsed time under the quota over that outside it, and the same of what a race takes it for: medians of the
    rounds, and the scatter of the latter (a median absolute deviation, of a normal sample's size)."""
    run, waits, rows = prepared(case), Waits(), []

    def one_slice(threads: list[int]) -> tuple[float, float]:
        """Median call, and what a race takes it for, in ns."""
        calls, chunks = [], []
        with one_core_each(threads):
            run()
            waits.refresh()
            end, before = time.perf_counter() + SLICE_S, waits.by_thread()
            count, chunk = 0, time.perf_counter_ns()
            while not calls or time.perf_counter() < end:
                began = time.perf_counter_ns()
                run()
                calls.append(time.perf_counter_ns() - began)
                if time.perf_counter_ns() - chunk >= CHUNK_NS:
                    after, new = waits.by_thread(), calls[count:]
                    ran = ran_ns(before, after, computing) if os.getpid() not in computing else ()
                    held_ns = held_up_ns(sum(new), waited_ns(before, after), at_once=True, ran=ran)
                    chunks.append((len(new), sum(new), held_ns))
                    before, count, chunk = after, len(calls), time.perf_counter_ns()
        return statistics.median(calls), without_waits(chunks)

    with torch.inference_mode():
        for _ in range(5):
            run()
        waits.refresh()
        before = waits.by_thread()
        run()
        run()
        computing = busiest(before, waits.by_thread())
        with quota("quota of 1.5 cores") as processes:
            everybody = processes.parent.parent / processes.name
            for _ in range(ROUNDS):
                _join(everybody)
                quiet_ns, _ = one_slice([])
                _join(processes)
                time.sleep(0.12)  # what it had before is used up or given back
                elapsed_ns, taken_for_ns = one_slice(computing)
                rows.append((quiet_ns / 1e6, elapsed_ns / quiet_ns, taken_for_ns / quiet_ns))
            _join(everybody)
    quiet_ms, elapsed, taken_for = (statistics.median(column) for column in zip(*rows, strict=True))
    scatter = 1.4826 * statistics.median(abs(row[2] - taken_for) for row in rows)
    return {"quiet_ms": round(quiet_ms, 2), "elapsed": round(elapsed, 3), "taken for": round(taken_for, 3),
            "scatter": round(scatter, 3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="in this process; without, each in one of its own")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "quota_error.json")
    options = parser.parse_args()
    if options.case is not None:
        options.output.write_text(json.dumps(measure(options.case)))
        return
    found = {}
    for case in CASES:
        if (load := others().others) > 0.1:
            parser.error(f"others have {load:.0%} of the cores: nothing is measured")
        part = options.output.with_suffix(".part")
        command = [sys.executable, __file__, "--case", case, "--output", str(part)]
        subprocess.run(command, check=True, start_new_session=True)
        found[case] = json.loads(part.read_text())
        print(case, found[case], flush=True)
        part.unlink()
    errors = [row["taken for"] - 1 for row in found.values()]
    summary = {"mean": round(statistics.mean(errors), 4), "scatter": round(statistics.stdev(errors), 4)}
    print(summary)
    options.output.write_text(
        json.dumps({"machine": this_machine().summary, "cases": found, "off": summary}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
