"""Are the numbers those of Holistic Trace Analysis (traceinsight) under its own definitions, on every trace given?

    python bench/trace_equal.py TRACE...
    python bench/trace_equal.py TRACE --tracelens REPORT_CSVS

Runs the reference and `fettle.trace.hta` on each trace and compares: temporal breakdown, kernel types, kernel
statistics (with no row folded into "others"), overlap, idle labels, launch statistics, queue lengths; its sort is
made a stable one, as otherwise the processor decides which of two events of one microsecond comes first. Then says
where the exact analyses differ, and by how much. Exit code 1 where a number differs.

With --tracelens, the folder of tables that TraceLens wrote about the one trace: FLOPs and bytes of a call, calls and
device time of each product, convolution and attention by the shapes of its inputs, beside `fettle.trace.product_table`.
Two differences are ones of definition, and told apart: TraceLens counts the additions of a bias as well, and half of a
causal attention; fettle counts products, and all of them, as `torch.utils.flop_counter` does.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "src"))

from trace_common import child, reference_python  # noqa: E402 - the paths above come first

from fettle.trace import account_total, load, product_table, time_account  # noqa: E402
from fettle.trace.analyses import hta  # noqa: E402

THEIRS = """
import functools, json, logging, sys
import pandas
pandas.DataFrame.sort_values = functools.partialmethod(pandas.DataFrame.sort_values, kind='stable')
logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
a = TraceAnalysis(trace_files={0: sys.argv[1]})
out = {}
def put(name, f):
    try: out[name] = json.loads(json.dumps(f(), default=float))
    except Exception as error: out[name] = {'error': type(error).__name__ + ': ' + str(error)[:120]}
rows = lambda d: d.reset_index().to_dict('records')
put('temporal', lambda: rows(a.get_temporal_breakdown(visualize=False)))
put('overlap', lambda: rows(a.get_comm_comp_overlap(visualize=False)))
put('types', lambda: rows(a.get_gpu_kernel_breakdown(visualize=False, num_kernels=10**6, duration_ratio=1.0)[0]))
put('kernels', lambda: rows(a.get_gpu_kernel_breakdown(visualize=False, num_kernels=10**6, duration_ratio=1.0)[1]))
put('idle', lambda: rows(a.get_idle_time_breakdown(visualize=False)[0]))
put('launches', lambda: rows(a.get_cuda_kernel_launch_stats(visualize=False)[0]))
def queue():
    d = a.get_queue_length_time_series()[0]
    return [{'stream': int(s), 'count': len(p), 'mean': float(p.queue_length.mean()),
             'max': int(p.queue_length.max())} for s, p in d.groupby('stream')]
put('queue', queue)
print(json.dumps(out))
"""


def compare(trace: Any, theirs: dict[str, Any]) -> tuple[int, list[str], list[str]]:
    """How many numbers are equal, which differ, and which questions the reference failed to answer."""
    equal, wrong, failed = 0, [], []

    def check(what: str, ours: Any, other: Any, tolerance: float = 0.006) -> None:
        nonlocal equal
        missing = ours is None and (other is None or other != other)
        if missing or (ours is not None and other is not None and abs(float(ours) - float(other)) <= tolerance):
            equal += 1
        else:
            wrong.append(f"{what}: fettle {ours}, reference {other}")

    def answered(name: str) -> bool:
        if isinstance(theirs[name], dict):
            failed.append(f"{name}: {theirs[name]['error']}")
            return False
        return True

    if answered("temporal"):
        found = hta.temporal_breakdown(trace).row(0, named=True)
        for ours, name in (
            ("idle_us", "idle_time(us)"),
            ("compute_us", "compute_time(us)"),
            ("non_compute_us", "non_compute_time(us)"),
            ("kernel_us", "kernel_time(us)"),
        ):
            check(name, found[ours], theirs["temporal"][0][name])
    if answered("overlap"):
        check("overlap", hta.communication_overlap(trace), theirs["overlap"][0]["comp_comm_overlap_pctg"])
    if answered("types"):
        types = dict(hta.kernel_types(trace).iter_rows())
        for row in theirs["types"]:
            check(row["kernel_type"], types.pop(row["kernel_type"], 0), row["sum"])
        check("kernel types that only fettle has", len(types), 0)
    if answered("kernels"):
        kernels = {(r["name"], r["kernel_type"]): r for r in hta.kernel_statistics(trace).to_dicts()}
        for row in theirs["kernels"]:
            mine = kernels.pop((row["name"], row["kernel_type"]), {})
            for ours, name in (
                ("sum_us", "sum (us)"),
                ("max_us", "max (us)"),
                ("min_us", "min (us)"),
                ("mean_us", "mean (us)"),
            ):
                check(f"{row['name'][:50]} {name}", mine.get(ours), row[name], 0.01)
        check("kernels that only fettle has", len(kernels), 0)
    if answered("idle"):
        idle = {(r["stream"], r["idle_category"]): r["idle_us"] for r in hta.idle_breakdown(trace).to_dicts()}
        for row in theirs["idle"]:
            check(
                f"idle {row['stream']} {row['idle_category']}",
                idle.get((int(row["stream"]), row["idle_category"])),
                row["idle_time"],
            )
    if answered("launches"):
        launches = hta.launch_statistics(trace)
        check("launches", launches.height, len(theirs["launches"]))
        names = {"call_ns": "cpu_duration", "duration_ns": "gpu_duration", "delay_ns": "launch_delay"}
        for ours, name in names.items():
            check(f"launches {name}", launches[ours].sum() // 1000, sum(r[name] for r in theirs["launches"]))
    if answered("queue"):
        queue = {r["stream"]: r for r in hta.queue_summary(trace).to_dicts()}
        for row in theirs["queue"]:
            for name in ("count", "mean", "max"):
                check(f"queue {row['stream']} {name}", queue.get(row["stream"], {}).get(name), row[name])
    return equal, wrong, failed


def by_definition(operator: str, shapes: str, ours: float, theirs: float) -> bool:
    """Whether GFLOP of a call differ by a bias' additions, or by the half that a causal mask leaves out."""
    if operator == "aten::addmm":
        (rows, _), (_, columns) = json.loads(shapes)[1:3]
        return abs(theirs - ours - rows * columns / 1e9) <= 1e-4 * theirs
    return "attention" in operator and abs(ours - 2 * theirs) <= 1e-4 * theirs


def products(trace: Any, folder: Path) -> tuple[int, int, list[str]]:
    """How many numbers are TraceLens' own, how many differ by definition, and which others differ; operators that only
    one of the two knows are named."""
    ours: dict[tuple[str, str], list[float]] = {}
    for row in product_table(trace).to_dicts():
        mine = ours.setdefault((row["operator"], json.dumps(json.loads(row["shapes"]))), [0.0, 0.0, 0.0, 0.0])
        mine[0], mine[1] = row["flops"] / 1e9, row["bytes"] / 2**20
        mine[2], mine[3] = mine[2] + row["count"], mine[3] + row["time_ns"] / 1e3
    theirs: dict[tuple[str, str], list[float]] = {}
    for name in ("GEMM", "CONV_fwd", "CONV_bwd", "SDPA_fwd", "SDPA_bwd"):
        if (folder / f"{name}.csv").exists():
            with (folder / f"{name}.csv").open() as file:
                for told in csv.DictReader(file):
                    key = (told["name"], json.dumps(json.loads(told["Input Dims_first"])))
                    other = theirs.setdefault(key, [0.0, 0.0, 0.0, 0.0])
                    other[0], other[1] = float(told["GFLOPS_first"]), float(told["Data Moved (MB)_first"] or "nan")
                    other[2] += float(told["name_count"])
                    other[3] += float(told["Kernel Time (µs)_sum"])
    equal, defined, wrong = (
        0,
        0,
        [
            f"only {who}: {operator} {shapes}"
            for who, one, two in (("fettle", ours, theirs), ("TraceLens", theirs, ours))
            for operator, shapes in sorted(one.keys() - two.keys())
        ],
    )
    for key in sorted(ours.keys() & theirs.keys()):
        for what, mine, other in zip(("GFLOP", "MiB", "calls", "us"), ours[key], theirs[key], strict=True):
            if abs(mine - other) <= 1e-4 * max(abs(other), 1.0):  # its times are 32 bit floats
                equal += 1
            elif what == "GFLOP" and by_definition(*key, mine, other):
                defined += 1
            else:
                wrong.append(f"{key[0]} {key[1]} {what}: fettle {mine:.6g}, TraceLens {other:.6g}")
    return equal, defined, wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--reference", help="an interpreter that has traceinsight")
    parser.add_argument("--tracelens", type=Path, help="a folder of TraceLens' tables")
    options = parser.parse_args()
    if options.tracelens:
        equal, defined, wrong = products(load(options.traces[0], use_sidecar=False), options.tracelens)
        told = f"{equal} equal, {defined} differ by definition, {len(wrong)} differ"
        print(f"{options.traces[0].name}: {told}", *wrong, sep="\n    ")
        sys.exit(1 if wrong else 0)
    python = reference_python(options.reference)
    total, differing = 0, 0
    for path in options.traces:
        theirs = child(python, THEIRS, str(path))
        if "error" in theirs:
            print(f"{path.name}: the reference cannot open it: {theirs['error']}")
            continue
        trace = load(path, use_sidecar=False)
        equal, wrong, failed = compare(trace, theirs)
        total, differing = total + equal, differing + len(wrong)
        print(f"{path.name}: {equal} numbers equal, {len(wrong)} differ; the reference fails on {len(failed)} of 7")
        for line in [*wrong[:10], *(f"reference fails: {f}" for f in failed)]:
            print("   ", line)
        exact(trace)
    print(f"{total} equal, {differing} differ")
    sys.exit(1 if differing else 0)


def exact(trace: Any) -> None:
    """Busy time in nanoseconds beside the rounded one."""
    rounded = hta.temporal_breakdown(trace)
    if rounded.height and trace.device_keys:
        account = account_total(time_account(trace))
        busy = (
            account.select(busy=sum(account[c] for c in ("compute_ns", "exposed_communication_ns", "exposed_copy_ns")))
            .sum()
            .item()
        )
        theirs = rounded["kernel_us"][0] - rounded["idle_us"][0]
        print(
            f"    exact busy time {busy / 1e3:.3f} us in the steps; rounded {theirs} us "
            "(steps kept by the reference, sync events in)"
        )


if __name__ == "__main__":
    main()
