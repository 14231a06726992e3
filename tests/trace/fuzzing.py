"""Mutated traces through every question: no crash, no hang, no memory without bound.

    python -m tests.trace.fuzzing [--first 0] [--count 10000] [--state fuzz.json]

Half of the cases are changed byte by byte, so that reading is tried; half event by event (lost, doubled, moved, tied to
others), so that they are read and the questions are tried. Every case is its seed: the same number is the same trace,
so that a failure can be run again alone (`--first N --count 1`) and a run that was ended goes on where it stopped
(`--state`). `fuzz_atheris` starts a coverage-guided run from the same traces.
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
from collections import Counter
from pathlib import Path
from typing import Any

from fettle import trace as T
from fettle.errors import UsageError
from fettle.trace.analyses import hta
from fettle.trace.analyses.idle import missing_information
from tests.trace.build import Build, training
from tests.trace.simulator import Op, Program, document, simulate

CASE_SECONDS = 20
COMMANDS = [
    "health", "check", "steps", "account", "account --own-end", "idle", "idle --step 1", "kernels", "occupancy",
    "flops", "launches", "comm", "queue", "bandwidth", "operators", "tree", "sequences", "annotations", "counters",
    "critical", "critical --step 0", "whatif", "whatif --kernels . --factor 0.5", "memory", "host", "hta",
]  # fmt: skip
TOLD_EVERY = 10
"""Of so many cases one also goes through a command of the command line."""
GROWTH_BYTES = 1 << 30
MOST_BYTES = 16 << 30  # of address space: what asks for more ends in a MemoryError, not in the machine's own end
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
    made = [b.text().encode() for b in (training(2), graph, host, old, triton)]
    return made + [json.dumps(document(p, simulate(p))).encode() for p in programs()]


def programs() -> list[Program]:
    """A full queue beside a graph and a copy that blocks; two streams and a thread for the backward."""
    full, beside = [], []
    for step in range(2):
        full += [Op("step"), *(Op("launch", 4.0, kernels=(("gemm", 40.0),)) for _ in range(12))]
        full += [Op("graph", 12.0, kernels=(("norm", 9.0),) * 3), Op("copy", 4.0, kernels=(("Memcpy DtoH", 3.0),))]
        beside += [Op("step"), Op("data", 30.0), Op("launch", 4.0, kernels=(("gemm", 60.0),)), Op("hand", 9.0)]
        for number in range(4):
            event = 10 * step + number
            beside += [Op("launch", 4.0, kernels=(("gemm", 30.0),), thread=2), Op("record", event=event, thread=2)]
            beside.append(Op("wait", event=event, stream=20, thread=2))
            beside.append(Op("launch", 4.0, 20, (("ncclDevKernel_AllReduce", 50.0),), thread=2))
        beside += [Op("hand", 9.0, thread=2), Op("item", 4.0, kernels=(("Memcpy DtoH", 2.0),))]
    end = Op("sync_device")
    return [Program((*full, end), depth=4), Program((*beside, end), told=True)]


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


NAMES = ["cudaDeviceSynchronize", "cudaGraphLaunch", "cudaMemcpyAsync", "ProfilerStep#1", "Memcpy DtoH", "ncclKernel",
         "cudaStreamWaitEvent", "enumerate(DataLoader)#_I.__next__", "autograd::engine::evaluate_function: X",
         "cudaLaunchKernel", "gc", "", "x" * 300, "<script>alert(1)</script>", "a\u2028b \\ \" '"]  # fmt: skip
CATEGORIES = ["cpu_op", "kernel", "cuda_runtime", "user_annotation", "gpu_memcpy", "python_function", "cuda_sync",
              "overhead", "gpu_user_annotation", "gpu_memset", "cuda_driver", "Trace", "unheard_of"]  # fmt: skip
ODD: list[Any] = [
    0,
    -1,
    1,
    7,
    2**31,
    2**63 - 1,
    -(2**63),
    0.5,
    1e15,
    1e-9,
    None,
    "",
    "7",
    "stream 7",
    True,
    [],
    {},
    [[1]],
]


def rearrange(text: bytes, seed: int) -> bytes:
    """Events lost, doubled, out of order, moved in time, to other threads, streams and devices, tied to other launches;
    odd values in fields that have a meaning. What comes out is JSON, and mostly a trace.
    """
    rng = random.Random(seed)
    whole = json.loads(text)
    events: list[dict[str, Any]] = whole["traceEvents"]
    for _ in range(rng.randint(1, 5)):
        some = rng.sample(events, max(1, int(len(events) * rng.choice((0.02, 0.2, 0.8))))) if events else []
        kind = rng.randrange(11)
        if kind == 0:
            events = [e for e in events if e not in some] or events[:1]
        elif kind == 1:
            events = events + [dict(e) for e in some]
        elif kind == 2:
            rng.shuffle(events)
        elif kind == 3:  # one sort of event on another clock
            cat, by = rng.choice(CATEGORIES), rng.choice((-1e6, -50.0, -0.5, 0.5, 30.0, 1e6, 1e12))
            for e in events:
                if e.get("cat") == cat and isinstance(e.get("ts"), (int, float)):
                    e["ts"] += by
        elif kind == 4:
            for e in some:
                e["dur"] = rng.choice((0, 0.001, 1, 1e4, 1e9, 1e15, -3, None))
        elif kind == 5:
            field, value = rng.choice(("tid", "pid", "cat", "name", "ph", "ts")), rng.choice(ODD)
            for e in some:
                e[field] = value
        elif kind in (6, 7):
            field = rng.choice(("correlation", "stream", "device", "External id", "Sequence number", "bytes"))
            same = rng.random() < 0.5 and rng.choice(ODD)
            for e in some:
                if isinstance(e.get("args"), dict):
                    e["args"][field] = same if same is not False else rng.choice(ODD)
        elif kind == 8:
            for e in some:
                e["name"] = rng.choice(NAMES)
        elif kind == 9:
            for e in some:
                e["cat"] = rng.choice(CATEGORIES)
        else:
            value = rng.choice((None, [], "x", {"args": {"args": 1}}, 5))
            for e in some:
                e["args"] = value
    whole["traceEvents"] = events
    if rng.random() < 0.05:
        whole["traceEvents"] = rng.choice(({"0": events}, None, [events], [*events, None, 3, "x", []]))
    return json.dumps(whole).encode()


def case(seed: int) -> bytes:
    """The bytes of one case's file: one in eight gzipped, of those half damaged after packing."""
    change = rearrange if seed % 2 else mutate
    data = change(SEEDS[seed // 2 % len(SEEDS)], seed)
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
    T.sm_efficiency(trace)
    T.kernels_by_sm(trace)
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
    T.identities(trace)


def tell(path: Path, seed: int) -> None:
    """One command of `fettle trace` on the file, as a person calls it: 0, 1, or 2 with its one line."""
    from typer.testing import CliRunner

    from fettle.cli.trace import app

    name, *more = random.Random(seed).choice(COMMANDS).split()
    json_too = ["--json"] if seed % 3 == 0 else []
    done = CliRunner().invoke(app, [name, str(path), *more, *json_too])
    if done.exception is not None and not isinstance(done.exception, (SystemExit, UsageError)):
        raise done.exception


def run_cases(first: int, count: int, folder: Path, state: Path | None = None) -> list[str]:
    """Run seeds first to first + count; returns what failed, one line each.

    `state` remembers where it is: a seed in which the process itself died is told of when the run goes on.
    """
    failed: list[str] = []
    next_seed = first
    if state is not None and state.exists():
        kept = json.loads(state.read_text())
        next_seed, failed = max(first, int(kept["next"])), list(kept["failed"])
        if "running" in kept:
            failed.append(f"seed {kept['running']}: the process died")
            next_seed = max(next_seed, kept["running"] + 1)
    path = folder / "t.json"
    started, before = time.monotonic(), _peak_bytes()

    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {CASE_SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    for seed in range(next_seed, first + count):
        path.write_bytes(case(seed))
        if state is not None:
            state.write_text(json.dumps({"next": seed, "running": seed, "failed": failed}))
        signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
        try:
            answer_everything(path)
            if seed % TOLD_EVERY == 0:
                tell(path, seed)
        except Exception as error:
            failed.append(f"seed {seed}: {type(error).__name__}: {str(error)[:200]}")
        except BaseException:
            if state is not None:
                state.write_text(json.dumps({"next": seed, "failed": failed}))
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        if _peak_bytes() - before > GROWTH_BYTES:
            failed.append(f"seed {seed}: memory grew by more than {GROWTH_BYTES >> 20} MiB")
            before = _peak_bytes()
        if state is not None:
            state.write_text(json.dumps({"next": seed + 1, "failed": failed}))
        if seed % 250 == 249 or seed == first + count - 1:
            left = (time.monotonic() - started) / (seed + 1 - next_seed) * (first + count - seed - 1)
            print(f"{seed + 1 - first} of {count}, {len(failed)} failed, {left:.0f} s left", file=sys.stderr)
    return failed


class Ended(BaseException):
    """The run was asked to end; nothing that a command catches, as it would a SystemExit."""


def _end(*_: Any) -> None:
    raise Ended


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--state", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    with tempfile.TemporaryDirectory() as folder:
        try:
            failed = run_cases(options.first, options.count, Path(folder), options.state)
        except Ended:
            sys.exit("ended; --state goes on from here")
    print("\n".join(failed))
    kinds = Counter(line.split(": ")[1] for line in failed)
    told = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    print(f"{options.count} mutated traces: {told or 'none crashed, hung or grew'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
