"""Is what-if right about a real device? Each program is recorded, asked about, changed for real and recorded again.

    python bench/trace_whatif_device.py --json whatif.json --keep traces/

Kernels that only wait a given number of cycles (`torch.cuda._sleep`) can be made any factor longer or shorter, which
real ones cannot; they run alone, between real ones, on two streams, behind copies, and in a queue that is full. A
change is asked about in three recordings of the program and made in three others: the answers' middle is to be within
5% of the truth's, or to say that it cannot tell. Exit code 1 where one is not, 2 where there is no CUDA device.
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

CLOSE, TIMES = 0.05, 3
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
    x, host = torch.randn(512, 512, device="cuda"), torch.randn(256, 256)
    for _ in range(20):
        for _ in range(10):
            program.spin(40)
        total = x.sum()
        if program.waits:
            total.item()
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
    layers = [torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, device="cuda") for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    for layer in layers:
        layer.register_forward_hook(lambda *_: program.spin(400))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(8):
        loss = model(torch.randn(16, 256, 512, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if program.waits:
            loss.item()
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
            given = []
            for number in range(TIMES):
                path = Path(scratch) / f"{run.__name__}{number}.json.gz"
                record(run, Program(), path)
                trace = load(path)
                given.append((trace, critical_path(trace)))
                if options.keep and number == 0:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    (options.keep / path.name).write_bytes(path.read_bytes())
            for change, question, made in CHANGES:
                if change == "no_syncs" and run not in (read_back, training):
                    continue
                answers = [what_if(trace, change, path=found, **question) for trace, found in given]
                truths = []
                for number in range(TIMES):
                    path = Path(scratch) / f"{run.__name__}-changed{number}.json.gz"
                    record(run, Program(**made), path)
                    truths.append(critical_path(load(path)).wall_ns)
                answer, truth = (statistics.median(one) for one in ([a.estimate_ns for a in answers], truths))
                unsure = sum(a.cannot_tell for a in answers)
                row = {
                    "program": run.__name__, "change": change, **made,
                    "given_ms": statistics.median(found.wall_ns for _, found in given) / 1e6,
                    "answer_ms": answer / 1e6, "truth_ms": truth / 1e6, "off": answer / truth - 1,
                    "truth_spread": (max(truths) - min(truths)) / truth, "cannot_tell": unsure,
                    "replay_error": statistics.median(a.replay_error for a in answers),
                }  # fmt: skip
                rows.append(row)
                told = f"cannot tell in {unsure} of {TIMES}" if unsure else ""
                print(
                    f"{run.__name__:14}{change:10}{made!s:20}{row['given_ms']:9.2f} ms -> {row['answer_ms']:9.2f} ms, "
                    f"truly {row['truth_ms']:9.2f} ms ({row['off']:+.1%}, spread {row['truth_spread']:.1%}) {told}",
                    flush=True,
                )
    wrong = [row for row in rows if abs(row["off"]) > CLOSE and 2 * row["cannot_tell"] < TIMES]
    found = {"machine": this_machine().summary, "torch": torch.__version__, "rows": rows, "wrong": len(wrong)}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(rows)} questions, {len(wrong)} more than {CLOSE:.0%} off")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
