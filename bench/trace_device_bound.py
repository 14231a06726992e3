"""Are what-if and critical path right, where the truth is known?

    python bench/trace_device_bound.py                   # 500 random programs
    python bench/trace_device_bound.py --first 500 --count 1500 --json out.json
    python bench/trace_device_bound.py --pair workers0.json.gz workers4.json.gz

Random programs (hosts, streams, queues from 2 to 4,096 deep, threads, events, blocking calls, graphs) are simulated by
tests/trace/simulator.py, which shares no code with the analysis, and written as traces. The simulator is run again
with the change that what-if is asked about: 95% of the answers must be within 5% of that, and the others say that they
cannot tell. The critical path must be made of what the longest path of the simulated program is made of, within 5
points; where two reasons came so close together that the trace does not show which was the last, of what lies between
the two paths that it then tells of, within 1 point. With --pair, two traces of one loop, the second with its data
ready: what-if from the first against the second.
Exit code 1 where any of this is not so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.path.insert(0, str(HERE.parent / "src"))

from fettle.trace import critical_path, load, path_shares, steps, what_if  # noqa: E402 - the paths above come first
from tests.trace.simulator import composition, random_change, random_program, simulate, write  # noqa: E402

CLOSE, BETWEEN = 0.05, 0.01
WORK = ("compute", "communication", "copy")
WAITING = ("launch_latency", "stream_event", "between_kernels", "inside_graph", "queued_unknown", "blocking_call")


def ask(seed: int, folder: Path) -> dict[str, Any]:
    """One program: how far what-if and the path are from the truth."""
    program = random_program(seed)
    outcome = simulate(program)
    trace = load(write(program, outcome, folder / "trace.json"), use_sidecar=False)
    change, question, asked = random_change(seed)
    path = critical_path(trace)
    answer = what_if(trace, change, path=path, **question)
    truth = simulate(program, asked).length
    true_path = composition(outcome)
    found, low, high = (dict.fromkeys(true_path, 0.0) for _ in range(3))
    for category, _, share, least, most in path_shares(trace, path).iter_rows():
        name = category if category in WORK else "waiting" if category in WAITING else "host"
        found[name] += share
        low[name] += least
        high[name] += most
    outside = (max(low[name] - share, share - high[name], 0.0) for name, share in true_path.items())
    return {
        "seed": seed,
        "change": change,
        **question,
        "depth": program.depth,
        "measured_us": outcome.length,
        "truth_us": truth,
        "estimate_us": answer.estimate_ns / 1e3,
        "off": answer.estimate_ns / 1e3 / truth - 1,
        "cannot_tell": answer.cannot_tell,
        "path_off": max(abs(found[name] - share) for name, share in true_path.items()),
        "range_off": max(outside),
        "range": max(high[name] - low[name] for name in true_path),
        "true_path": true_path,
        "path": found,
    }


def pair(before: Path, after: Path) -> dict[str, Any]:
    """How long a step is said to be with its data ready, and how long it was then."""
    first, second = load(before), load(after)
    median = statistics.median(steps(second)["wall_ns"].to_list())
    said = [what_if(first, "data_ready", step=step) for step in steps(first)["step"].to_list()]
    estimate = statistics.median(answer.estimate_ns for answer in said)
    return {
        "before_ms": statistics.median(steps(first)["wall_ns"].to_list()) / 1e6,
        "said_ms": estimate / 1e6,
        "after_ms": median / 1e6,
        "off": estimate / median - 1,
        "cannot_tell": any(answer.cannot_tell for answer in said),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first program's seed")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--pair", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.pair:
        row = pair(*options.pair)
        print(", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))
        if options.json:
            names = {"before": options.pair[0].name, "after": options.pair[1].name}
            options.json.write_text(json.dumps(names | row, indent=1) + "\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        rows = [ask(seed, Path(folder)) for seed in range(options.first, options.first + options.count)]
    told = [row for row in rows if not row["cannot_tell"]]
    wrong = [row for row in told if abs(row["off"]) > CLOSE]
    open_ = [row for row in rows if row["path_off"] > CLOSE and row["range_off"] <= BETWEEN and row["range"] > CLOSE]
    astray = [row for row in rows if row["path_off"] > CLOSE and row not in open_]
    for row in sorted(wrong, key=lambda r: -abs(r["off"]))[:20]:
        said, true = row["estimate_us"], row["truth_us"]
        print(f"seed {row['seed']}, {row['change']} {row.get('kernels', '')} {row.get('factor', '')}: "
              f"{row['measured_us']:.0f} us, said {said:.0f}, true {true:.0f} ({row['off']:+.1%})")  # fmt: skip
    for row in sorted([*astray, *open_], key=lambda r: -r["path_off"])[:20]:
        parts = ", ".join(f"{name} {row['path'][name]:.0%} ({share:.0%})" for name, share in row["true_path"].items())
        print(f"seed {row['seed']}, path off by {row['path_off']:.1%}: {parts}")
    right = len(told) - len(wrong)
    print(
        f"{len(rows)} programs: what-if within {CLOSE:.0%} in {right} ({right / len(rows):.1%}), "
        f"cannot tell in {len(rows) - len(told)}, wrong in {len(wrong)}; "
        f"critical path within 5 points in {len(rows) - len(astray) - len(open_)}, between its two bounds in "
        f"{len(open_)}, wrong in {len(astray)} (a range of more than 5 points is told in "
        f"{sum(row['range'] > CLOSE for row in rows)})"
    )
    if options.json:
        found = {
            "first_seed": options.first,
            "programs": len(rows),
            "what_if": {"within": right, "cannot_tell": len(rows) - len(told), "wrong": len(wrong)},
            "path": {"within": len(rows) - len(astray) - len(open_), "between": len(open_), "wrong": len(astray)},
            "told_a_range": sum(row["range"] > CLOSE for row in rows),
            "not_within": [row for row in rows if row in wrong or row in astray or row in open_ or row["cannot_tell"]],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if right >= 0.95 * len(rows) and not wrong and not astray else 1


if __name__ == "__main__":
    raise SystemExit(main())
