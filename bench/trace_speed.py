"""Opening and analysing traces: fettle beside Holistic Trace Analysis (traceinsight), in one run, in turn.

    python bench/trace_speed.py TRACE... [--events 1000000 --events 5000000]
    python bench/trace_speed.py TRACE... --against OLD/src [--runs 9]

Each measurement is a process of its own. Peak memory is that above the process with its libraries loaded, children
included. Prints times and ratios of the same run, the distance to the floor (inflate plus one pass over the bytes),
and growth.

With --against, two versions of fettle: the other one's source tree beside this one's, in turn, by the CPU time of each
part, which neighbours on the machine disturb far less than they do the wall time. Ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from trace_common import child, reference_python, repeat

MEASURE = """
import json, resource, sys, time
def peak():
    own = int(next(l for l in open('/proc/self/status') if l.startswith('VmHWM')).split()[1]) / 1024
    return own
def timed(f):
    t = time.perf_counter(); r = f(); return time.perf_counter() - t, r
"""

OURS = (
    MEASURE
    + """
from fettle import trace as T
before = peak()
opened, trace = timed(lambda: T.load(sys.argv[1], use_sidecar=False))
memory = peak() - before + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
steps = {
    'temporal_breakdown': lambda: T.time_account(trace),
    'idle_breakdown': lambda: [T.idle_summary(trace, d) for d in trace.device_keys],
    'kernel_breakdown': lambda: (T.kernel_table(trace), T.kernel_classes(trace)),
    'overlap': lambda: (T.overlap(trace), T.collective_table(trace)),
    'launch_stats': lambda: T.launch_stats(trace),
    'queue_summary': lambda: T.queue_summary(trace),
    'memory_bandwidth': lambda: T.bandwidth_summary(trace),
}
parts = {name: timed(step)[0] for name, step in steps.items()}
critical, path = timed(lambda: T.critical_path(trace))
print(json.dumps({'open_s': opened, 'peak_mb': memory, 'events': trace.events.height, 'parts': parts, 'critical_s':
critical,
                  'nodes': 2 * int((trace.is_host | trace.is_device).sum()), 'covered': path.wall_ns}))
"""
)

THEIRS = (
    MEASURE
    + """
import logging; logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
before = peak()
opened, a = timed(lambda: TraceAnalysis(trace_files={0: sys.argv[1]}))
memory = peak() - before
steps = {
    'temporal_breakdown': lambda: a.get_temporal_breakdown(visualize=False),
    'idle_breakdown': lambda: a.get_idle_time_breakdown(visualize=False),
    'kernel_breakdown': lambda: a.get_gpu_kernel_breakdown(visualize=False),
    'overlap': lambda: a.get_comm_comp_overlap(visualize=False),
    'launch_stats': lambda: a.get_cuda_kernel_launch_stats(visualize=False),
    'queue_summary': lambda: a.get_queue_length_summary(),
    'memory_bandwidth': lambda: a.get_memory_bw_summary(),
}
parts = {}
for name, step in steps.items():
    try: parts[name] = timed(step)[0]
    except Exception as error: parts[name] = None
print(json.dumps({'open_s': opened, 'peak_mb': memory, 'parts': parts}))
"""
)

VERSION = """
import json, resource, sys, time
from fettle import trace as T
def spent():
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
def cpu(f):
    t = spent(); r = f(); return spent() - t, r
path = sys.argv[1]
opened, trace = cpu(lambda: T.load(path, use_sidecar=False))
standard, _ = cpu(lambda: (
    T.time_account(trace), [T.idle_summary(trace, d) for d in trace.device_keys], T.kernel_table(trace),
    T.kernel_classes(trace), T.overlap(trace), T.collective_table(trace), T.launch_stats(trace), T.queue_summary(trace),
    T.bandwidth_summary(trace), T.operator_table(trace)))
after, _ = cpu(lambda: T.critical_path(trace))
fresh = T.load(path, use_sidecar=False)
alone, found = cpu(lambda: T.critical_path(fresh))
asked, _ = cpu(lambda: T.what_if(fresh, 'kernels', kernels='.', factor=0.5, path=found))
print(json.dumps({'open': opened, 'standard analyses': standard, 'critical path, after them': after,
                  'critical path, alone': alone, 'one what-if, after it': asked}))
"""

FLOOR = """
import gzip, json, sys, time
t = time.perf_counter()
f = gzip.open(sys.argv[1]) if sys.argv[1].endswith('.gz') else open(sys.argv[1], 'rb')
n = 0
while block := f.read(8 << 20): n += block.count(b'"ph"')
print(json.dumps({'open_s': time.perf_counter() - t}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument(
        "--events", type=int, action="append", default=[], help="also: each trace repeated to so many events"
    )
    parser.add_argument("--reference", help="an interpreter that has traceinsight")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--against", type=Path, help="another version's source tree, compared with this one")
    options = parser.parse_args()
    if options.against is not None:
        versions(options.traces, options.against, options.runs, options.json)
        return
    python = reference_python(options.reference)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / "src")}
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        for path in options.traces:
            results.append(measure(path.name, path, python, env, options.runs))
        for events in options.events:
            for path in options.traces:
                large = Path(scratch) / f"{path.name.split('.')[0]}-{events}.json"
                repeat(path, large, events)
                results.append(measure(large.name, large, python, env, options.runs))
                large.unlink()
    if options.json:
        print(json.dumps(results))


def versions(traces: list[Path], against: Path, runs: int, as_json: bool) -> None:
    """Two source trees in turn on each trace: CPU seconds of each part, and the ratio of this one to the other."""
    trees = {"this": Path(__file__).parent.parent / "src", "other": against}
    results = []
    for path in traces:
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(runs):
            order = sorted(trees, reverse=number % 2 == 1)
            rounds.append(
                {
                    who: child(sys.executable, VERSION, str(path), env={**os.environ, "PYTHONPATH": str(trees[who])})
                    for who in order
                }
            )
        parts = {}
        for part in rounds[0]["this"]:
            seconds = {who: statistics.median(one[who][part] for one in rounds) for who in trees}
            ratio = statistics.median(one["this"][part] / max(one["other"][part], 1e-3) for one in rounds)
            parts[part] = {**seconds, "ratio": ratio}
            print(
                f"{path.name}, {part}: {seconds['this']:.2f} s, the other {seconds['other']:.2f} s: {ratio:.2f} of it",
                file=sys.stderr,
            )
        results.append({"trace": path.name, "rounds": runs, "cpu_s": parts})
    if as_json:
        print(json.dumps(results))


def measure(name: str, path: Path, python: str, env: dict[str, str], runs: int) -> dict[str, Any]:
    """In turn: ours, the reference, the floor; the best of the runs for each."""
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": [], "floor": []}
    for _ in range(runs):
        found["floor"].append(child(sys.executable, FLOOR, str(path)))
        found["ours"].append(child(sys.executable, OURS, str(path), env=env))
        found["theirs"].append(child(python, THEIRS, str(path)))
    best = {who: min(rs, key=lambda r: r.get("open_s", float("inf"))) for who, rs in found.items()}
    result = {"trace": name, "bytes": path.stat().st_size, **best}
    show(result)  # at once: a long run that is ended by something else has still told what it saw
    return result


def show(r: dict[str, Any]) -> None:
    """Print one trace's measurements and ratios to the terminal (stderr: `--json` has stdout)."""
    with contextlib.redirect_stdout(sys.stderr):
        _show(r)


def _show(r: dict[str, Any]) -> None:
    ours, theirs, floor = r["ours"], r["theirs"], r["floor"]
    print(f"\n{r['trace']}: {r['bytes'] / 2**20:.0f} MiB")
    if "error" in ours:
        print("  fettle failed:", ours["error"])
        return
    standard = sum(ours["parts"].values())
    millions = ours["events"] / 1e6
    print(
        f"  fettle   open {ours['open_s']:.2f} s, +{ours['peak_mb']:.0f} MB, {ours['events']} events; "
        f"floor {floor['open_s']:.2f} s "
        f"({ours['open_s'] / floor['open_s']:.1f}x); standard analyses {standard:.2f} s "
        f"({standard / millions:.2f} s per million); "
        f"critical path {ours['critical_s']:.2f} s ({ours['critical_s'] / ours['nodes'] * 1e6:.2f} s per million nodes)"
    )
    if "error" in theirs:
        print("  reference failed:", theirs["error"])
        return
    print(f"  reference open {theirs['open_s']:.2f} s, +{theirs['peak_mb']:.0f} MB")
    print(
        f"  RATIO    open {theirs['open_s'] / ours['open_s']:.1f}x faster, "
        f"memory {ours['peak_mb'] / max(theirs['peak_mb'], 1):.2f} of it"
    )
    for name, seconds in theirs["parts"].items():
        ratio = "reference failed" if seconds is None else f"{seconds / max(ours['parts'][name], 1e-9):.1f}x"
        print(f"    {name:20s} fettle {ours['parts'][name] * 1e3:8.1f} ms   {ratio}")


if __name__ == "__main__":
    main()
