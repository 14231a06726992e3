"""Is what-if right about a real device? Each program is recorded, asked about, changed for real and recorded again.

    python bench/trace_whatif_device.py --json whatif.json --keep traces/

Kernels that only wait a given number of cycles (`torch.cuda._sleep`) can be made any factor longer or shorter, which
real ones cannot; they run alone, between real ones, on two streams, behind copies, and in a queue that is full. In
turn, five times, a program is recorded as it is and with each change made; what is told from the first is to be within
5% of the second, or to be "cannot tell". Hosts differ from one recording to the next: an answer is called wrong where
at least four of the five lie outside, on the same side. Exit code 1 where one is, 2 where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fettle.machine import this_machine
from fettle.trace import critical_path, load, what_if

CLOSE, TIMES, MOST = 0.05, 5, 4
SPIN = ".*spin_kernel.*"
US = 2000  # cycles in a microsecond, about


class Program:
    """What a program is given: how long its spins are, and whether it waits where it could do without."""

    def __init__(self, factor: float = 1.0, waits: bool = True) -> None:
        self.factor, self.waits = factor, waits

    def spin(self, us: float) -> None:
        torch.cuda._sleep(int(us * US * self.factor))


def alone(program: Program, step: Callable[[], None]) -> None:
    for _ in range(10):
        for _ in range(60):
            program.spin(80)
        step()
    torch.cuda.synchronize()


def full_queue(program: Program, step: Callable[[], None]) -> None:
    """Launches are far quicker than what they launch: thousands wait, more than the queue holds."""
    for _ in range(4):
        for _ in range(1500):
            program.spin(25)
        step()
    torch.cuda.synchronize()


def launch_bound(program: Program, step: Callable[[], None]) -> None:
    """The device waits for the host between the kernels."""
    x = torch.randn(64, 64, device="cuda")
    for _ in range(10):
        for _ in range(100):
            x = (x @ x).tanh()
            program.spin(3)
        step()
    torch.cuda.synchronize()


def read_back(program: Program, step: Callable[[], None]) -> None:
    """The host reads a number in each step, and then works by itself."""
    x, host, kept = torch.randn(512, 512, device="cuda"), torch.randn(256, 256), torch.empty(()).pin_memory()
    for _ in range(20):
        for _ in range(10):
            program.spin(40)
        kept.copy_(x.sum(), non_blocking=not program.waits)
        for _ in range(4):
            host = (host @ host).tanh()
        step()
    torch.cuda.synchronize()


def two_streams(program: Program, step: Callable[[], None]) -> None:
    """Real products on one stream beside spins on another, which meet at an event."""
    side, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    for _ in range(10):
        with torch.cuda.stream(side):
            for _ in range(4):
                program.spin(100)
        for _ in range(6):
            x = (x @ x) / 2048
        torch.cuda.current_stream().wait_stream(side)
        program.spin(50)
        side.wait_stream(torch.cuda.current_stream())
        step()
    torch.cuda.synchronize()


def copies(program: Program, step: Callable[[], None]) -> None:
    """Pinned memory on its way to the device by a stream of its own while spins run; each step needs the copy."""
    host = torch.randn(16, 1024, 1024).pin_memory()
    device, side = torch.empty_like(host, device="cuda"), torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(side):
            device.copy_(host, non_blocking=True)
        for _ in range(10):
            program.spin(150)
        torch.cuda.current_stream().wait_stream(side)
        device.sum()
        side.wait_stream(torch.cuda.current_stream())
        step()
    torch.cuda.synchronize()


def training(program: Program, step: Callable[[], None]) -> None:
    """A transformer's training step, with a spin after each layer."""
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, device="cuda") for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        layer.register_forward_hook(lambda *_: program.spin(1000))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    kept = torch.empty(()).pin_memory()
    for _ in range(8):
        loss = model(torch.randn(16, 512, 1024, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.copy_(loss.detach(), non_blocking=not program.waits)
        step()
    torch.cuda.synchronize()


PROGRAMS = (alone, full_queue, launch_bound, read_back, two_streams, copies, training)
CHANGES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("kernels", {"kernels": SPIN, "factor": 0.5}, {"factor": 0.5}),
    ("kernels", {"kernels": SPIN, "factor": 2.0}, {"factor": 2.0}),
    ("no_syncs", {}, {"waits": False}),
)


def record(run: Callable[..., None], program: Program, path: Path) -> None:
    run(Program(0.01), lambda: None)  # kernels are loaded, memory is there
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        run(program, profiler.step)
    profiler.export_chrome_trace(str(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for one trace of each program")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device here", file=sys.stderr)
        return 2
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for run in PROGRAMS:
            changes = [one for one in CHANGES if one[0] != "no_syncs" or run in (read_back, training)]
            found: list[list[tuple[float, float, float, bool]]] = [[] for _ in changes]
            for number in range(TIMES):
                path = Path(scratch) / f"{run.__name__}{number}.json.gz"
                record(run, Program(), path)
                trace = load(path)
                given = critical_path(trace)
                if options.keep and number == 0:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    (options.keep / path.name).write_bytes(path.read_bytes())
                for (change, question, made), kept in zip(changes, found, strict=True):
                    answer = what_if(trace, change, path=given, **question)
                    changed = Path(scratch) / "changed.json.gz"
                    record(run, Program(**made), changed)
                    truth = critical_path(load(changed)).wall_ns
                    kept.append((given.wall_ns / 1e6, answer.estimate_ns / 1e6, truth / 1e6, answer.cannot_tell))
            for (change, _, made), kept in zip(changes, found, strict=True):
                off = sorted(answer / truth - 1 for _, answer, truth, _ in kept)
                given_ms, answer_ms, truth_ms = (statistics.median(one[at] for one in kept) for at in range(3))
                unsure = sum(one[3] for one in kept)
                over, under = sum(one > CLOSE for one in off), sum(one < -CLOSE for one in off)
                row = {
                    "program": run.__name__, "change": change, **made, "given_ms": given_ms, "answer_ms": answer_ms,
                    "truth_ms": truth_ms, "off": off, "cannot_tell": unsure,
                    "wrong": max(over, under) >= MOST and unsure < MOST,
                }  # fmt: skip
                rows.append(row)
                print(
                    f"{run.__name__:13}{change:9}{made!s:18}{given_ms:8.2f} ms -> {answer_ms:8.2f} ms, truly "
                    f"{truth_ms:8.2f} ms ({statistics.median(off):+.1%}; {off[0]:+.1%} to {off[-1]:+.1%})"
                    f"{f' cannot tell in {unsure} of {TIMES}' if unsure else ''}{' WRONG' if row['wrong'] else ''}",
                    flush=True,
                )
    wrong = [row for row in rows if row["wrong"]]
    made_of = {"machine": this_machine().summary, "torch": torch.__version__, "rows": rows, "wrong": len(wrong)}
    if options.json:
        options.json.write_text(json.dumps(made_of, indent=1) + "\n")
    print(f"{len(rows)} questions, {len(wrong)} answered wrongly")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
