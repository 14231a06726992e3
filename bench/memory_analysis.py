"""How long does the memory room take, and are its numbers right?

    python bench/memory_analysis.py                      # synthetic snapshots up to a million events
    python bench/memory_analysis.py --snapshots FOLDER   # also the published ones, against their known values

Every size is analysed in a process of its own (so that its peak memory is its own), in turn with two yardsticks on the
same file: a bare `pickle.load`, and PyTorch's own viewer (`torch.cuda._memory_viz`), which writes a page that needs the
network. Exit code 1 if a limit is not met or a value differs.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = (125_000, 250_000, 500_000, 1_000_000)
LIMIT_SECONDS = 15.0
LIMIT_BYTES = 2 << 30
LINEAR_WITHIN = 1.5
"""Time for eight times the events, divided by eight times the time: at most this."""

# File -> reserved, allocated, requested, non-releasable, releasable, largest free, events, segment allocs, segment
# frees, start, peak, frees from before the window. None: not stated. Computed by an independent replay.
KNOWN: dict[str, tuple[int | None, ...]] = {
    "from_process_start": (
        3781165056,
        31719936,
        31719428,
        528219648,
        3221225472,
        536870912,
        97,
        9,
        0,
        0,
        3249143816,
        0,
    ),
    "forward_warmup": (
        *(19667091456, 19498420224, 19352504320, 168671232, 0, 4194304),
        *(4657, 289, 0, 13628553216, 19352504320, 0),
    ),
    "train_step_emptycache": (
        *(61025026048, 54756295168, 54619652100, 3383049728, 2885681152, 104857600),
        *(20128, 791, 780, 13696976896, 54824462340, 0),
    ),
    "train_512": (
        *(12660506624, 6838108672, 6829260804, 1051377152, 4771020800, 83886080),
        *(22332, 1, 0, 5095567360, 12426629128, 438),
    ),
    "torch20_history_full_cache": (
        *(11844714496, 11840159744, 11840159744, 4554752, 0, 2080768),
        *(1, None, None, None, None, None),
    ),
    "bare_list": (3649044480, 3353639424, 3308174782, 295405056, 0, 31457280, 0, *(None,) * 5),
}
FIELDS = (
    *("reserved", "allocated", "requested", "non_releasable", "releasable", "largest_free"),
    *("events", "segment_allocs", "segment_frees", "start", "peak", "frees_from_before"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--snapshots", type=Path, help="folder with the published snapshots")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_measure(*arguments.child)))
        return 0
    failures = _known_values(arguments.snapshots) if arguments.snapshots else []
    known = None if arguments.snapshots is None else {"files": list(KNOWN), "failures": list(failures)}
    with tempfile.TemporaryDirectory() as folder:
        rows, missed = _speed(Path(folder), arguments.rounds)
    failures += missed
    if arguments.json:
        data = {"known_values": known, "rounds": arguments.rounds, "sizes": rows, "failures": failures}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0


def _known_values(folder: Path) -> list[str]:
    from fettle.memory import analyse, read
    from fettle.memory.snapshot import Action

    failures = []
    for name, expected in KNOWN.items():
        analysis = analyse(read(folder / f"{name}.pickle"))
        window, actions = analysis.replay, analysis.replay.trace.action
        found = (
            analysis.reserved_bytes,
            sum(pool.allocated_bytes for pool in analysis.pools),
            sum(pool.requested_bytes for pool in analysis.pools),
            analysis.non_releasable_bytes,
            analysis.releasable_bytes,
            max(pool.largest_free_bytes for pool in analysis.pools),
            len(window.trace),
            int((actions == Action.SEGMENT_ALLOC).sum()),
            int((actions == Action.SEGMENT_FREE).sum()),
            window.start_bytes,
            window.peak_bytes,
            window.frees_from_before,
        )
        wrong = [
            f"{name}: {field} is {have}, expected {want}"
            for field, have, want in zip(FIELDS, found, expected, strict=True)
            if want is not None and have != want
        ]
        wrong += [f"{name}: {analysis.unexplained_bytes} bytes of the peak have no holder"] * bool(
            analysis.unexplained_bytes
        )
        wrong += [f"{name}: {len(analysis.violations)} broken invariants"] * bool(analysis.violations)
        print(f"{name:28s} {'differs' if wrong else 'all values equal to the byte'}")
        failures += wrong
    failures += _decisions(folder)
    _without_old_frees(folder)
    synthetic = analyse(read(folder / "synthetic_mosaic.pickle"))
    dynamic = synthetic.replay.peak_bytes - synthetic.replay.start_bytes
    print(f"{'synthetic_mosaic':28s} dynamic peak {dynamic}, {len(synthetic.violations)} broken invariants")
    if dynamic != 2255398132 or len(synthetic.violations) != 20:
        failures.append("synthetic_mosaic: dynamic peak 2255398132 and 20 broken invariants were expected")
    calm = analyse(read(folder / "inference_512.pickle"))
    if not calm.leaks.judged or calm.leaks.leaks or calm.replay.start_bytes != calm.replay.end_bytes:
        failures.append("inference_512: no leak was expected")
    return failures


def _without_old_frees(folder: Path) -> None:
    """What a peak comes to that leaves out blocks from before the window which are freed in it, as some tools do."""
    import numpy as np

    from fettle.memory import analyse, read

    analysis = analyse(read(folder / "train_512.pickle"))
    table, blocks, events = analysis.replay.allocations, analysis.snapshot.blocks, len(analysis.replay.trace)
    born = table.birth >= 0
    change = np.zeros(events + 1, np.int64)
    np.add.at(change, table.birth[born], table.size_bytes[born])
    np.add.at(change, table.death[born], -table.size_bytes[born])
    throughout = table.address[~born & (table.death >= events)]
    static = int(blocks.size_bytes[np.isin(blocks.address, throughout) & (blocks.state != 0)].sum())
    peak = int(np.cumsum(change)[:events].max()) + static
    exact = analysis.replay.peak_bytes
    print(f"train_512: peak {exact}; leaving out frees of older blocks it would be {peak} ({peak / exact - 1:+.1%})")


def _decisions(folder: Path, requests: int = 60) -> list[str]:
    """Would each request have fitted? The trace tells what the real allocator did: fetch a segment first, or not."""
    import numpy as np

    from fettle.memory import analyse, read, would_fit
    from fettle.memory.moments import state_at
    from fettle.memory.snapshot import Action

    random_numbers, asked, wrong = np.random.default_rng(0), 0, []
    for name in ("from_process_start", "forward_warmup", "train_step_emptycache", "train_512", "inference_512"):
        analysis = analyse(read(folder / f"{name}.pickle"))
        trace = analysis.replay.trace
        allocs = np.flatnonzero(trace.action == Action.ALLOC)
        allocs = allocs[allocs > 0]
        fetched = trace.action[allocs - 1] == Action.SEGMENT_ALLOC
        for events, back in ((allocs[fetched], 2), (allocs[~fetched], 1)):
            for event in random_numbers.permutation(events)[:requests].tolist():
                then = state_at(analysis.snapshot, analysis.replay, event - back)
                assert then is not None
                size, stream = int(trace.size_bytes[event]), int(trace.stream[event])
                fit = would_fit(then, analysis.device, size, stream=stream, device_free_bytes=1 << 60)
                did = int(trace.size_bytes[event - 1]) if back == 2 else 0
                asked += 1
                if fit.needed_from_device_bytes != did:
                    wrong.append(f"{name}: event {event}: {fit.needed_from_device_bytes} bytes fetched, it was {did}")
    print(f"would it have fitted: {asked - len(wrong)} of {asked} requests as the real allocator decided")
    return wrong


def _speed(folder: Path, rounds: int) -> tuple[list[dict[str, float]], list[str]]:
    """A row for each size, and the limits that were not kept."""
    files = {size: folder / f"{size}.pickle" for size in SIZES}
    for size, file in files.items():
        file.write_bytes(pickle.dumps(synthetic(size), protocol=4))
    seconds: dict[tuple[str, int], list[float]] = {}
    peak: dict[tuple[str, int], int] = {}
    order = [(what, size) for what in ("pickle", "fettle", "torch") for size in SIZES]
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for what, size in order:
            command = [sys.executable, __file__, "--child", what, str(files[size])]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            result = json.loads(done.stdout.splitlines()[-1])
            seconds.setdefault((what, size), []).append(result["seconds"])
            peak[what, size] = max(peak.get((what, size), 0), result["peak_bytes"])
    print(
        f"\n{'events':>10} {'file':>8} {'load':>7} {'fettle':>8} {'torch':>8} {'torch/fettle':>13} {'peak memory':>12}"
    )
    median = {key: statistics.median(values) for key, values in seconds.items()}
    rows = []
    for size in SIZES:
        bare, ours, theirs = (median[what, size] for what in ("pickle", "fettle", "torch"))
        print(
            f"{size:>10,} {files[size].stat().st_size / 1e6:>6.0f}MB {bare:>6.2f}s {ours:>7.2f}s {theirs:>7.2f}s "
            f"{theirs / ours:>12.2f}x {peak['fettle', size] / 2**30:>9.2f}GiB"
        )
        rows.append(
            {
                "events": size,
                "file_bytes": files[size].stat().st_size,
                "pickle_load_s": bare,
                "fettle_s": ours,
                "torch_viewer_s": theirs,
                "fettle_peak_bytes": peak["fettle", size],
            }
        )
    largest = SIZES[-1]
    growth = (median["fettle", largest] / median["fettle", SIZES[0]]) / (largest / SIZES[0])
    print(f"time against linear growth from {SIZES[0]:,} to {largest:,} events: {growth:.2f} (1 is linear)")
    failures = []
    if median["fettle", largest] > LIMIT_SECONDS:
        failures.append(
            f"{largest:,} events took {median['fettle', largest]:.1f} s, the limit is {LIMIT_SECONDS:.0f} s"
        )
    if peak["fettle", largest] > LIMIT_BYTES:
        failures.append(f"{largest:,} events took {peak['fettle', largest] / 2**30:.2f} GiB, the limit is 2 GiB")
    if growth > LINEAR_WITHIN:
        failures.append(f"time grows {growth:.2f} times faster than the events")
    return rows, failures


def _measure(what: str, file: str) -> dict[str, float]:
    """In a process of its own: read, analyse and write the page; imports are not counted, except into memory."""
    page = Path(file).with_suffix(f".{what}.html")
    if what == "fettle":
        from fettle.memory import analyse, read, write_report

        begin = time.perf_counter()
        analysis = analyse(read(file))
        write_report(analysis, page)
        if analysis.violations or analysis.unexplained_bytes or analysis.replay.start_bytes:
            raise SystemExit("the synthetic snapshot contradicts itself")
    elif what == "torch":
        from torch.cuda._memory_viz import trace_plot

        begin = time.perf_counter()
        with open(file, "rb") as opened:
            data = pickle.load(opened)  # our own file, written a moment ago
        page.write_text(trace_plot(data, device=0))
    else:
        begin = time.perf_counter()
        with open(file, "rb") as opened:
            pickle.load(opened)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "peak_bytes": _peak_resident_bytes()}


def _peak_resident_bytes() -> int:
    """Of this program only: what getrusage tells also counts the parent's memory at the moment it forked."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no VmHWM in /proc/self/status: run this on Linux")


def synthetic(events: int, seed: int = 0) -> dict[str, object]:
    """A training-like history of so many events: 500 stacks, steps that allocate, then free in reverse order."""
    rng = random.Random(seed)
    files = [f"/home/user/project/layer_{number}.py" for number in range(25)]
    stacks = [
        [{"name": f"call_{depth}", "filename": files[(number + depth) % 25], "line": number} for depth in range(20)]
        for number in range(500)
    ]
    trace: list[dict[str, object]] = []
    marks: list[dict[str, object]] = []
    address, now = 0x7F0000000000, 1_700_000_000_000_000

    def note(action: str, addr: int, size: int, frames: list[dict[str, object]]) -> None:
        nonlocal now
        now += 7
        trace.append({"action": action, "addr": addr, "size": size, "stream": 0, "time_us": now, "frames": frames})

    held: list[tuple[int, int]] = []
    top = address
    while events - len(trace) >= 3:
        top = address
        for number in range(min(2_000, (events - len(trace)) // 3)):
            size = rng.randrange(512, 4 << 20)
            note("alloc", top, size, stacks[number % 500])
            held.append((top, size))
            top += -(-size // 512) * 512
        while held:
            addr, size = held.pop()
            note("free_requested", addr, size, stacks[0])
            note("free_completed", addr, size, stacks[0])
        marks.append({"stage": "END", "name": "Optimizer.step#SGD.step", "device": 0, "time_us": now})
    while len(trace) < events:
        note("snapshot", 0, 0, [])
    extent = 8 << 30
    segment = {
        "device": 0,
        "address": address,
        "total_size": extent,
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": [{"address": address, "size": extent, "requested_size": 0, "state": "inactive", "frames": []}],
    }
    return {"segments": [segment], "device_traces": [trace], "external_annotations": marks}


if __name__ == "__main__":
    sys.exit(main())
