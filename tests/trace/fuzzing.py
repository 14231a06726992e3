"""Mutated traces through every question: no crash, no hang, no memory without bound.

    python -m tests.trace.fuzzing [--first 0] [--count 10000] [--state fuzz.json]

Every case is its seed: the same number is the same trace, so that a failure can be run again alone (`--first N --count
1`) and a run that was ended goes on where it stopped (`--state`). `fuzz_atheris` starts a
coverage-guided run from the same traces.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import resource
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fettle import trace as T
from fettle.errors import UsageError
from fettle.trace.analyses import hta
from fettle.trace.analyses.idle import missing_information
from tests.trace.build import Build, training

CASE_SECONDS = 20
GROWTH_BYTES = 1 << 30
HOSTILE_NUMBERS = [
    b"-1", b"0", b"1e308", b"1e400", b"99999999999999999999999", b"null", b'"x"', b"[]", b"{}", b"0.5", b"true",
    b"-9223372036854775808", b"9223372036854775807", b"9e14", b"1623142623529071.123", b"4294967295", b"NaN", b"-0.0",
]  # fmt: skip
HOSTILE_WORDS = [
    b'"ph"', b'"name"', b'"\\ud800"', b'"\xff"', b'""', b"1", b'"X"', b'"i"', b'"kernel"', b'"cuda_runtime"',
    b'"cpu_op"',
    b'"traceEvents"', b'"cuda_sync"', b'"[memory]"', b'"ProfilerStep#1"', b'"overhead"', b'"gpu_memcpy"', b'"stream"',
]  # fmt: skip
PIECES = [
    b"[" * 50,
    b"{" * 50,
    b"]",
    b"}",
    b'"',
    b"\\",
    b"\x00",
    b",,",
    b"}, {",
    b'{"ph": "X"}, ',
    b"]}",
    b"\xef\xbb\xbf",
]


def seeds() -> list[bytes]:
    """Small traces of every sort: steps with collectives, a graph, a CPU alone, memory, Triton, old categories."""
    graph = Build()
    graph.step(0, 1000, 200).call("cudaGraphLaunch", 1010, 20, correlation=5)
    for i in range(4):
        graph.add("kernel", f"k{i}", 1040 + 20 * i, 15, pid=0, tid=7, device=0, stream=7, correlation=5)
    graph.call("cudaStreamSynchronize", 1100, 60)
    graph.add("cuda_sync", "Stream Sync", 1100, 60, stream=4294967295, cuda_sync_kind="Stream Sync")
    host = Build()
    for i in range(3):
        host.step(i, 1000 + 100 * i, 100).op("aten::linear", 1005 + 100 * i, 50).op("aten::to", 1010 + 100 * i, 9)
        host.add("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 1060 + 100 * i, 30)
        host.op("autograd::engine::evaluate_function: MmBackward0", 1030 + 100 * i, 30, tid=2, **{"Sequence number": i})
        host.add(
            "cpu_instant_event", "[memory]", 1011 + 100 * i, 0, ph="i", Addr=i, Bytes=64, **{"Total Allocated": 64}
        )
    old = Build()
    old.add("Operator", "aten::mm", 1000, 50, tid="7").add(
        "Runtime", "cudaLaunchKernel", 1010, 5, correlation=3, tid="7"
    )
    old.add("Kernel", "void gemm<4>(int)", 1020, 30, pid=0, tid="stream 7", device=0, stream=7, correlation=3)
    triton = training(1)
    triton.op(
        "triton_poi_fused_0", 1500, 20, stream=0, kernel_file="/tmp/x.py", kernel_hash="abc", **{"Call stack": "a;b"}
    )
    triton.kernel("triton_poi_fused_0", 1530, 10, call=1505, launch="cuLaunchKernelEx")
    return [b.text().encode() for b in (training(2), graph, host, old, triton)]


SEEDS = seeds()


def mutate(text: bytes, seed: int) -> bytes:
    """Bytes flipped, cut, doubled and inserted; numbers, words and whole fields replaced by hostile ones."""
    rng = random.Random(seed)
    data = bytearray(text)
    for _ in range(rng.randint(1, 6)):
        kind = rng.randrange(8)
        at = rng.randrange(len(data)) if data else 0
        if kind == 0 and data:
            data[at] = rng.randrange(256)
        elif kind == 1:
            del data[at : at + rng.randint(1, 200)]
        elif kind == 2:
            data[at:at] = data[at : at + rng.randint(1, 300)]
        elif kind == 3:
            _replace(data, rng, rb"-?\d+(\.\d+)?", HOSTILE_NUMBERS)
        elif kind == 4:
            _replace(data, rng, rb'"[A-Za-z_ ]+"', HOSTILE_WORDS)
        elif kind == 5:
            data[at:at] = rng.choice(PIECES)
        elif kind == 6:  # one value of every event that has the field
            field = rng.choice([b"ts", b"dur", b"tid", b"pid", b"correlation", b"stream", b"device", b"bytes"])
            value = rng.choice(HOSTILE_NUMBERS)
            data = bytearray(re.sub(rb'("%s": )-?[\d.]+' % field, lambda m: m.group(1) + value, bytes(data)))  # noqa: B023
        else:  # clocks moved, by event
            data = bytearray(
                re.sub(
                    rb'("ts": )(\d+)',
                    lambda m: m.group(1) + b"%d" % (int(m.group(2)) + rng.randrange(-90, 90)),
                    bytes(data),
                )
            )
    return bytes(data)


def _replace(data: bytearray, rng: random.Random, pattern: bytes, values: list[bytes]) -> None:
    found = list(re.finditer(pattern, bytes(data)))
    if found:
        one = rng.choice(found)
        data[one.start() : one.end()] = rng.choice(values)


def case(seed: int) -> bytes:
    """The bytes of one case's file: one in eight gzipped, of those half damaged after packing."""
    data = mutate(SEEDS[seed % len(SEEDS)], seed)
    if seed % 8 == 3:
        data = gzip.compress(data)
        data = mutate(data, seed) if seed % 16 == 3 else data
    return data


def answer_everything(path: Path) -> None:
    """Every question. Nothing may be raised but a UsageError."""
    try:
        trace = T.load(path, use_sidecar=False)
    except UsageError:
        return
    T.trace_health(trace)
    T.time_account(trace)
    for device in trace.device_keys:
        T.idle_summary(trace, device)
        missing_information(trace, device)
    T.idle_streams(trace)
    T.product_summary(T.product_table(trace))
    hta.idle_breakdown(trace)
    hta.launch_statistics(trace)
    T.kernel_table(trace)
    T.kernel_classes(trace)
    T.overlap(trace)
    T.queue_summary(trace)
    T.copy_bandwidth(trace)
    T.bandwidth_summary(trace)
    T.collective_table(trace)
    T.arrival([trace, trace])
    T.attribute_kernels(trace)
    T.operator_table(trace)
    T.call_tree(trace)
    T.annotation_table(trace)
    T.memory_peak(trace)
    T.host_summary(trace)
    T.data_loading(trace)
    T.operator_sizes(trace)
    T.threads(trace)
    found = T.critical_path(trace)
    T.path_shares(trace, found)
    for change in ("no_syncs", "perfect_overlap", "graph", "data_ready"):
        T.what_if(trace, change, path=found)
    T.compare(trace, trace)


def run_cases(first: int, count: int, folder: Path, state: Path | None = None) -> list[str]:
    """Run seeds first to first + count; returns what failed, one line each. `state` remembers where it is."""
    failed: list[str] = []
    next_seed = first
    if state is not None and state.exists():
        kept = json.loads(state.read_text())
        next_seed, failed = max(first, int(kept["next"])), list(kept["failed"])
    path = folder / "t.json"
    started, before = time.monotonic(), _peak_bytes()

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {CASE_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    for seed in range(next_seed, first + count):
        path.write_bytes(case(seed))
        signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
        try:
            answer_everything(path)
        except Exception as error:
            failed.append(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if _peak_bytes() - before > GROWTH_BYTES:
            failed.append(f"seed {seed}: memory grew by more than {GROWTH_BYTES >> 20} MiB")
            before = _peak_bytes()
        if seed % 250 == 249 or seed == first + count - 1:
            if state is not None:
                state.write_text(json.dumps({"next": seed + 1, "failed": failed}))
            left = (time.monotonic() - started) / (seed + 1 - next_seed) * (first + count - seed - 1)
            print(f"{seed + 1 - first} of {count}, {len(failed)} failed, {left:.0f} s left", file=sys.stderr)
    return failed


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--state", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        failed = run_cases(options.first, options.count, Path(folder), options.state)
    print("\n".join(failed) or f"{options.count} mutated traces: none crashed, hung or grew")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
